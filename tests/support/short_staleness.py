"""A staleness study of LeNet-5 on the digits that takes seconds."""

import json
from pathlib import Path
from typing import Any

SETTINGS: dict[str, Any] = {
    "duration": {"steps": 6},
    "schedule": {"peak_lr": 0.02, "warmup": None, "decay": {"kind": "constant"}},
    "evaluation": {},
    "polish": None,
    "data.image_size": 16,
    "execution.cache": "memory",
    "model": {"name": "lenet5"},
    "batch": {"global_batch": 32, "bn_span": None},
    "optimizer": {"kind": "sgd", "momentum": 0.9, "weight_decay": 1e-4},
}
NORMED: dict[str, Any] = {
    "model": {"name": "resnet18", "arguments": {"layers": [1, 1, 1, 1], "channels": [4, 4, 4, 4]}},
    "batch": {"global_batch": 32, "bn_span": 8},
    "polish": {"clean": {"steps": 2}, "statistics": {"samples": 64}},
}

STUDY: dict[str, Any] = {
    "name": "tiny",
    "seeds": 2,
    "recipes": {
        "plain": {"recipe": "digits_96", "set": SETTINGS},
        "polished": {"recipe": "digits_96", "set": {**SETTINGS, **NORMED}},
    },
    "machines": {"overhead": 0.01, "sample": 0.001, "link": {"bandwidth": 1e9}},
    "times": {
        "usual": {"factor": {"kind": "lognormal", "median": 1.0, "sigma": 0.1}},
        "slow": {"factor": {"kind": "constant", "seconds": 1.0}, "slow": {0: 5.0}},
    },
    "grids": [
        {
            "recipes": ["plain"],
            "times": ["usual"],
            "sigma": [0, "lambda"],
            "mu": [8],
            "learners": [4],
        }
    ],
}


def write_study(folder: Path, **changes: Any) -> Path:  # noqa: ANN401 -- any part of a study
    """Write the study with other parts; return its file. JSON is YAML."""
    path = folder / "study.yaml"
    path.write_text(json.dumps({**STUDY, **changes}))
    return path
