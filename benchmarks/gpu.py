"""Run every measurement that needs a GPU, in at most 25 minutes: `make bench-gpu`.

    python benchmarks/gpu.py [PART ...] [--rehearse]

Each part is a process of its own with a share of the time: its rounds end early enough, and what
has not ended with its share is stopped. A part that fails does not keep the others from being
measured; the command fails at the end. What is not installed is named and left out.

With --rehearse all parts run at tiny sizes, also without a GPU, and no result is kept. Results lie
in benchmarks/results, or in the folder that BENCHMARK_RESULTS names.
"""

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from largebatch import accelerator

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Part:
    """One process: a script of this folder, or pytest."""

    name: str
    share: float
    """Time limit in seconds."""

    words: str
    tiny: str
    """Arguments of a rehearsal."""

    packages: tuple[str, ...] = ()
    """Packages that it needs beyond the package's own requirements."""

    def command(self, *, rehearse: bool) -> list[str]:
        """Return the command of this part."""
        script = ["-m", "pytest"] if self.name == "tests" else [f"benchmarks/{self.name}.py"]
        return [sys.executable, *script, *(self.tiny if rehearse else self.words).split()]

    def missing(self) -> str | None:
        """Return the reason why this part cannot run; None if it can."""
        absent = [name for name in self.packages if importlib.util.find_spec(name) is None]
        return f"not run, not installed: {', '.join(absent)}" if absent else None


PARTS = (
    Part(
        "tests",
        360,
        "-q -rs tests/test_cuda.py tests/training/test_real_accelerator.py"
        " tests/optim/test_lars_fast.py tests/polish/test_polish_cuda.py"
        " tests/distributed/test_nccl.py",
        "-q -rs tests/training/test_real_accelerator.py",
        packages=("pytest", "hypothesis"),
    ),
    Part(
        "resnet50",
        480,
        "--seconds 120",
        "--model test_resnet --rounds 2 --steps 1 --batch 2 --pixels 32 --matrix 64 --modes",
    ),
    Part(
        "roofline",
        90,
        "--seconds 30",
        "--rounds 2 --steps 1 --copied 1000000 --matrix 64 --batch 4 --pixels 8",
    ),
    Part("lars", 90, "--seconds 30", "--rounds 2"),
    Part(
        "norm",
        120,
        "--channels-last --precision bf16 --rounds 50 --seconds 40",
        "--channels-last --precision bf16 --rounds 2 --model test_resnet --batch 4 --size 32"
        " --spans 4 2 --joined 2",
    ),
    Part("loop", 90, "--seconds 30", "--rounds 1 --steps 1"),
    Part(
        "polish",
        120,
        "--images 8192 --batch 256 --seconds 40",
        "--images 8 --batch 4 --rounds 1",
    ),
    Part(
        "input_gpu",
        150,
        "--seconds 60",
        "--rounds 2 --steps 2 --images 256 --batches 64 --jpeg-batch 8",
    ),
)


def main() -> None:
    """Run the parts, print their outcomes, and exit with 1 if one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(names)}")
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="at tiny sizes, also without a GPU; no result is kept",
    )
    args = parser.parse_args()
    if unknown := sorted(set(args.parts) - set(names)):
        parser.error(f"no such part: {', '.join(unknown)}; the parts are {', '.join(names)}")
    if not (args.rehearse or accelerator.count()):
        sys.exit("torch sees no GPU; --rehearse runs every part at tiny sizes without one")
    chosen = [part for part in PARTS if part.name in (args.parts or names)]
    with tempfile.TemporaryDirectory() as scratch:
        environment = {**os.environ, **({"BENCHMARK_RESULTS": scratch} if args.rehearse else {})}
        outcomes = {
            part.name: part.missing()
            or run(part.command(rehearse=args.rehearse), part.share, environment)
            for part in chosen
        }
    if not args.rehearse and "BENCHMARK_RESULTS" not in os.environ:
        subprocess.run([sys.executable, "benchmarks/table.py"], cwd=ROOT, check=True)
    print("\n".join(f"{name:>10}: {outcome}" for name, outcome in outcomes.items()))
    sys.exit(any(outcome.startswith(("failed", "stopped")) for outcome in outcomes.values()))


def run(command: list[str], share: float, environment: dict[str, str]) -> str:
    """Run a command in the root of the repository; return its outcome.

    With it ends every process that it has started.
    """
    print(f"\n--- {' '.join(command[1:])} (at most {share:g} seconds)", flush=True)
    path = os.pathsep.join([str(ROOT), *filter(None, [environment.get("PYTHONPATH")])])
    start = time.monotonic()
    process = subprocess.Popen(
        command, cwd=ROOT, env={**environment, "PYTHONPATH": path}, start_new_session=True
    )
    try:
        code = process.wait(timeout=share)
    except subprocess.TimeoutExpired:
        return f"stopped, for it had not ended in {share:g} seconds"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    seconds = time.monotonic() - start
    return f"{f'failed with {code}' if code else 'done'} in {seconds:.0f} of {share:g} seconds"


if __name__ == "__main__":
    main()
