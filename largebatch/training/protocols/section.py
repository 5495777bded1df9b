"""The section on learners in the report of a run."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from largebatch.report.page import Section
from largebatch.tracking.events import SUMMARY


def learners_section(folder: Path) -> Section | None:
    """Return the section on the work and the losses of learners; None without learners."""
    counts: dict[str, Any] = {}
    with suppress(OSError, ValueError, TypeError, AttributeError):
        summary = json.loads((folder / SUMMARY).read_bytes())
        # Older files have the values of the protocol at the top.
        counts = dict(summary.get("extra", {"protocol": summary}).get("protocol", {}))
    rows = {}
    if counts.get("gradients"):
        rows["Gradients by learner"] = " · ".join(f"{number:,}" for number in counts["gradients"])
    if counts.get("lost"):
        rows["Lost learners"] = ", ".join(
            f"{one['learner']} after {one['update']:,} updates" for one in counts["lost"]
        )
    return Section("Learners", rows) if rows else None
