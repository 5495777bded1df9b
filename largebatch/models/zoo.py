"""Models of timm and torchvision by name, and their image preparation."""

import math
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from torch import nn

from largebatch.errors import RecipeError, nearest
from largebatch.optional import require_timm, require_torchvision

TORCHVISION = "torchvision/"
"""Prefix of the names of torchvision's models."""

_REFUSALS = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError),
    *(RuntimeError, TypeError, ValueError),
)
"""Exceptions of the constructors for unexpected arguments."""


def build(name: str, *, num_classes: int, arguments: Mapping[str, Any]) -> nn.Module:
    """Build a known model with new weights; raise RecipeError if its library cannot."""
    library = "torchvision" if name.startswith(TORCHVISION) else "timm"
    # What would download or load weights is passed too, so that a recipe cannot override it: a
    # repeated keyword is an error.
    fresh: dict[str, bool | None]
    if library == "torchvision":
        create = _torchvision().get_model
        fresh = {"weights": None}
    else:
        files = ("pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir")
        create = require_timm().create_model
        fresh = {"pretrained": False, **dict.fromkeys(files)}
    plain = name.removeprefix(TORCHVISION)
    try:
        model: nn.Module = create(plain, num_classes=num_classes, **fresh, **arguments)
    except _REFUSALS as error:
        reason = str(error) or type(error).__name__
        raise RecipeError(
            f"model.arguments: {library} cannot build {name} with these arguments: {reason}"
        ) from None
    return model


def is_timms(name: str) -> bool:
    """Return True if timm has a model of this name, without the tag of its weights."""
    return bool(require_timm().is_model(name))


def require_known(name: str, *, others: tuple[str, ...] = ()) -> None:
    """Raise RecipeError with the nearest names, or those of `others`, if there is no such model."""
    if name.startswith(TORCHVISION):
        models = _torchvision()
        plain = models.list_models(module=models)
        library = "torchvision"
        known = [TORCHVISION + model for model in plain]
    elif "." not in name and is_timms(name):
        return  # faster than listing a thousand names
    else:
        library = "timm"
        known = require_timm().list_models()
        tagged, _, tag = name.partition(".")
        if tag and tagged in known:
            known = [*known, *require_timm().list_pretrained(f"{tagged}.*")]
    if name not in known:
        where = "torchvision.models" if library == "torchvision" else library
        hint = nearest(
            name, [*others, *known], otherwise=f"see {where}.list_models(), or --import its module"
        )
        raise RecipeError(f"model.name: {library} has no model {name!r}; {hint}")


def preparation(name: str) -> dict[str, Any]:
    """Return the model's image preparation in evaluation, as keys of a recipe's data section."""
    if name.startswith(TORCHVISION):
        transform = (
            _torchvision().get_model_weights(name.removeprefix(TORCHVISION)).DEFAULT.transforms()
        )
        size, resize = transform.crop_size[0], transform.resize_size[0]
        mean = transform.mean
        std = transform.std
        way = transform.interpolation.value
    else:
        timm = require_timm()
        config = timm.data.resolve_data_config(
            pretrained_cfg=timm.get_pretrained_cfg(name).to_dict()
        )
        size = config["input_size"][-1]
        mean = config["mean"]
        std = config["std"]
        whole = config["crop_mode"] == "squash"
        resize = None if whole else math.floor(size / config["crop_pct"])
        way = config["interpolation"]
    return {
        "image_size": size,
        "eval_resize": resize,
        "mean": list(mean),
        "std": list(std),
        "interpolation": way,
    }


def _torchvision() -> ModuleType:
    require_torchvision()
    from torchvision import models

    return models  # type: ignore[no-any-return]  # torchvision is not typed
