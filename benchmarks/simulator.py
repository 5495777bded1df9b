"""Measure the simulator: a million updates of ten thousand learners, each of one gradient.

    python benchmarks/simulator.py [--rounds 3] [--learners 10000] [--updates 1000000]

`no link`: three quarters of the events are computations. `links`: weights and gradients of 360 kB
go through links of 10 Gbit/s to a server with 400 Gbit/s, which is near its limit. Both start with
newly drawn times. simpy's own part is a heap of as many events as there are learners.
"""

import argparse
import time

from measuring import spread, write

from largebatch.lab.protocols.cluster import Cluster, Link
from largebatch.lab.protocols.compute_times import Exponential
from largebatch.lab.protocols.rule import Rule
from largebatch.lab.protocols.simulator import simulate


def main() -> None:
    """Measure, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--learners", type=int, default=10_000)
    parser.add_argument("--updates", type=int, default=1_000_000)
    args = parser.parse_args()
    compute = Exponential(kind="exponential", mean=0.1)
    clusters = {
        "no link": Cluster(learners=args.learners, compute=compute),
        "links": Cluster(
            learners=args.learners,
            compute=compute,
            link=Link(bandwidth=1.25e9, latency=1e-4),
            server_link=Link(bandwidth=50e9, latency=1e-4),
            model_bytes=360e3,
        ),
    }
    rule = Rule(learners=args.learners, gradients=1, waits=False)
    wall: dict[str, list[float]] = {name: [] for name in clusters}
    processor: dict[str, list[float]] = {name: [] for name in clusters}
    simulated = {}
    for seed in range(args.rounds):
        for name, cluster in clusters.items():
            start, used = time.perf_counter(), time.process_time()
            found = simulate(rule, cluster, servers=1, updates=args.updates, seed=seed)
            wall[name].append(time.perf_counter() - start)
            processor[name].append(time.process_time() - used)
            simulated[name] = found.seconds_per_update
    result = {
        "settings": vars(args),
        "seconds": {name: spread(times) for name, times in wall.items()},
        "processor seconds": {name: spread(times) for name, times in processor.items()},
        "simulated seconds per update": simulated,
    }
    command = (
        f"python benchmarks/simulator.py --rounds {args.rounds} --learners {args.learners} "
        f"--updates {args.updates}"
    )
    print(write("simulator", command, result))


if __name__ == "__main__":
    main()
