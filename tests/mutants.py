"""Planted faults in the numerical core, each of which a named test must catch.

    python tests/mutants.py        plant every fault in a copy, run its test, print what happened

`test_mutants.py` does the same under pytest. First the same tests must pass in a copy without a
fault; then a test catches one by failing for what it asserts. A fault that is missed means that its
test has stopped looking; a text that is no longer found means that the code has moved on and the
fault must follow.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent

SEEN = ("AssertionError", "ValueError", "DID NOT RAISE")
"""What a test says that saw a wrong number, or an error of ours."""

BROKEN = ("NameError", "ImportError", "SyntaxError")
"""What Python says of code that no test had to look at."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One fault: in `module`, `find` becomes `put`, and `test` must fail."""

    name: str
    module: str
    find: str
    put: str
    test: str


MUTANTS = (
    Mutant(
        "the loss is not divided by the global batch",
        "train.py",
        "criterion(model(images), labels) / global_batch",
        "criterion(model(images), labels)",
        "test_crown.py::test_four_micro_batches_on_one_worker_match_plain_pytorch",
    ),
    Mutant(
        "gradients of the step before stay in the buffers",
        "train.py",
        "        reducer.zero()\n",
        "",
        "test_crown.py::test_four_micro_batches_on_one_worker_match_plain_pytorch",
    ),
    Mutant(
        "the reducer sends during the first micro-batch",
        "train.py",
        "if micro == accumulation - 1:",
        "if micro == 0:",
        "test_crown.py::test_workers_and_micro_batches_match_plain_pytorch_on_torch",
    ),
    Mutant(
        "the running statistics of a skipped step count",
        "train.py",
        "spans.discard()",
        "spans.update()",
        "test_precision.py::test_a_skipped_step_changes_no_weight_momentum_or_statistic",
    ),
    Mutant(
        "the rate does not enter the buffer",
        "lars.py",
        "into=lr if rate_inside else 1.0",
        "into=1.0",
        "test_lars_referees.py::test_reference_is_mlperfs_formula_in_numpy",
    ),
    Mutant(
        "fujitsu's ratio forgets the peak rate",
        "lars.py",
        '(group["base_lr"] if convention == "fujitsu" else 1)',
        "1",
        "test_lars.py::test_fujitsus_decay_is_scaled_by_the_peak_rate",
    ),
    Mutant(
        "the trust ratio forgets weight decay",
        "kernels/fused.py",
        "(g + rule.ratio_decay * w + rule.eps)",
        "(g + rule.eps)",
        "test_lars_referees.py::test_scaled_momentum_is_timms_lars",
    ),
    Mutant(
        "moments of the step before count again",
        "norm.py",
        "for buffer in buffers])))\n        self._moments.zero_()\n",
        "for buffer in buffers])))\n",
        "test_norm.py::test_without_momentum_the_running_statistics_are_the_mean_over_steps",
    ),
    Mutant(
        "the groups of a device batch count as one span",
        "norm.py",
        "self.moments[-1] += len(moments)",
        "self.moments[-1] += 1",
        "test_norm.py::test_running_statistics_move_once_a_step_towards_the_mean_of_all_spans",
    ),
    Mutant(
        "workers that share a span average their variances",
        "norm_functions.py",
        "(variances + (means - mean).square()).mean(0)",
        "variances.mean(0)",
        "test_spans.py::test_workers_that_share_a_span_normalise_it_as_batchnorm_does_the_whole",
    ),
    Mutant(
        "backward divides a shared span's sums by one worker's samples",
        "norm_functions.py",
        "                num *= ctx.group.world_size\n",
        "",
        "test_spans.py::test_workers_that_share_a_span_normalise_it_as_batchnorm_does_the_whole",
    ),
    Mutant(
        "compressed sums are not divided before they are sent",
        "backends/reducer.py",
        "torch.div(self.buffer, divisor, out=self.sent)",
        "self.sent.copy_(self.buffer)",
        "test_reducer.py::test_compressed_sums_do_not_overflow_and_norms_stay_exact",
    ),
    Mutant(
        "a group is sent before its last gradient is there",
        "backends/reducer.py",
        "len(self._groups) and not self._groups[sent].owed:",
        "len(self._groups) and len(self._groups[sent].owed) < 2:",
        "test_crown.py::test_workers_and_micro_batches_match_plain_pytorch_on_torch",
    ),
)


def broken_before(folder: Path) -> str:
    """Return what the tests say in a copy without any fault; nothing if they pass."""
    _copy(folder)
    done = _run(folder, *dict.fromkeys(mutant.test for mutant in MUTANTS))
    return done.stdout + done.stderr if done.returncode else ""


def caught(mutant: Mutant, folder: Path) -> bool:
    """Plant one fault in a copy of the project and return whether its test sees it.

    A copy that does not even run has been broken, not caught: what the test said is printed.
    """
    _copy(folder)
    module = folder / "largebatch" / mutant.module
    source = module.read_text(encoding="utf-8")
    assert source.count(mutant.find) == 1, f"{mutant.module} must hold once: {mutant.find}"
    module.write_text(source.replace(mutant.find, mutant.put), encoding="utf-8")
    done = _run(folder, mutant.test)
    said = done.stdout + done.stderr
    seen = any(word in said for word in SEEN) and not any(word in said for word in BROKEN)
    if done.returncode == 1 and seen:
        return True
    print(said)
    return False


def _copy(folder: Path) -> None:
    for part in ("largebatch", "tests", "recipes"):
        shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "setup.cfg", folder)


def _run(folder: Path, *tests: str) -> "subprocess.CompletedProcess[str]":
    """Run tests in a copy; a long traceback names the error of a bare assert too."""
    options = ["-q", "-x", "-p", "no:cacheprovider", "--no-header", "--no-showlocals", "--tb=long"]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)],
        check=False,
        cwd=folder,  # first on the path, before the installed package
        env={key: value for key, value in os.environ.items() if not key.startswith("COV")},
        capture_output=True,
        text=True,
        timeout=300,
    )


def main() -> int:
    """Print what became of every fault; exit code 1 if one was not caught."""
    with tempfile.TemporaryDirectory() as folder:
        said = broken_before(Path(folder) / "project")
    if said:
        print(said, "the tests fail without a fault", sep="\n")
        return 1
    missed = 0
    for mutant in MUTANTS:
        with tempfile.TemporaryDirectory() as folder:
            found = caught(mutant, Path(folder) / "project")
        missed += not found
        print(f"{'caught' if found else 'MISSED':>8}  {mutant.module}: {mutant.name}", flush=True)
    print(f"{len(MUTANTS) - missed} of {len(MUTANTS)} faults caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
