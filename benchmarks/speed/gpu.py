"""Run every measurement that needs a GPU, in at most 11 minutes: `make bench-gpu`.

    python -m benchmarks.speed.gpu [PART ...] [--seconds 660] [--rehearse]

The most important part comes first, and each writes its result when it ends. A part is a process of
its own with a time limit, which is cut to the time that is left: its rounds end early enough, and
it is stopped at the limit. A part that fails does not keep the others from being measured; the
command fails at the end. A part is left out and named if something that it needs is not installed
or if less than a third of its limit remains.

APEX_SOURCES names a checkout of NVIDIA's apex, whose kernels the part `apex` builds.

With --rehearse all parts run at tiny sizes, also without a GPU, and no result is kept. Results are
written to benchmarks/results, or to the folder that BENCHMARK_RESULTS names.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from largebatch import accelerator

ROOT = Path(__file__).parents[2]

AROUND = 20.0
"""Seconds of the limit for what is around the parts: importing PyTorch, and the table."""

NO_TIME = "not measured: no time left"

TIMM = "1.0.31"
"""Version of timm that targets are stated for; results hold the installed one."""


@dataclass(frozen=True, slots=True)
class Part:
    """One process: a script of this folder, or pytest, with its arguments."""

    name: str
    share: float
    """Time limit in seconds."""

    words: str
    tiny: str
    """The same in a rehearsal."""

    packages: tuple[str, ...] = ()
    """Packages that it needs beyond the package's own requirements."""

    def command(self, *, rehearse: bool, share: float) -> list[str]:
        """Return the command of this part, its seconds cut as its limit is."""
        factor = min(1.0, share / self.share)
        text = re.sub(
            r"(--(?:seconds|prepares|sweep)) (\S+)",
            lambda found: f"{found[1]} {factor * float(found[2]):.3g}",
            self.tiny if rehearse else self.words,
        )
        script, *words = shlex.split(text)
        module = script if script == "pytest" else f"benchmarks.speed.{script}"
        return [sys.executable, "-m", module, *words]

    def missing(self) -> str | None:
        """Return the reason why this part cannot run; None if it can."""
        if "--folder" in self.words and "LARGEBATCH_DATA" not in os.environ:
            return "not run, LARGEBATCH_DATA is not set"
        absent = [name for name in self.packages if importlib.util.find_spec(name) is None]
        return f"not run, not installed: {', '.join(absent)}" if absent else None


TESTS = "pytest -q -rs --dist loadfile"
TINY_NETWORK = "--model test_resnet --rounds 2 --steps 1 --batch 2 --pixels 32 --matrix 64 --modes"
TINY_LAYER = "--batches 4 --layers 64x8 --spans 2 --rounds 2 --steps 1"


def resnet50(batch: int, share: float) -> Part:
    """Return the part of ResNet-50 at a device batch."""
    name = "resnet50" if batch == 256 else f"resnet50_{batch}"
    words = f"--seconds {share / 4:g} --prepares {share / 2:g} --batch {batch} --name {name}"
    return Part(name, share, f"resnet50 {words}", f"resnet50 --name {name} {TINY_NETWORK}")


def whole_run(name: str, share: float, words: str, tiny: str) -> Part:
    """Return the part of a recipe that is run by the command."""
    words = f"{words} --name {name}"
    tiny = f"{tiny} --name {name} --workers 1 --seeds 1"
    return Part(name, share, f"quickstart {words}", f"quickstart {tiny}")


TINY_RUN = (
    "--images 60 20 --set data.train_samples=60 data.val_samples=20 batch.global_batch=20"
    " 'duration={steps: 3}' schedule.warmup=null polish=null"
)
RESNET50 = resnet50(256, 130)
RESNET50_28 = resnet50(28, 130)
GRAPH = (
    RESNET50_28,
    whole_run(
        "run_airbench",
        90,
        "cifar10_airbench_2000 --folder cifar10 --seconds 60 --workers 1 --set precision=bf16",
        f"cifar10_airbench_2000 --folder cifar10 {TINY_RUN} batch.bn_span=20",
    ),
    whole_run(
        "run_resnet9_fashion_mnist",
        50,
        "fashion_mnist_resnet9_1920 --folder fashion_mnist --seconds 20 --workers 1"
        " --set precision=bf16",
        f"fashion_mnist_resnet9_1920 --folder fashion_mnist {TINY_RUN} batch.bn_span=10",
    ),
    whole_run(
        "run_resnet9_cifar10",
        50,
        "cifar10_resnet9_1600 --folder cifar10 --seconds 20 --workers 1",
        f"cifar10_resnet9_1600 --folder cifar10 {TINY_RUN} batch.bn_span=10",
    ),
    Part("loop", 40, "loop --seconds 15", "loop --rounds 1 --steps 1"),
    RESNET50,
    resnet50(40, 75),
    resnet50(64, 75),
)
"""Updates and whole runs in CUDA graphs: `make bench-gpu BENCH_PARTS=graph`, in 640 seconds."""

PARTS = (
    Part(
        "kernels",
        80,
        "pytest -q -rs -n 8 tests/models/test_batchnorm_kernels.py tests/optim/test_lars_fast.py"
        " -k 'kernels or table or sums'",
        "pytest -q tests/models/test_batchnorm_kernels.py -k 'bits or compiler'",
        packages=("pytest", "xdist"),
    ),
    Part(
        "norm",
        60,
        "norm --channels-last --precision bf16 --rounds 50 --seconds 15 --batch 256 --spans 32 8"
        " --layers 64x112 64x56 256x56 128x28 512x28 256x14 1024x14 512x7 2048x7",
        "norm --channels-last --precision bf16 --rounds 2 --model test_resnet --batch 4 --size 32"
        " --spans 4 2 --layers 64x4 --layer-spans 2",
    ),
    Part("lars", 45, "lars --seconds 15", "lars --rounds 2"),
    RESNET50,
    RESNET50_28,
    Part(
        "polish",
        50,
        "polish --images 4096 --batch 256 --seconds 24",
        "polish --images 8 --batch 4 --rounds 1",
    ),
    Part("roofline", 100, "roofline --seconds 50 --compiled", f"roofline {TINY_LAYER}"),
    Part(
        "tests",
        150,
        f"{TESTS} -n 4 tests/test_cuda.py tests/training/test_real_accelerator.py"
        " tests/polish/test_polish_cuda.py tests/distributed/test_nccl.py",
        f"{TESTS} -n 0 tests/training/test_real_accelerator.py",
        packages=("pytest", "xdist", "hypothesis"),
    ),
    *(part for part in GRAPH if part not in {RESNET50, RESNET50_28}),
    Part(
        "sweep",
        60,
        "roofline --sweep 35 --layers 256x56 512x28 --rounds 3 --steps 5",
        f"roofline --sweep 2 {TINY_LAYER}",
    ),
    Part("apex", 180, "with_apex --seconds 15", "with_apex --rounds 2"),
    Part(
        "input_gpu",
        120,
        "input_gpu --seconds 50",
        "input_gpu --rounds 2 --steps 2 --images 256 --batches 64 --jpeg-batch 8",
    ),
)


def main() -> None:
    """Run the parts, print their outcomes, and exit with 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    groups = {"graph": [part.name for part in GRAPH]}
    parser.add_argument(
        "parts", nargs="*", metavar="PART", help=f"of {', '.join([*groups, *names])}"
    )
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="at tiny sizes, also without a GPU; no result is kept",
    )
    parser.add_argument("--seconds", type=float, default=660, help="time limit of all parts")
    args = parser.parse_args()
    args.parts = [name for part in args.parts for name in groups.get(part, [part])]
    if unknown := sorted(set(args.parts) - set(names)):
        parser.error(f"no such part: {', '.join(unknown)}; the parts are {', '.join(names)}")
    if not (args.rehearse or accelerator.count()):
        sys.exit("torch sees no GPU; --rehearse runs every part at tiny sizes without one")
    if (found := importlib.metadata.version("timm")) != TIMM:
        print(f"timm {found} is measured; targets are for timm {TIMM}", flush=True)
    of_name = {part.name: part for part in PARTS}
    chosen = [of_name[name] for name in dict.fromkeys(args.parts or names)]
    end = time.monotonic() + args.seconds - AROUND
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    outcomes = {}
    with tempfile.TemporaryDirectory() as scratch:
        if args.rehearse:
            environment["BENCHMARK_RESULTS"] = scratch
        if not accelerator.count():
            environment |= {"BENCHMARK_INTERPRETS": "1", "TRITON_INTERPRET": "1"}
        for part in chosen:
            share = 600 if args.rehearse else min(part.share, end - time.monotonic())
            command = part.command(rehearse=args.rehearse, share=share)
            outcomes[part.name] = part.missing() or (
                run(command, share, environment) if share >= part.share / 3 else NO_TIME
            )
            print(f"{part.name}: {outcomes[part.name]}", flush=True)
    if not args.rehearse and "BENCHMARK_RESULTS" not in os.environ:
        subprocess.run([sys.executable, "-m", "benchmarks.speed.table"], cwd=ROOT, check=True)
    if late := [name for name, outcome in outcomes.items() if outcome == NO_TIME]:
        print(f"to measure the rest: make bench-gpu BENCH_PARTS='{' '.join(late)}'")
    print("\n".join(f"{name:>10}: {outcome}" for name, outcome in outcomes.items()))
    sys.exit(any(outcome.startswith(("failed", "stopped")) for outcome in outcomes.values()))


def run(command: list[str], share: float, environment: dict[str, str]) -> str:
    """Run a command in the root of the repository; return its outcome.

    With it ends every process that it has started.
    """
    print(f"\n--- {shlex.join(command[1:])} (at most {share:.0f} seconds)", flush=True)
    path = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    start = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env={**environment, "PYTHONPATH": path}, start_new_session=True
    )
    try:
        code = process.wait(timeout=share)
    except subprocess.TimeoutExpired:
        return f"stopped, for it had not ended in {share:.0f} seconds"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - start
    return f"{f'failed with {code}' if code else 'done'} in {seconds:.0f} of {share:.0f} seconds"


if __name__ == "__main__":
    main()
