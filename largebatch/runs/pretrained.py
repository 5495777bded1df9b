"""Weights that were trained elsewhere, to polish or to begin with: a model of timm or torchvision.

The recipe that polishes them follows from the folder of images and from how the model's library
prepares images; the rest is the polishing of our own runs. Only running means and variances change.
"""

import logging
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from largebatch.distributed.agreement import checksum
from largebatch.errors import CheckpointError, DataError, reason_of
from largebatch.models import build, is_timms, require_known, zoo
from largebatch.optional import require_timm
from largebatch.polish import Drift
from largebatch.recipe.model import Model
from largebatch.runs.build import open_measuring
from largebatch.runs.checkpoints import (
    find_saved,
    load_saved,
    restore,
    with_statistics,
)
from largebatch.runs.options import Options
from largebatch.runs.weights import load_initial, metadata_of
from largebatch.storage import write_whole, writing
from largebatch.training.evaluation import Metrics


def polish_weights(
    path: Path,
    options: Options,
    *,
    model: str | None = None,
    ema: bool = False,
    samples: int | None = None,
) -> tuple[Metrics, Metrics, Drift]:
    """Write polished weights to `options.out` as .safetensors, under the model's own names.

    Returns what was measured before and after, and how far the statistics were off.

    `path` is an export, or a file of weights with the name of its `model`: one of timm, or of
    torchvision with `torchvision/` before it. `ema` takes the moving average in the file, `samples`
    is the number of images to measure (None: all). Raises CheckpointError, RecipeError or DataError
    for weights, a model or images that do not fit.
    """
    if model is not None and options.data is None:
        raise DataError("polishing measures images; pass --data DIR")
    out = options.out
    if out.suffix != ".safetensors":
        raise CheckpointError(f"{out}: expected the name of a file that ends in .safetensors")
    if out.exists():
        raise CheckpointError(f"{out}: exists already; choose another --out")
    saved, options = load_saved(path, options, model=model, ema=ema)
    saved = saved._replace(recipe=with_statistics(saved.recipe, samples))
    facts = {"command": "polish", "--weights": checksum(saved.weights)}
    with open_measuring(saved.recipe, replace(options, out=Path()), facts) as session:
        network = session.state.model
        evaluator = session.evaluator
        restore(session, saved)
        before = evaluator.validation()
        drift = evaluator.statistics(samples or saved.recipe.train_samples)
        after = evaluator.validation()
        if session.backend.rank == 0:
            tensors = network.state_dict().items()
            state = {key: value.cpu().clone().contiguous() for key, value in tensors}  # untied
            content = safetensors.torch.save(state, metadata=metadata_of(saved.classes))
            with writing(out):
                write_whole(out, content)
    return before, after, drift


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingModel:
    """A model to begin a training with."""

    model: Model
    data: dict[str, Any] = field(default_factory=dict)
    """Image preparation of its weights, as keys of a recipe's data section; empty if unknown."""

    image_size: int | None = None
    """Size in pixels that the model's library prepares images in; None for other models."""

    has_batchnorm: bool = True


TIMM = "timm:"
"""Before the name of weights that timm downloads."""

TRIES, PAUSE, TIMEOUT = 3, 1.0, 5.0
"""Attempts to reach the place of weights, the seconds between them, and those that one may take."""

_COLORS = {"mean", "std", "interpolation"}


def start_with(weights: str | None, name: str | None, *, classes: int) -> StartingModel:
    """Return a model with weights, or `name` without; a new classifier is drawn for the weights.

    `weights` are `timm:NAME`, which are downloaded once into NAME.safetensors here, a file of the
    model `name`, or a run, a checkpoint or an export of this package. Raises CheckpointError if
    they cannot be read, downloaded or do not fit, RecipeError for an unknown model.
    """
    section: dict[str, Any] = {"name": name}
    data: dict[str, Any] = {}
    path = Path(weights or "")
    if weights is not None and weights.startswith(TIMM):
        name = weights.removeprefix(TIMM)
        section = {"name": name}
        path = _download(name)
    elif weights is not None and name is None:
        saved = find_saved(path)
        path = saved.path
        recipe = saved.recipe
        section = recipe.model.model_dump(include={"name", "arguments"}, exclude_unset=True)
        data = recipe.data.model_dump(mode="json", include=_COLORS)
    name = str(section["name"])
    require_known(name)
    is_of_library = is_timms(name) or name.startswith(zoo.TORCHVISION)
    prepared = zoo.preparation(name) if is_of_library else {}
    if weights is not None:
        data = data or prepared
        # The classifier is new: its weights begin small, so that its first gradients hardly disturb
        # the others.
        section |= {"weights": str(path), "head_std": 0.01}
    model = Model.model_validate(section)
    built = build(name, num_classes=classes, arguments=model.arguments)
    if weights is not None:
        load_initial(path, built, drawn=True)
    size = prepared.get("image_size")
    normalized = any(isinstance(layer, _BatchNorm) for layer in built.modules())
    return StartingModel(model=model, data=data, image_size=size, has_batchnorm=normalized)


def download_of(weights: str) -> str | None:
    """Return a line about the download that `start_with` will make; None if it makes none."""
    name = weights.removeprefix(TIMM)
    if name == weights or _file_of(name).exists():
        return None
    zoo.require_known(name)
    address = _address(name)
    if address is None or _is_offline():
        return None
    with torch.device("meta"):  # only the shapes
        model = zoo.build(name, num_classes=1000, arguments={})
    megabytes = sum(tensor.nbytes for tensor in model.state_dict().values()) / 1e6
    return f"downloading {weights} from {address} (about {megabytes:.0f} MB)"


def _download(name: str) -> Path:
    zoo.require_known(name)
    path = _file_of(name)
    if path.exists():
        return path
    address = _address(name)
    try:
        if address is not None and _is_offline():
            raise OSError("they are not in the cache of the hub, and HF_HUB_OFFLINE is set")
        if address is not None:
            _require_reachable(address)
        with _quiet("huggingface_hub", "timm"):
            state = require_timm().create_model(name, pretrained=True).state_dict()
    except Exception as error:  # of the network, the hub or timm
        raise CheckpointError(
            f"{TIMM}{name}: these weights cannot be loaded: {reason_of(error)}. Write {path} where "
            f"there is a network, and copy it to this folder: {_writes(name)}"
        ) from None
    # In the current folder, not in a cache: a recipe names the file, and needs no network later.
    with writing(path, hint="make room, or begin without: --weights none"):
        write_whole(path, safetensors.torch.save(state, metadata={"format": "pt"}))
    return path


def _file_of(name: str) -> Path:
    return Path(f"{name}.safetensors")


def _writes(name: str) -> str:
    """Return a command that writes timm's weights to the file that they are loaded from."""
    saved = f"timm.create_model('{name}', pretrained=True).state_dict(), '{_file_of(name)}'"
    return f'python -c "import timm, safetensors.torch; safetensors.torch.save_file({saved})"'


def _address(name: str) -> str | None:
    """Return where timm downloads weights from; None if they are in the cache of the hub."""
    from huggingface_hub import constants, try_to_load_from_cache

    config = require_timm().get_pretrained_cfg(name)
    if not config.hf_hub_id:
        return str(config.url)
    files = ("model.safetensors", "pytorch_model.bin")
    if any(isinstance(try_to_load_from_cache(config.hf_hub_id, file), str) for file in files):
        return None
    return str(constants.ENDPOINT)


def _is_offline() -> bool:
    """Return True if the user forbids the hub's library to use the network."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _require_reachable(address: str) -> None:
    """Raise OSError unless a server answers, whatever it says.

    The hub's own attempts take a minute and print a line each.
    """
    for attempt in range(1, TRIES + 1):
        try:
            with urllib.request.urlopen(address, timeout=TIMEOUT):  # noqa: S310 -- timm's address
                return
        except urllib.error.HTTPError:
            return
        except OSError as error:
            if attempt == TRIES:
                reason = getattr(error, "reason", error)
                raise OSError(f"{address} cannot be reached ({reason})") from None
        time.sleep(PAUSE)


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Hide the warnings of packages."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
