"""The command `audit`: check a user's own model, loader, loss and optimizer. It prints."""

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from largebatch.distributed.environment import worker_rank
from largebatch.errors import AuditError, DataError, LargebatchError
from largebatch.runs.options import OF_WORKERS, Count, Given, Workers

if TYPE_CHECKING:
    from largebatch.audit import Findings


@dataclass(frozen=True, kw_only=True)
class Audited(Workers):
    """Local workers of an audit."""

    workers: Annotated[Count | None, OF_WORKERS] = None  # type: ignore[assignment]
    """Number of worker processes to start on this machine (2 for a script)."""


def audit(target: Path, /, *arguments: str, options: Annotated[Audited, Given] = Audited()) -> None:
    """Compare the updates of your own training on several workers with those of one process.

    TARGET is a script with a loop over a DataLoader, which runs unchanged until its first updates
    are audited; its arguments follow it, and options of the audit come before it. Or it is
    MODULE:FUNCTION or FILE.py:FUNCTION, a function that each worker calls and that returns (model,
    loader, loss_fn, optimizer), with a dict of further arguments of largebatch.audit behind them if
    there are any.

    The exit code is 2 if there is a fault, or if the gradients could not be compared.

    Args:
        target: script.py, or module:function.
        arguments: Arguments of the script.
    """
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
