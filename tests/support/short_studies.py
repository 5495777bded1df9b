"""A study of LeNet-5 on the digits that takes seconds, and the programs that carry it out."""

import json
from pathlib import Path
from typing import Any

STUDY: dict[str, Any] = {
    "name": "tiny",
    "recipes": {
        "digits": {
            "recipe": "digits_96",
            "set": {
                "duration": {"steps": 12},
                "schedule.warmup": {"steps": 2},
                "evaluation": {},
                "polish": None,
                "data.image_size": 16,
                "execution.cache": "memory",
                "model.name": "lenet5",
                "model.arguments": {},
                "batch.bn_span": None,
            },
        }
    },
    "policies": {
        "fall": {"decay": {"kind": "polynomial", "power": 1.0}},
        "flat": {"decay": {"kind": "constant"}},
    },
    "search": {"trials": 3, "held_out": 300},
    "seeds": 2,
}


def write_study(folder: Path, **changes: Any) -> Path:  # noqa: ANN401 -- any part of a study
    """Write the study with other parts; return its file. JSON is YAML."""
    path = folder / "study.yaml"
    path.write_text(json.dumps({**STUDY, **changes}))
    return path
