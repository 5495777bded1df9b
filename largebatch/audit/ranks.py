"""Phases of an audit on several workers: an error on one of them ends the phase on all."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import torch
from torch import Tensor

from largebatch.distributed.agreement import gather_values
from largebatch.distributed.backend import Backend, sum_over_workers
from largebatch.errors import PeerLostError, clip, printable
from largebatch.rules import Finding

T = TypeVar("T")

_LONGEST = 160  # maximum length in characters of an error in a finding

_REMEDY = "call it without the audit on that worker, which shows the traceback, and correct it"


class StoppedError(Exception):
    """A reason to stop a check, raised on all workers; `finding` reports it."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.text)
        self.finding = finding


class Ranks:
    """The workers of the script, with operations that every one of them must call."""

    def __init__(self, backend: Backend, progress: Callable[[], object] | None = None) -> None:
        self.backend = backend
        self._progress = progress
        self.rank = backend.rank
        self.size = backend.world_size

    def attempt(
        self, check: str, what: str, function: Callable[[], T], *, remedy: str = _REMEDY
    ) -> T:
        """Call a function that needs no other worker; raise StoppedError on all if one fails.

        Raises PeerLostError with this worker's own error if the others do not answer after it.
        """
        error = None
        result = None
        try:
            result = function()
        except PeerLostError:
            raise
        except Exception as caught:  # of the script's own code: any
            error = f"{type(caught).__name__}: {caught}"
        # The exchange that keeps workers together: one that failed must not leave the others
        # waiting in the next sum.
        try:
            errors = self.gather(error)
        except PeerLostError as lost:
            if error is None:
                raise
            raise type(lost)(f"{what} failed: {in_one_line(error)}") from lost
        failed = [rank for rank, text in enumerate(errors) if text is not None]
        if failed:
            text = in_one_line(errors[failed[0]])
            more = f" and {len(failed) - 1} more" * (len(failed) > 1)
            text = f"{what} failed on worker {failed[0]}{more}: {text}"
            raise StoppedError(unable(check, text, remedy))
        return result  # type: ignore[return-value]  # it did not fail

    def gather(self, own: object) -> list[Any]:
        """Return the plain values of every worker, by rank."""
        values = gather_values(own, self.backend, self.backend.device)
        if self._progress is not None:
            self._progress()
        return values

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of a tensor over all workers, in float64 on the tensor's device."""
        total = tensor.detach().to(torch.float64, copy=True)
        sum_over_workers(total, self.backend)
        return total

    def share(self, findings: Sequence[Finding]) -> tuple[Finding, ...]:
        """Return worker 0's findings: on others numbers may differ in the last digit."""
        first, *_ = self.gather([asdict(finding) for finding in findings])
        return tuple(Finding(**fields) for fields in first)


def unable(check: str, text: str, remedy: str) -> Finding:
    """Return the finding of a check that an error prevents: of the script, or of its arguments."""
    return Finding(check=check, level="unknown", text=text, remedy=remedy)


def in_one_line(error: str) -> str:
    """Return the text of an error without line breaks, shortened."""
    return clip(printable(" ".join(error.split())), _LONGEST)
