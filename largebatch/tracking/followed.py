"""What a tracker gets of the run that it follows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from largebatch.recipe.keys import Tracking
from largebatch.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowedRun:
    """A run, before its first event; on worker 0."""

    folder: Path
    """Run folder; a tracker may keep files there."""

    recipe: Recipe
    tracking: Tracking
    """The recipe's section, with the group and the job type that its defaults stand for."""

    config: Mapping[str, object]
    """The recipe, the plan and the commit, as JSON."""

    began: float
    """Start of this worker's set-up, in seconds since 1970."""

    note: Callable[[str], None]
    """Records a remark on the run in its log."""
