"""What is told of a run while it goes on, and to whom."""

from collections.abc import Mapping
from typing import Protocol


class Tracker(Protocol):
    """Follows a run. `run` calls it on worker 0 only, with plain values, never tensors."""

    def start(self, config: Mapping[str, object], *, resume_step: int) -> None:
        """Begin: the resolved recipe with the plan under `plan`, and the first step to come."""

    def record(self, record: Mapping[str, object]) -> None:
        """Take one record; its `event` says which kind it is."""

    def finish(self, summary: Mapping[str, object]) -> None:
        """End: the contents of `summary.json`, whatever the status."""
