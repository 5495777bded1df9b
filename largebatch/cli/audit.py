"""The commands `audit` and `audit resume`: check a user's loop, a recipe here, or a resumption.

They print.
"""

import gc
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter

from largebatch.distributed.environment import TIMEOUT_SECONDS, own_rank, worker_rank
from largebatch.errors import AuditError, DataError, LargebatchError, RecipeError, printable
from largebatch.recipe.installed import installed
from largebatch.recipe.loading import load_recipe
from largebatch.runs.options import (
    NEW_FOLDER,
    OF_WORKERS,
    Count,
    Folder,
    Given,
    MachineOptions,
    Seconds,
)

if TYPE_CHECKING:
    from largebatch.audit import Findings


@dataclass(frozen=True, kw_only=True)
class Audited(MachineOptions):
    """Local workers of an audit, and what a recipe is audited with."""

    workers: Annotated[Count | None, OF_WORKERS] = None  # type: ignore[assignment]
    """Number of worker processes to start on this machine (2 for a script)."""


app = App(name="audit")
Script = Annotated[str, Parameter(allow_leading_hyphen=True, metavar="COMMAND")]


@app.default
def audit(
    target: Path,
    /,
    *arguments: str,
    steps: Count | None = None,
    options: Annotated[Audited, Given] = Audited(),
) -> None:
    """Compare the updates of your own training on several workers with those of one process.

    TARGET is a script with a loop over a DataLoader, which runs unchanged until its first updates
    are audited; its arguments follow it, and options of the audit come before it. Or it is
    MODULE:FUNCTION or FILE.py:FUNCTION, a function that each worker calls and that returns (model,
    loader, loss_fn, optimizer), with a dict of further arguments of largebatch.audit behind them if
    there are any.

    Or it is a recipe, as `train` takes it: its first updates, made under each setting of
    `execution`, are compared with eager ones by PyTorch's operations and with float64.

    The exit code is 2 if there is a fault, or if the gradients could not be compared.

    Args:
        target: script.py, module:function, or a recipe.
        arguments: Arguments of the script.
        steps: Updates of a recipe to compare (3).
    """
    if target.suffix != ".py" and ":" not in str(target):
        return _audit_recipe(target, arguments, steps=steps or 3, options=options)
    _refuse_options_of_recipes(steps, options)
    if target.suffix == ".py":
        if options.backend == "serial":
            raise LargebatchError(f"--backend serial is for FUNCTION; {target} connects workers")
        if not target.is_file():
            raise DataError(f"{target}: there is no such script; correct the path")
        if options.workers is None and worker_rank() is None:
            from largebatch.runs.launch import start_workers

            text = "largebatch: two workers were started; --workers 1 audits a single process"
            print(text, file=sys.stderr)
            limit = ["--timeout", f"{options.timeout:g}"]
            words = ["-m", "largebatch", "audit", "--workers", "2", *limit, str(target), *arguments]
            return start_workers(words, workers=2, horovod=options.backend == "horovod")
        from largebatch.audit.script import audit_script

        return _end(audit_script(target, arguments, timeout=options.timeout), target)
    from largebatch.data.datasets.own import own_function
    from largebatch.distributed.connection import connect

    make = own_function(str(target))
    backend = connect(options.backend, timeout=options.timeout)
    if backend.world_size == 1:
        raise DataError("an audit compares several workers: give --workers 2 or more")
    findings = _check(make, str(target))
    # A DistributedDataParallel that outlives its process group can block when it is freed.
    gc.collect()
    backend.close()
    return _end(findings, target)


@app.command
def resume(  # noqa: PLR0913 -- its options
    *,
    whole: Script,
    first: Script,
    rest: Script,
    workers: Count = 1,
    rest_workers: Count | None = None,
    out: Folder | None = None,
    timeout: Seconds = TIMEOUT_SECONDS,
) -> None:
    """Compare a training that is stopped and resumed with one that is not.

    A COMMAND is a script and its arguments, "train.py --epochs 2", or -m and a module. Scripts run
    unchanged, each in an empty folder, so paths of data must be absolute; the rest runs in the
    folder of the first part. The whole runs twice, because only a training that can be repeated
    can be compared.

    The exit code is 2 if the rest is not the same training.

    Args:
        whole: The whole training, without a stop.
        first: Its first part, which saves a checkpoint.
        rest: The rest, which resumes from it and ends where the whole does.
        workers: Number of worker processes of each command.
        rest_workers: Number of them for the rest, if it is another.
        out: Folder for the records, the output and the files of the scripts (a temporary one).
        timeout: Seconds, or such as 5m, without a batch or an update until a script is stopped.
    """
    from largebatch.audit.resume.comparing import compare
    from largebatch.audit.resume.running import Commands, observe, words_of

    commands = Commands(
        whole=words_of("whole", whole),
        first=words_of("first", first),
        rest=words_of("rest", rest),
        workers=workers,
        rest_workers=rest_workers,
        timeout=timeout,
    )
    folder = Path(tempfile.mkdtemp(prefix="largebatch-")) if out is None else out
    runs = observe(commands, folder)  # an error names a file in the folder, which is then kept
    if out is None:
        shutil.rmtree(folder)
    findings = compare(runs.whole, runs.repeat, runs.first, runs.rest)
    print(findings.table())
    if findings.faults:
        raise AuditError("the rest is not the same training: the audit found faults, listed above")
    if not findings.ok:
        raise AuditError("the audit could not compare the rest with the whole")


def _audit_recipe(recipe: Path, arguments: Sequence[str], *, steps: int, options: Audited) -> None:
    if arguments:
        raise LargebatchError(
            f"audit {recipe}: unexpected argument {arguments[0]!r}; a key of a recipe is changed "
            "by --set KEY=VALUE"
        )
    try:
        loaded = load_recipe(recipe, options.changes)
    except RecipeError as error:
        if recipe.exists() or recipe.name in installed():
            raise
        hint = f"of a script give FILE.py, of a function MODULE:FUNCTION, such as {recipe}:build"
        raise RecipeError(f"{error}; {hint}") from None
    from largebatch.lab.measure.executions import compare_executions

    of_run = options.options(out=NEW_FOLDER).without_changes()
    compared = compare_executions(loaded, of_run, steps=steps)
    if own_rank() == 0:
        print(printable(compared.table()), flush=True)
    if compared.faults:
        names = ", ".join(row.setting for row in compared.faults)
        raise AuditError(f"{recipe}: other numbers than by PyTorch's eager operations: {names}")


def _refuse_options_of_recipes(steps: int | None, options: Audited) -> None:
    """Raise LargebatchError for an option that a script or a function would not see."""
    given: dict[str, object] = {
        "--steps": steps,
        "--data": options.data,
        "--dataset": options.dataset,
        "--set": options.changes,
        "--import": options.imports,
        "--cache-dir": options.cache_dir,
    }
    for option, value in given.items():
        if value:
            raise LargebatchError(
                f"{option} is of the audit of a recipe; arguments of a script come after it"
            )


def _end(findings: "Findings", target: Path) -> None:
    if findings.faults:
        raise AuditError(f"{target}: the audit found faults, listed above")
    if not findings.ok:
        raise AuditError(f"{target}: the audit could not compare the gradients")


def _check(make: Callable[[], Any], function: str) -> "Findings":
    from largebatch.audit import audit as check

    arguments_given = make()
    values = [*arguments_given] if isinstance(arguments_given, tuple) else [arguments_given]
    keywords = values.pop() if isinstance(values[-1], dict) else {}
    arguments = signature(check)
    try:
        bound = arguments.bind(*values, **keywords)
    except TypeError as error:
        known = ", ".join(arguments.parameters)
        text = f"{function} does not return the arguments of audit: {error}; known: {known}"
        raise DataError(text) from None
    return check(*bound.args, **bound.kwargs)  # worker 0 prints the table
