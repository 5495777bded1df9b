"""Measure a server's seconds by bytes, and simulate the speed-up of the installed studies.

    python benchmarks/speed_up.py [--measure]

Needs the extra `studies`. For the network of each study of STUDIES, on one core: the processor
seconds of a gradient by samples, as staleness_times.py fits them, and what a parameter server takes
to copy the weights, to add a gradient to the mean and to update, each over their bytes. `machines`
of the studies have about these figures. Then their speed-up by learners, with exactly these figures
and the links of the study: GRADIENTS gradients with each of SEEDS seeds, under their own times, and
without the time of the server for comparison. Writes
benchmarks/results/speed_up_<machine>_<date>.json and the figure of docs/studies/staleness.md.
--measure simulates nothing and prints.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import write
from torch.nn import functional as F

from largebatch.distributed.serial import Serial
from largebatch.lab.protocols.cluster import Serving
from largebatch.lab.protocols.rule import Rule
from largebatch.lab.protocols.server import ParameterServer
from largebatch.lab.studies.queue.study import base_recipe
from largebatch.lab.studies.staleness.pictures import write_speed_up
from largebatch.lab.studies.staleness.speed_up import SpeedUp, speed_ups
from largebatch.lab.studies.staleness.study import StalenessStudy, load_study
from largebatch.models.of_recipe import build_model
from largebatch.recipe.recipe import Recipe
from largebatch.runs.optimizer_of_recipe import build_optimizer

STUDIES = {"rudra": (4, 16, 32, 128), "rudra-imagenette": (2, 4, 8, 16)}
"""Installed studies, and the mini-batches whose gradients are timed."""

SEEDS = 5
GRADIENTS = 6_000
ROUNDS = 30
Panels = dict[str, dict[str, dict[int, dict[str, float]]]]
FIGURE = Path(__file__).parents[1] / "docs" / "staleness-speed-up.png"


def main() -> None:
    """Measure, simulate and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true", help="simulate nothing, and print")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    measured, simulated = {}, {}
    for name, mini_batches in STUDIES.items():
        study = load_study(name)
        assert study.speed_up is not None
        recipe = base_recipe(study.recipes[study.speed_up.recipe], Path())
        measured[name] = {**seconds_of_gradients(recipe, mini_batches), **serving(recipe)}
        if not args.measure:
            study = on_measured(study, measured[name])
            found = simulate(study)
            simulated[name] = {
                "machines": study.machines.model_dump(mode="json"),
                "speed-up": by_panel(found),
                "speed-up where the server takes no time": by_panel(
                    simulate(without_serving(study))
                ),
            }
            if name == next(iter(STUDIES)):
                write_speed_up(found, FIGURE)
    if args.measure:
        print(json.dumps(measured, indent=1))
        return
    result = {"seeds": SEEDS, "gradients": GRADIENTS, "measured": measured, "studies": simulated}
    print(write("speed_up", "python benchmarks/speed_up.py", result))
    for name, each in simulated.items():
        print(name, *table(each["speed-up"]), sep="\n")


def table(panels: Panels) -> Iterator[str]:
    """Yield the rows of the tables of docs/studies/staleness.md."""
    learners = list(
        dict.fromkeys(n for lines in panels.values() for line in lines.values() for n in line)
    )
    yield f"| times, mini-batch | protocol | {' | '.join(map(str, learners))} |"
    yield "|---" * (len(learners) + 2) + "|"
    for panel, lines in panels.items():
        for protocol, line in lines.items():
            means = (f"{line[number]['mean']:.1f}" for number in learners)
            yield f"| {panel} | {protocol} | {' | '.join(means)} |"


def seconds_of_gradients(recipe: Recipe, mini_batches: tuple[int, ...]) -> dict[str, Any]:
    """Return the median seconds of a gradient by samples, and their fit."""
    model = build_model(recipe, Serial().device)
    side = recipe.data.image_size
    medians = {}
    for mu in mini_batches:
        images, labels = torch.randn(mu, 3, side, side), torch.randint(10, (mu,))

        def gradient(images: torch.Tensor = images, labels: torch.Tensor = labels) -> None:
            F.cross_entropy(model(images), labels).backward()
            model.zero_grad()

        medians[mu] = median_seconds(gradient)
    weights = [1 / seconds for seconds in medians.values()]
    sample, overhead = np.polyfit([*medians], [*medians.values()], 1, w=weights)
    return {
        "seconds of a gradient": medians,
        "fitted": {"overhead": float(overhead), "sample": float(sample)},
    }


def serving(recipe: Recipe) -> dict[str, Any]:
    """Return the seconds of a server for its parts, over the bytes of the weights."""
    model = build_model(recipe, Serial().device)
    weights = list(model.parameters())
    size = sum(weight.nbytes for weight in weights)
    gradient = [0.01 * torch.randn_like(weight) for weight in weights]
    flat = torch.empty(sum(weight.numel() for weight in weights))
    seconds = {}
    for takes in (1, 11):
        server = ParameterServer(
            weights, build_optimizer(recipe, model, Serial()), lambda _: 1e-6,
            Rule(learners=takes, gradients=takes, waits=False),
        )  # fmt: skip

        def update(server: ParameterServer = server, takes: int = takes) -> None:
            for learner in range(takes):
                server.push(learner, server.clock, gradient)

        seconds[takes] = median_seconds(update)
        server.arrivals.clear()
    added = (seconds[11] - seconds[1]) / 10

    def pull() -> None:
        torch.cat([weight.detach().flatten() for weight in weights], out=flat)

    return {
        "bytes of the weights": size,
        "serving": {
            "pull": median_seconds(pull) / size,
            "gradient": added / size,
            "update": (seconds[1] - added) / size,
        },
    }


def median_seconds(call: Callable[[], None]) -> float:
    """Return the median processor seconds of ROUNDS calls, after a few.

    Other programs that wait for the same core do not count.
    """
    found = []
    for _ in range(ROUNDS + 5):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return statistics.median(found[5:])


def on_measured(study: StalenessStudy, measured: dict[str, Any]) -> StalenessStudy:
    """Return a study on machines that take the measured times."""
    serving = Serving(**measured["serving"])
    machines = study.machines.model_copy(update={**measured["fitted"], "serving": serving})
    return study.model_copy(update={"machines": machines})


def simulate(study: StalenessStudy) -> list[SpeedUp]:
    """Return the speed-ups of a study with the seeds and gradients from here."""
    assert study.speed_up is not None
    section = study.speed_up.model_copy(update={"gradients": GRADIENTS})
    return speed_ups(study.model_copy(update={"seeds": SEEDS, "speed_up": section}), Path())


def without_serving(study: StalenessStudy) -> StalenessStudy:
    """Return a study whose server takes no time, with its most learners alone."""
    assert study.speed_up is not None
    machines = study.machines.model_copy(update={"serving": None})
    most = (max(study.speed_up.learners),)
    section = study.speed_up.model_copy(update={"learners": most})
    return study.model_copy(update={"machines": machines, "speed_up": section})


def by_panel(found: list[SpeedUp]) -> Panels:
    """Return the intervals by times and mini-batch, protocol and learners."""
    result: Panels = {}
    for one in found:
        line = result.setdefault(one.panel, {}).setdefault(one.protocol, {})
        line[one.cell.learners] = one.over_alone._asdict()
    return result


if __name__ == "__main__":
    main()
