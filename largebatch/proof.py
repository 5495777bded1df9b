"""Proof of what makes a GPU fast: kernels and graphs are used where a trial showed that they work.

A trial computes the same thing with a kernel of ours, or a graph, and with PyTorch's operations,
and compares both with the exact result, which is computed in a longer type. What fails, differs by
more than PyTorch's own rounding explains, or is not faster is not used.

Trials run in a process of their own, because an illegal access ends CUDA's context, and a fault of
a compiler its process. A result is kept in the user's cache for this host, device, driver, versions
and source of this package, so that only the first run on a machine pays. A run decides with all of
its workers (`decide`); a process that is no run tries the parts that it uses by itself.

The variable LARGEBATCH_KERNELS=torch switches everything off.
"""

import functools
import hashlib
import importlib
import json
import logging
import math
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from largebatch import accelerator
from largebatch.distributed.environment import (
    TIMEOUT_SECONDS,
    leave_with,
    without_launcher,
    world_size,
)
from largebatch.errors import DataError, RecipeError, clip
from largebatch.storage import user_cache, write_whole

_LOG = logging.getLogger(__name__)

PARTS = BATCHNORM, OPTIMIZER, CROPS, GRAPH = ("BatchNorm", "optimizer", "crops", "graph")
"""What is proven, in the order of its trials: a graph replays the kernels that are used."""

KERNEL_DEVICES = {part: {accelerator.CUDA} for part in (BATCHNORM, OPTIMIZER, CROPS)}
"""Types of the devices that the Triton kernels of a part are made for."""

VARIABLE = "LARGEBATCH_KERNELS"
"""Environment variable: `torch` uses PyTorch's operations for every part, `auto` what is proven."""

_MODULES = {
    BATCHNORM: "largebatch.models.kernels.trials",
    OPTIMIZER: "largebatch.optim.kernels.trials",
    CROPS: "largebatch.data.decoders.trials",
}
"""Modules with the trials of a part for any model, by name: they import this one."""

_SOURCES = ("accelerator.py", "proof.py", "data", "distributed", "models", "optim", "training")
"""Files and folders of this package whose change makes a kept result worthless."""

_ROUNDING = 4.0
"""Largest error of a kernel, in errors of PyTorch's operations: two orders of the same sums differ
by less, a wrong term by much more."""

_FLOOR = 64 * torch.finfo(torch.float32).eps
"""Largest relative error that is accepted in any case: kernels add in float32, and PyTorch's result
may have no error at all, as a sum of few numbers."""

_ROUNDS = 5  # measurements of each side, in turn, whose median counts

_ROUND_SECONDS = 0.002  # shortest measurement: short work is repeated

LONGEST = 1800.0
"""Seconds of all trials, if no other worker waits for them: compiling the kernels of a large
network takes minutes."""

_CRASHES = ("SIGABRT", "SIGFPE", "SIGILL", "SIGSEGV")
"""Signals of a fault, which comes again; others come from outside, such as Ctrl-C, or the system's
SIGKILL for want of memory."""

TrialWork = Callable[[], Sequence[Tensor]]
"""Computes tensors, always the same ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One variant of a part, as a model uses it."""

    name: str
    """Type, sizes and settings, for the log."""

    ours: TrialWork
    theirs: TrialWork
    exact: TrialWork | None = None
    """Results in a longer type; None if ours must equal theirs, bit for bit."""

    is_repeated: bool = False
    """True if `exact` is another run of theirs, whose kernels may add in any order. The difference
    of two runs is by chance small in some tensor, so each may differ as much as the median one."""

    count: int = 1
    """Number of uses in a model, which weighs its time; 0: the time does not count."""

    timed: tuple[Callable[[], Any], Callable[[], Any]] | None = None
    """What is measured of ours and theirs, after both were called; None: they are."""

    seconds: Callable[[], tuple[float, float]] | None = None
    """Returns the seconds of both, if they have measured themselves."""

    remark: Callable[[], str] = str
    """Returns what may explain that ours is not faster, after it was computed."""


Trials = Mapping[str, Callable[[], Iterable[Trial]]]
"""The trials of each part, which are made one after the other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialsResult:
    """The result of all trials of a part on one worker."""

    refused: str | None = None
    """Why the part is not used; None if it is."""

    variants: int = 0
    error: float = 0.0
    error_of_torch: float = 0.0
    """Largest relative errors of ours and of PyTorch's results."""

    seconds: float = 0.0
    seconds_of_torch: float = 0.0
    """Sums over the variants, by their number of uses; 0 if time was not measured."""

    remark: str = ""
    """What the latest trial said about its time."""

    is_slow: bool = False
    """True if the part is right, and refused because it is not faster."""

    is_kept: bool = True
    """False if the reason may be gone in the next run, such as a missing compiler."""

    def describe(self) -> str:
        """Format by how much a part agrees and gains."""
        if self.refused is not None:
            return self.refused
        variants = f"{self.variants} variant{'s' if self.variants > 1 else ''}"
        agrees = f"errors {self.error:.1g}, of PyTorch's {self.error_of_torch:.1g}"
        if not self.error:
            agrees = "the same bits" if not self.error_of_torch else agrees
        if not self.seconds:
            return f"{variants}, {agrees}"
        return f"{self.seconds_of_torch / self.seconds:.2f} times as fast, {agrees}, {variants}"


DECISIONS: dict[tuple[str, torch.device], str | None] = {}
"""Decisions of this process: why a part is not used on a device; None if it is used."""


def has_kernels(part: str, device: torch.device) -> bool:
    """Return True if a part has kernels for this type of device; see `uses`."""
    return device.type in KERNEL_DEVICES[part]


def uses(part: str, device: torch.device) -> bool:
    """Return True if a part is used on a device that has it; see `refusal`."""
    return refusal(part, device) is None


def refusal(part: str, device: torch.device) -> str | None:
    """Return why a part is not used on a device that has it; None if it is.

    A part that is not decided is tried by this process alone, but not optimizers with several
    workers, whose weights would differ. Graphs are tried by runs only.
    """
    key = (part, device)
    if key not in DECISIONS:
        if torch.compiler.is_compiling():
            return "it is not decided"  # a graph of the compiler cannot start a process
        DECISIONS[key] = _refusal_alone(part, device)
        if reason := DECISIONS[key]:
            _LOG.warning("%s: PyTorch's operations are used (%s)", part, reason)
    return DECISIONS[key]


def decide(device: torch.device, refusals: Mapping[str, str | None]) -> None:
    """Set why each part is not used on a device from now on; None: it is used."""
    DECISIONS.update({(part, device): reason for part, reason in refusals.items()})


@contextmanager
def deciding(device: torch.device, refusals: Mapping[str, str | None]) -> Iterator[None]:
    """Decide for the duration of a block."""
    before = dict(DECISIONS)
    decide(device, refusals)
    try:
        yield
    finally:
        DECISIONS.clear()
        DECISIONS.update(before)


def switched_off() -> str | None:
    """Return why nothing is used in this process: the environment variable; None if it may be.

    Raises RecipeError if the variable has a value that it does not take.
    """
    value = os.environ.get(VARIABLE, "auto")
    if value not in {"auto", "torch", ""}:
        raise RecipeError(f"{VARIABLE}={value}: expected auto or torch")
    return f"{VARIABLE}=torch" if value == "torch" else None


def _refusal_alone(part: str, device: torch.device) -> str | None:
    """Return why a process that is no run does not use a part."""
    if reason := switched_off():
        return reason
    if accelerator.is_remote(device) and device.type != getattr(accelerator.kind(), "type", None):
        return f"this machine has no {device.type}"  # tensors without memory may name it
    if part == GRAPH:
        return None
    if part == OPTIMIZER and world_size() > 1:
        return "the workers of this process have not agreed; call agree_on_kernels"
    return prove_alone(part, device).refused


def prove_alone(part: str, device: torch.device) -> TrialsResult:
    """Return the finding of a part for any model.

    Other workers wait meanwhile, so it takes half of the time that they wait at most.
    """
    seconds = LONGEST if world_size() == 1 else TIMEOUT_SECONDS / 2
    return prove(_MODULES[part], [part], device, seconds=seconds)[part]


def prove(  # noqa: PLR0913 -- what is tried, and how its result is kept
    module: str,
    parts: Sequence[str],
    device: torch.device,
    settings: Mapping[str, object] | None = None,
    *,
    key: object = None,
    seconds: float = LONGEST,
    again: bool = False,
    announces: bool = False,
) -> dict[str, TrialsResult]:
    """Return the findings of parts on a device: kept ones, or those of trials that are made now.

    The trials are `trials(device, settings)` of a module. `settings`, as JSON, reach it as they
    are; those that decide its result are `key`, by default all. All trials together take at most
    `seconds`. With `again` kept ones are not read; with `announces` new trials are logged before
    they begin, and a cache that cannot be written. Nothing is raised: what fails is refused.
    """
    settings = settings or {}
    content = facts_of_trials(module, parts, device, settings if key is None else key)
    name = f"{hashlib.sha256(content.encode()).hexdigest()[:32]}.json"
    file = None
    with suppress(DataError):  # a user without a home
        file = user_cache() / "proofs" / name
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):  # none, or damaged
        kept = {} if again or file is None else json.loads(file.read_bytes())["findings"]
        if kept.keys() == {*parts}:
            return {part: TrialsResult(**found) for part, found in kept.items()}
    if announces:
        _LOG.warning("%s: tried on %s before the first update", ", ".join(parts), device)
    findings = _tried(module, parts, device, settings, seconds)
    if file is not None and all(finding.is_kept for finding in findings.values()):
        found = {part: asdict(finding) for part, finding in findings.items()}
        record = {"facts": json.loads(content), "findings": found}
        try:
            write_whole(file, json.dumps(record, indent=1).encode())
        except OSError as error:
            if announces:
                _LOG.warning(
                    "%s: cannot be written (%s), so each run tries kernels and graphs again: set "
                    "XDG_CACHE_HOME to a folder that can be",
                    file.parent,
                    error.strerror,
                )
    return findings


def facts_of_trials(module: str, parts: Sequence[str], device: torch.device, key: object) -> str:
    """Return, as JSON, all that decides the result of trials: they, the host and its device."""
    facts = {"module": module, "parts": [*parts], "settings": key}
    return json.dumps({**facts, **_facts_of(device)}, sort_keys=True, default=str)


def _tried(
    module: str,
    parts: Sequence[str],
    device: torch.device,
    settings: Mapping[str, object],
    seconds: float,
) -> dict[str, TrialsResult]:
    """Make trials, in a new process after each that has ended early."""
    findings: dict[str, TrialsResult] = {}
    end_of_time = time.monotonic() + seconds
    while left := [part for part in parts if part not in findings]:
        known = {part: finding.refused for part, finding in findings.items()}
        job = {
            "module": module,
            "parts": left,
            "known": known,
            "settings": settings,
            "device": device.type,
            "index": device.index or 0,
            "parent": os.getpid(),
        }
        lines, end = run_apart(job, max(1.0, end_of_time - time.monotonic()))
        for line in lines:
            if "finding" in line:
                findings[line["part"]] = TrialsResult(**line["finding"])
        last = lines[-1] if lines else {}
        if "finding" in last:
            continue  # an error was found, and what follows needs a new process
        name = f": {last['trial']}" if "trial" in last else ""
        reason = f"its trial ended by {end or 'an unknown error'}{name}"
        finding = TrialsResult(refused=reason, is_kept=end in _CRASHES)
        findings |= dict.fromkeys([last["part"]] if last else left, finding)
    return findings


def run_apart(job: Mapping[str, Any], seconds: float) -> tuple[list[dict[str, Any]], str | None]:
    """Make the trials of a job in a new process; return its lines, and what ended it early.

    It imports what this one does, sees the same devices, and is none of the workers of a launcher.
    """
    command = [sys.executable, "-c", "from largebatch.proof import main; main()"]
    environment = without_launcher(os.environ)
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, sys.path)), "PYTHONSAFEPATH": "1"}
    try:
        done = subprocess.run(  # noqa: S603 -- this interpreter
            command,
            input=json.dumps(job),
            capture_output=True,
            text=True,
            timeout=seconds,
            env=environment,
            check=False,
        )
        output = done.stdout
        end = _end_of(done.returncode, done.stderr)
    except subprocess.TimeoutExpired as error:
        output = _text(error.stdout)  # the trials that ended before
        end = f"no end after {seconds:.0f} s"
    except OSError as error:  # no memory for a process
        output = ""
        end = _end_of(1, str(error))
    lines = []
    for line in output.splitlines():
        with suppress(ValueError):  # the last one may be incomplete
            lines.append(json.loads(line))
    return lines, end


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def _end_of(code: int, errors: str) -> str | None:
    """Return what ended a process: a signal by name, or its last words; None for success."""
    if code == 0:
        return None
    if code < 0:
        with suppress(ValueError):
            return signal.Signals(-code).name
    words = [line.strip() for line in errors.splitlines() if line.strip()]
    return clip(words[-1], 200) if words else f"exit code {code}"


def main() -> None:
    """Make the trials of the job on standard input, and write a line of JSON for each event."""
    job = json.load(sys.stdin)
    leave_with(job["parent"])  # a killed worker's trials would keep its device busy
    output = sys.stdout
    sys.stdout = sys.stderr  # what others print is not a record
    device = torch.device(job["device"])
    if accelerator.is_remote(device):
        device = accelerator.choose(job["index"])

    def write(**line: object) -> None:
        output.write(json.dumps(line) + "\n")
        output.flush()  # before what may end this process

    sys.exit(make_trials(job, device, write))


def make_trials(job: Mapping[str, Any], device: torch.device, write: Callable[..., None]) -> int:
    """Make the trials of a job; return 1 after an error, which may have broken the device."""
    # A trial uses what it tries, and a graph what was proven before it.
    decide(device, {**dict.fromkeys(PARTS), **job["known"]})
    trials: Trials = importlib.import_module(job["module"]).trials(device, job["settings"])
    for part in job["parts"]:
        write(part=part)
        finding = TrialsResult()
        try:
            for trial in trials[part]():
                write(part=part, trial=trial.name)
                finding = _with_trial(finding, trial, device)
                if finding.refused is not None:
                    break
        except Exception as problem:  # torch and Triton raise all kinds
            # A kernel that fails for want of memory or a compiler may work in the next run.
            finding = TrialsResult(refused=_reason(problem), is_kept=False)
            write(part=part, finding=asdict(finding))
            return 1
        if finding.refused is None and 0 < finding.seconds_of_torch <= finding.seconds:
            ratio = finding.seconds_of_torch / finding.seconds
            reason = f"not faster: {ratio:.2f} times as fast as PyTorch's"
            reason += f"; {finding.remark}" if finding.remark else ""
            finding = replace(finding, refused=reason, is_slow=True)
        decide(device, {part: finding.refused})
        write(part=part, finding=asdict(finding))
    return 0


def _reason(problem: Exception) -> str:
    if isinstance(problem, ImportError):
        return f"{problem.name or 'a module'} is not installed"
    return clip(" ".join(f"{type(problem).__name__}: {problem}".split()), 200)


def _with_trial(finding: TrialsResult, trial: Trial, device: torch.device) -> TrialsResult:
    """Return the finding with another variant."""
    theirs = trial.theirs()
    exact = theirs if trial.exact is None else trial.exact()
    ours = trial.ours()
    assert len(ours) == len(theirs) == len(exact)
    error = 0.0
    of_torch = 0.0
    is_right = True
    own_errors = [_errors(own, true) for own, true in zip(ours, exact, strict=True)]
    torch_errors = [_errors(other, true) for other, true in zip(theirs, exact, strict=True)]
    for kind in (0, 1):  # the largest difference finds a wrong element, the length a small bias
        of_tensors = [
            (own[kind], its[kind]) for own, its in zip(own_errors, torch_errors, strict=True)
        ]
        usual = statistics.median(its for _, its in of_tensors) if trial.is_repeated else 0.0
        for own_error, torch_error in of_tensors:
            limit = 0.0 if trial.exact is None else _ROUNDING * max(torch_error, usual) + _FLOOR
            is_right = is_right and math.isfinite(own_error) and own_error <= limit
            error = max(error, own_error)
            of_torch = max(of_torch, torch_error)
    finding = replace(
        finding,
        variants=finding.variants + 1,
        error=max(error, finding.error),
        error_of_torch=max(of_torch, finding.error_of_torch),
        remark=trial.remark(),
    )
    if not is_right:
        reason = f"wrong: error {error:.2g}, PyTorch's {of_torch:.2g}: {trial.name}"
        return replace(finding, refused=reason)
    del ours, theirs, exact  # memory of the largest layers
    if not trial.count:
        return finding
    seconds, of_torch = trial.seconds() if trial.seconds else _seconds(trial, device)
    return replace(
        finding,
        seconds=finding.seconds + trial.count * seconds,
        seconds_of_torch=finding.seconds_of_torch + trial.count * of_torch,
    )


def _errors(tensor: Tensor, exact: Tensor) -> tuple[float, float]:
    """Return the largest difference and the length of all, relative to those of the exact tensor.

    Infinite if a number is not finite, or if the exact tensor is zero and the other is not.
    """
    wide = torch.promote_types(exact.dtype, torch.float32)
    true = exact.detach().to(wide)
    difference = tensor.detach().to(wide) - true
    largest = _relative(_largest(difference), _largest(true))
    return largest, _relative(_length(difference), _length(true))


def _relative(distance: float, size: float) -> float:
    if distance == 0 or not math.isfinite(distance):
        return 0.0 if distance == 0 else math.inf
    return distance / size if size else math.inf


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().amax()) if tensor.numel() else 0.0  # sync: in a process of trials


def _length(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor))  # sync: in a process of trials


def _seconds(trial: Trial, device: torch.device) -> tuple[float, float]:
    """Return the median seconds of both sides, measured in turn; in graphs where there are some.

    Updates run in graphs there, so the time of launching does not count.
    """
    works: list[Callable[[], Any]] = [*(trial.timed or (trial.ours, trial.theirs))]
    with suppress(Exception):  # one that cannot be recorded: both are measured without
        if device.type in accelerator.GRAPHS:
            works = [_replay_of(work, device) for work in works]
    once = max(1e-7, *(_time(work, 1, device) for work in works))
    repeats = max(1, min(100, math.ceil(_ROUND_SECONDS / once)))
    rounds = [[_time(work, repeats, device) for work in works] for _ in range(_ROUNDS)]
    ours, theirs = (statistics.median(column) for column in zip(*rounds, strict=True))
    return ours, theirs


def _replay_of(work: Callable[[], Any], device: torch.device) -> Callable[[], Any]:
    graph = accelerator.Graph(device)
    results = []
    with graph.record():
        results.append(work())

    def replay(_results: object = results) -> None:  # a graph needs the memory of its results
        graph.replay()

    return replay


def _time(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    accelerator.synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    accelerator.synchronize(device)
    return (time.perf_counter() - start) / repeats


def _facts_of(device: torch.device) -> dict[str, object]:
    """Return what a result depends on besides its trials: device, driver, versions and source."""
    packages: dict[str, str | None] = {}
    for package in ("torch", "triton"):
        packages[package] = None
        with suppress(PackageNotFoundError):
            packages[package] = version(package)
    return {
        **accelerator.identity(device),
        "host": platform.node(),  # a cache on a shared disk; another host may have no compiler
        "python": sys.version.split()[0],
        **packages,
        "source": _source(),
    }


@functools.cache
def _source() -> str:
    """Return a digest of the source that trials run."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for name in _SOURCES:
        place = folder / name
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(file.relative_to(folder).as_posix().encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()
