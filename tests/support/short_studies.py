"""A study of LeNet-5 on the digits that takes seconds, and records of runs that were not made."""

import json
from collections.abc import Sequence
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


SETTINGS: dict[str, Any] = {
    "name": "tiny",
    "recipes": STUDY["recipes"],
    "settings": {
        "own": {},
        "large": {"set": {"batch.global_batch": 192}},
        "threads": {"threads": 2},
    },
    "seeds": 2,
}


def write_settings(folder: Path, **changes: Any) -> Path:  # noqa: ANN401 -- any part of a study
    """Write a study of settings with other parts; return its file."""
    path = folder / "study.yaml"
    path.write_text(json.dumps({**SETTINGS, **changes}))
    return path


def write_study(folder: Path, **changes: Any) -> Path:  # noqa: ANN401 -- any part of a study
    """Write the study with other parts; return its file. JSON is YAML."""
    path = folder / "study.yaml"
    path.write_text(json.dumps({**STUDY, **changes}))
    return path


def a_record(
    top1: float, *, seed: int, evaluations: Sequence[tuple[int, float]] = (), batch: int = 96
) -> dict[str, Any]:
    """Return the records of a run of 12 updates with evaluations after these updates.

    An update takes a second.
    """
    return {
        "top1": top1,
        "top5": 1.0,
        "loss": 1 - top1,
        "seed": seed,
        "updates": 12,
        "folder": f"/runs/seed-{seed}",
        "commit": "c0ffee",
        "evaluations": [
            {
                "step": step,
                "epoch": step / 15,
                "images": batch * step,
                "seconds": float(step),
                "top1": found,
                "top5": 1.0,
                "loss": 1 - found,
            }
            for step, found in evaluations
        ],
    }
