"""TensorBoard: the scalars of a run and its recipe, in the run folder.

`tensorboard --logdir runs` shows all runs below a folder.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from largebatch.optional import require_tensorboard
from largebatch.tracking.events import LOG, Start, Summary
from largebatch.tracking.scalars import Plotted, Scalars, ScalarTracker

FOLDER = "tensorboard"


class TensorBoard(ScalarTracker):
    """A Tracker that writes TensorBoard's event files; every part of a run adds one."""

    def __init__(self, folder: Path, config: Mapping[str, object]) -> None:
        require_tensorboard()
        from torch.utils.tensorboard import SummaryWriter

        self._begin, self._folder, self._config = SummaryWriter, folder, dict(config)
        followed = (folder / FOLDER).exists()
        self._scalars = Scalars(folder / LOG if followed else None)
        self._writer: SummaryWriter | None = None

    def _open(self, start: Start) -> None:  # noqa: ARG002 -- the base's signature
        self._writer = self._begin(str(self._folder / FOLDER))
        text = json.dumps(self._config, indent=2)
        self._writer.add_text("recipe", f"```\n{text}\n```")

    def _write(self, values: Mapping[str, float], event: Plotted) -> None:
        assert self._writer is not None
        for name, value in values.items():
            self._writer.add_scalar(name, value, event.step)
        self._writer.flush()  # as log.jsonl, so that a killed run leaves everything

    def _close(self, summary: Summary) -> None:  # noqa: ARG002 -- the base's signature
        assert self._writer is not None
        self._writer.close()
