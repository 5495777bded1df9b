"""The command `audit`: check a user's own model, loader, loss and optimizer. It prints."""

import gc
from collections.abc import Callable
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any

from largebatch.errors import AuditError, DataError
from largebatch.runs.options import Given, Workers

if TYPE_CHECKING:
    from largebatch.audit import Findings


def audit(function: str, /, *, options: Annotated[Workers, Given] = Workers()) -> None:
    """Compare the updates of your own training on several workers with those of one process.

    Each worker calls FUNCTION, which returns (model, loader, loss_fn, optimizer), with a dict of
    further arguments of largebatch.audit.audit behind them if there are any.

    The exit code is 2 if there is a fault, or if the gradients could not be compared.

    Args:
        function: module:function that returns what largebatch.audit.audit takes.
    """
    from largebatch.data.datasets.own import import_own
    from largebatch.distributed.connection import connect

    module, _, name = function.partition(":")
    make = getattr(import_own(module), name, None) if name else None
    if not callable(make):
        raise DataError(f"{function}: there is no such function; expected MODULE:FUNCTION")
    backend = connect(options.backend, timeout=options.timeout)
    if backend.world_size == 1:
        raise DataError("an audit compares several workers: give --workers 2 or more")
    findings = _check(make, function)
    # A DistributedDataParallel that outlives its process group can block when it is freed.
    gc.collect()
    backend.close()
    if findings.faults:
        raise AuditError(f"{function}: the audit found faults, listed above")
    if not findings.ok:
        raise AuditError(f"{function}: the audit could not compare the gradients")


def _check(make: Callable[[], Any], function: str) -> "Findings":
    from largebatch.audit import audit as check

    given = make()
    values = [*given] if isinstance(given, tuple) else [given]
    keywords = values.pop() if isinstance(values[-1], dict) else {}
    known = signature(check)
    if unknown := [key for key in keywords if key not in known.parameters]:
        keys = ", ".join(known.parameters)
        raise DataError(f"{function} returns a dict with the key {unknown[0]!r}; known: {keys}")
    try:
        bound = known.bind(*values, **keywords)
    except TypeError as error:
        raise DataError(f"{function} does not return the arguments of audit: {error}") from None
    return check(*bound.args, **bound.kwargs)  # worker 0 prints the table
