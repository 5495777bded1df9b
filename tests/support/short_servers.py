"""A study of servers of LeNet-5 on the digits that takes seconds a start."""

import json
from pathlib import Path
from typing import Any

from short_staleness import SETTINGS

RECIPE: dict[str, Any] = {
    "paper": "faster",
    "recipe": "digits_96",
    "set": {**SETTINGS, "duration": {"steps": 40}},
    "workers": [2],
    "mini_batch": 16,
    "computed": 2,
    "compute": {"overhead": 0.01, "sample": 0.001},
    "warm_up": 1,
    "updates": 4,
}
STUDY: dict[str, Any] = {
    "name": "tiny",
    "megabits": 1000,
    "repeats": 1,
    "layouts": {
        "central": {"centralised": 1},
        "beside": "decentralised",
        "ring": "torch",
        "ring-horovod": "horovod",
    },
    "recipes": {"lenet5": RECIPE},
}


def write_study(folder: Path, **changes: Any) -> Path:  # noqa: ANN401 -- any part of a study
    """Write the study with other parts; return its file. JSON is YAML."""
    path = folder / "study.yaml"
    path.write_text(json.dumps({**STUDY, **changes}))
    return path


def with_recipe(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 -- any part of a recipe's section
    """Return the recipes of the study, the one of them changed."""
    return {"lenet5": {**RECIPE, **changes}}
