"""`log.jsonl`: every record of a run, one JSON object a line, in the order they happened.

A resumed run appends; its `start` record says from which step on earlier ones are superseded. A
number that is not finite, such as the loss of a step that overflowed in fp16, is written as null:
JSON has no NaN.
"""

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path


class JsonLines:
    """A Tracker that writes each record at once, so that a killed run leaves all it did."""

    def __init__(self, path: Path) -> None:
        _drop_unfinished_line(path)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def start(self, config: Mapping[str, object], *, resume_step: int) -> None:
        """Write the plan, the recipe's name and the time."""
        self.record(
            {
                "event": "start",
                "time": datetime.now(UTC).isoformat(timespec="seconds"),
                "resume_step": resume_step,
                "recipe": config["name"],
                "plan": config["plan"],
            }
        )

    def record(self, record: Mapping[str, object]) -> None:
        """Write one line."""
        self._file.write(json.dumps(finite(record), allow_nan=False) + "\n")

    def finish(self, summary: Mapping[str, object]) -> None:
        """Close the file; the summary has a file of its own."""
        del summary
        self._file.close()


def finite(value: object) -> object:
    """Return the value with None for every float in it that is not finite."""
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key: finite(item) for key, item in value.items()}
        case list() | tuple():
            return [finite(item) for item in value]
        case _:
            return value


def _drop_unfinished_line(path: Path) -> None:
    """Cut off what a run that was killed while writing left behind its last whole line."""
    if path.exists():
        content = path.read_bytes()
        path.write_bytes(content[: content.rfind(b"\n") + 1])
