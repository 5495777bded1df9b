"""Read and write files of weights as timm, torchvision and PyTorch's tools save them.

The weights may be all of the file or stand under a key, with a prefix before every name, as .pth or
as .safetensors. Nothing in a file is executed. A written file keeps everything but the replaced
weights.
"""

import argparse
import hashlib
import pickle
import re
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from largebatch.distributed.connection import broadcast_bytes
from largebatch.errors import CheckpointError, reason_of, shorten
from largebatch.models import classifier
from largebatch.storage import whole_file
from largebatch.training.checkpoint import HEADER, load_checkpoint
from largebatch.training.trainer import Trainer

_PLACES = ("state_dict", "model")
_AVERAGED = ("state_dict_ema", "model_ema")
"""Keys of weights, and of their moving average, in files of timm and torchvision."""

_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+")
"""Prefixes of names by DistributedDataParallel, AveragedModel and torch.compile."""

_SAFE = ".safetensors"


@dataclass(frozen=True, slots=True)
class Weights:
    """Content of a file of weights."""

    path: Path
    content: Any
    """The whole content; of a .safetensors file, the tensors alone."""

    tensors: MutableMapping[str, Tensor]
    """The weights by the names in the file; a part of the content."""

    metadata: dict[str, str] | None = None
    """Metadata of a .safetensors file."""

    def state_for(self, model: nn.Module, *, without: Collection[str] = ()) -> dict[str, Tensor]:
        """Return the tensors under the model's names, except those `without`.

        Raises CheckpointError if they do not fit.
        """
        here = {name: key for name, key in self._by_plain_name().items() if name not in without}
        there = {name: own for name, own in model.state_dict().items() if name not in without}
        counters = {name for name in there if name.endswith("num_batches_tracked")}
        problems = {
            "missing": sorted(there.keys() - here.keys() - counters),
            "not known": sorted(here.keys() - there.keys()),
            "of another shape": [
                f"{name}: {_shape(self.tensors[key])}, expected {_shape(there[name])}"
                for name, key in here.items()
                if name in there and self.tensors[key].shape != there[name].shape
            ],
        }
        misfits = [
            f"{len(keys)} {what} ({shorten(keys, most=3)})"
            for what, keys in problems.items()
            if keys
        ]
        if misfits:
            raise CheckpointError(f"{self.path}: the weights do not fit: {'; '.join(misfits)}")
        return {name: self.tensors[key] for name, key in here.items()}

    def replace(self, changed: Mapping[str, Tensor]) -> None:
        """Replace tensors, given under the model's names, each in its type in the file."""
        here = self._by_plain_name()
        for name, value in changed.items():
            there = self.tensors[here[name]]
            cast = value.detach().to("cpu", there.dtype, copy=True)
            if not cast.isfinite().all():
                raise CheckpointError(
                    f"{self.path}: the new {name} has values beyond what the {there.dtype} of the "
                    "file can hold; convert the file to float32 first"
                )
            self.tensors[here[name]] = cast

    def write(self, path: Path) -> None:
        """Write the whole content, or the weights alone as .safetensors; whole or not at all."""
        try:
            with whole_file(path) as file:
                if _is_safe(path):
                    from safetensors.torch import save

                    # safetensors refuses views and tensors that share memory
                    own = {name: value.contiguous().clone() for name, value in self.tensors.items()}
                    file.write(save(own, metadata=self.metadata or {"format": "pt"}))
                else:
                    torch.save(self.content, file)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from None

    def _by_plain_name(self) -> dict[str, str]:
        """Return the name of each tensor in the file by its name in a model."""
        return {_WRAPPERS.sub("", key): key for key in self.tensors if key != "n_averaged"}


def read_weights(path: Path, *, ema: bool = False) -> Weights:
    """Read a file of weights to the CPU, or with `ema` their EMA.

    Nothing in the file is executed. Raises CheckpointError if it cannot be read.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file of weights")
    try:
        if _is_safe(path):
            return _read_safe(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # timm's options: plain values
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise CheckpointError(
            f"{path}: not a readable file of weights: neither .pth nor .safetensors, or it has "
            "objects besides tensors and plain values, which only code in the file could rebuild"
        ) from None
    except Exception as error:
        raise CheckpointError(
            f"{path}: not a readable file of weights: {reason_of(error)}"
        ) from None
    return Weights(path, content, _find(path, content, ema=ema))


def check_new(out: Path) -> None:
    """Raise CheckpointError unless `out` is a new file in a folder that exists."""
    if out.exists():
        raise CheckpointError(f"{out}: exists already; choose another --out")
    if not out.absolute().parent.is_dir():
        raise CheckpointError(f"{out}: there is no folder {out.absolute().parent}")


def _read_safe(path: Path) -> Weights:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        keys = set(file.keys())
        if HEADER in keys:  # a checkpoint of ours
            tensors = load_checkpoint(path).model(source=path)
            return Weights(path, tensors, tensors, {"format": "pt"})
        tensors = {key: file.get_tensor(key) for key in keys}
        return Weights(path, tensors, tensors, file.metadata())


def _find(path: Path, content: object, *, ema: bool) -> MutableMapping[str, Tensor]:
    """Return the part of the content that holds the weights, or with `ema` their EMA."""
    found = list(content) if isinstance(content, dict) else []
    if isinstance(content, dict):
        for word in _AVERAGED if ema else _PLACES:
            if _are_weights(content.get(word)):
                return content[word]  # type: ignore[no-any-return]  # just seen
        if _are_weights(content) and not ema:
            return content
    words = " or ".join(_AVERAGED if ema else _PLACES)
    hint = "; --ema takes its EMA" if set(found) & set(_AVERAGED) else ""
    what = f"a mapping of {shorten(found, most=3)}" if found else type(content).__name__
    raise CheckpointError(
        f"{path}: expected weights{' of an EMA' * ema} by name, "
        f"{'' if ema else 'bare or '}under {words}; found {what}{hint if not ema else ''}"
    )


def _are_weights(content: object) -> bool:
    """Return True if `content` maps names to tensors."""
    return (
        isinstance(content, dict)
        and len(content) > 0
        and all(isinstance(value, Tensor) for value in content.values())
    )


def _is_safe(path: Path) -> bool:
    return path.suffix == _SAFE


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "a number"


def begin_with(path: Path, trainer: Trainer) -> None:
    """Load the initial weights from a file, which worker 0 reads for all.

    With `model.head_std` the classifier keeps its random weights. Raises CheckpointError if the
    file cannot be read or does not fit the model.
    """
    model, backend = trainer.state.model, trainer.backend
    digest = None
    if backend.rank == 0:
        weights = read_weights(path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest().encode()
        drawn = trainer.recipe.model.head_std is not None
        state = _starting_state(weights, model, drawn=drawn)
        model.load_state_dict({**model.state_dict(), **state})
    for tensor in model.state_dict().values():
        backend.broadcast(tensor)
    trainer.state.weights_sha256 = broadcast_bytes(digest, backend).decode()


def _starting_state(weights: Weights, model: nn.Module, *, drawn: bool) -> dict[str, Tensor]:
    """Return the initial tensors, without the classifier's if it is `drawn`."""
    if drawn:
        return weights.state_for(model, without=_classifier_names(model))
    try:
        return weights.state_for(model)
    except CheckpointError as error:
        weights.state_for(model, without=_classifier_names(model))  # does more not fit?
        raise CheckpointError(
            f"{error}; all but the classifier fits: to draw a new one, for data.classes classes, "
            "set model.head_std, such as 0.01"
        ) from None


def _classifier_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the classifier's weights; none if no classifier is found."""
    try:
        own = set(classifier(model).parameters())
    except ValueError:
        return frozenset()
    return frozenset(name for name, weight in model.named_parameters() if weight in own)
