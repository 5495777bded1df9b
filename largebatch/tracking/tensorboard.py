"""TensorBoard: the scalars of a run, its recipe and its hyper-parameters, in the run folder.

`tensorboard --logdir runs` shows all runs below a folder.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self, cast

from largebatch.formatting import dotted
from largebatch.optional import require_tensorboard
from largebatch.tracking.events import LOG, Start, Summary
from largebatch.tracking.followed import FollowedRun
from largebatch.tracking.scalars import NewNumbers, Plotted, ScalarTracker

FOLDER = "tensorboard"


class TensorBoard(ScalarTracker):
    """A Tracker that writes TensorBoard's event files; every part of a run adds one."""

    def __init__(self, folder: Path, config: Mapping[str, object]) -> None:
        require_tensorboard()
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        self._begin = SummaryWriter
        self._hparams = cast("Any", hparams)  # torch does not type it
        self._folder = folder
        self._config = dict(config)
        followed = (folder / FOLDER).exists()
        super().__init__(folder / LOG if followed else None)
        self._writer: Any = None
        self._there: Counter[tuple[str, int]] = Counter()

    @classmethod
    def follow(cls, run: FollowedRun) -> Self:
        """Return the tracker of a run."""
        return cls(run.folder, run.config)

    def _open(self, start: Start) -> None:  # noqa: ARG002 -- the base's signature
        self._there.update(_written(self._folder / FOLDER))
        self._writer = self._begin(str(self._folder / FOLDER))
        text = json.dumps(self._config, indent=2)
        self._writer.add_text("recipe", f"```\n{text}\n```")
        settings = {
            key: value if isinstance(value, (bool, int, float, str)) else str(value)
            for key, value in dotted(self._config)
            if value is not None
        }
        # add_hparams would make a second run. The first summary, a list of all settings, is left
        # out: the page reads that of one run only, and without it collects those of all runs.
        _, begin, self._end = self._hparams(settings, {})
        self._writer.file_writer.add_summary(begin)

    def _lacking(self, new: NewNumbers, event: Plotted, position: int) -> dict[str, float]:  # noqa: ARG002 -- the base's signature
        lacking = {}
        for name, value in new.values.items():
            if self._there[name, event.step]:
                self._there[name, event.step] -= 1  # stages may evaluate after the same update
            else:
                lacking[name] = value
        return lacking

    def _write(self, values: Mapping[str, float], event: Plotted) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, event.step)
        self._writer.flush()  # as log.jsonl, so that a killed run leaves everything

    def _close(self, summary: Summary) -> None:
        if summary.status == "finished":
            self._writer.file_writer.add_summary(self._end)
        self._writer.close()


def _written(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield the name and step of every scalar in the event files of a folder."""
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    for path in sorted(folder.glob("events.out.tfevents.*")):
        for event in LegacyEventFileLoader(str(path)).Load():  # stops where a killed run did
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    yield value.tag, event.step
