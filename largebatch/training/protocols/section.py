"""The section on learners in the report of a run."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from largebatch.report.page import Section
from largebatch.tracking.events import SUMMARY


def learners_section(folder: Path) -> Section | None:
    """Return the section on the work and the losses of learners; None without learners."""
    counts = _read_counts(folder)
    rows = {}
    if counts.get("gradients"):
        rows["Gradients by learner"] = " · ".join(f"{number:,}" for number in counts["gradients"])
    if counts.get("lost"):
        rows["Lost learners"] = ", ".join(
            f"{one['learner']} after {one['update']:,} updates" for one in counts["lost"]
        )
    return Section("Learners", rows) if rows else None


def _read_counts(folder: Path) -> dict[str, Any]:
    """Return the values of the protocol in summary.json; older files have them at the top."""
    with suppress(OSError, ValueError, AttributeError):
        summary = json.loads((folder / SUMMARY).read_bytes())
        extra = summary.get("extra", {"protocol": summary}).get("protocol", {})
        return extra if isinstance(extra, dict) else {}
    return {}
