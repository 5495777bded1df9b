"""Read and write files of weights of timm, torchvision and PyTorch: state dicts by name.

The weights may be all of the file or be under a key, as .pth or as .safetensors, with the prefixes
of DataParallel, torch.compile or a module around the network. Nothing in a file is executed. A
written file keeps everything but the replaced weights.
"""

import argparse
import hashlib
import pickle
import re
from collections.abc import Collection, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import broadcast_bytes
from largebatch.errors import CheckpointError, reason_of, shorten
from largebatch.models import classifier
from largebatch.models.inputs import sizes
from largebatch.storage import whole_file
from largebatch.training.checkpoint import CONTENT, load_checkpoint
from largebatch.training.state import TrainState

_PLACES = ("state_dict", "model", "model_state_dict", "net")
_AVERAGED = ("state_dict_ema", "model_ema", "ema")
"""Keys of weights, and of their moving average, in files of timm, torchvision and PyTorch."""

_WRAPPERS = {"module", "_orig_mod"}  # parts of names, of DataParallel and torch.compile
_COUNTER = "n_averaged"  # beside the weights of PyTorch's AveragedModel
_SAFE = ".safetensors"


@dataclass(frozen=True, slots=True)
class Weights:
    """Content of a file of weights."""

    path: Path
    content: Any
    """The whole content; of a .safetensors file, the tensors alone."""

    place: MutableMapping[str, Any]
    """The weights by the names in the file; a part of the content."""

    metadata: dict[str, str] | None = None
    """Metadata of a .safetensors file."""

    keys: dict[str, str] = field(default_factory=dict)
    """Names in the file by those in the last model that the weights fit."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The weights, by the names in the file."""
        return {
            key: value
            for key, value in self.place.items()
            if isinstance(value, Tensor) and key != _COUNTER
        }

    def state_for(self, model: nn.Module, *, without: Collection[str] = ()) -> dict[str, Tensor]:
        """Return the tensors under the model's names, except those `without`; note the names.

        Raises CheckpointError if they do not fit.
        """
        tensors, expected = self.tensors, model.state_dict()
        keys: dict[str, list[str]] = {}
        for key in tensors:
            keys.setdefault(_name(key, expected), []).append(key)
        here = {name: own[0] for name, own in keys.items() if name not in without}
        there = {name: own for name, own in expected.items() if name not in without}
        counters = {name for name in there if name.endswith("num_batches_tracked")}
        problems = {
            "missing": sorted(there.keys() - here.keys() - counters),
            "not known": sorted(here[name] for name in here.keys() - there.keys()),
            "twice": [name for name in sorted(here) if keys[name][1:]],
            "of another shape": [
                f"{name}: {sizes(tensors[key])}, expected {sizes(there[name])}"
                for name, key in here.items()
                if name in there and tensors[key].shape != there[name].shape
            ],
        }
        misfits = [
            f"{len(names)} {what} ({shorten(names, most=3)})"
            for what, names in problems.items()
            if names
        ]
        if misfits:
            raise CheckpointError(f"{self.path}: the weights do not fit: {'; '.join(misfits)}")
        self.keys.clear()
        self.keys.update(here)
        return {name: tensors[key] for name, key in here.items()}

    def replace(self, changed: Mapping[str, Tensor]) -> None:
        """Replace tensors, under the names of state_for's model, each in its type in the file."""
        for name, value in changed.items():
            key = self.keys[name]
            cast = value.detach().to("cpu", self.place[key].dtype, copy=True)
            if not cast.isfinite().all():
                raise CheckpointError(
                    f"{self.path}: the new {name} has values beyond what the {cast.dtype} of the "
                    "file can hold; convert the file to float32 first"
                )
            self.place[key] = cast

    def write(self, path: Path) -> None:
        """Write the whole content, or the weights alone as .safetensors; whole or not at all."""
        try:
            with whole_file(path) as file:
                if path.suffix == _SAFE:
                    # safetensors refuses views and tensors that share memory
                    own = {name: value.contiguous().clone() for name, value in self.tensors.items()}
                    file.write(save(own, metadata=self.metadata or {"format": "pt"}))
                else:
                    torch.save(self.content, file)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from None


def _name(key: str, expected: Collection[str]) -> str:
    """Return the expected name of a key, without wrappers and the module around the network."""
    parts = [part for part in key.split(".") if part not in _WRAPPERS]
    names = ".".join(parts), ".".join(parts[1:])
    return next((name for name in names if name in expected), names[0])


def read_weights(path: Path, *, ema: bool = False) -> Weights:
    """Read a file of weights to the CPU, or with `ema` their EMA.

    Nothing in the file is executed. Raises CheckpointError if it cannot be read.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file of weights")
    try:
        if path.suffix == _SAFE:
            return _read_safe(path)
        with torch.serialization.safe_globals([argparse.Namespace]):  # timm's options
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        reason = "neither .pth nor .safetensors"
        if found:
            reason = (
                f"it holds {found[1]}, which only code could rebuild: load the file where you "
                "trust that code, and save the model's state_dict() alone"
            )
        raise CheckpointError(f"{path}: not a readable file of weights: {reason}") from None
    except Exception as error:
        reason = reason_of(error).partition(". In PyTorch")[0]  # then: trust the file
        raise CheckpointError(f"{path}: not a readable file of weights: {reason}") from None
    inside = content if isinstance(content, dict) else {}
    words = _AVERAGED if ema else _PLACES
    places = {key: inside[key] for key in words if _are_weights(inside.get(key))}
    if not places and not ema and _are_weights(content):
        places = {"": content}
    if len(places) == 1:
        return Weights(path, content, places.popitem()[1])
    if places:
        raise CheckpointError(f"{path}: holds weights under {' and '.join(places)}; save one alone")
    raise CheckpointError(
        f"{path}: expected weights{' of an EMA' * ema} by name, {'' if ema else 'bare or '}under "
        f"{' or '.join(words)}; found {shorten(list(map(str, inside)), most=3)}"
    )


def _are_weights(content: object) -> bool:
    """Return True for a mapping of names with tensors among its values."""
    return (
        isinstance(content, dict)
        and all(isinstance(key, str) for key in content)
        and any(isinstance(value, Tensor) for value in content.values())
    )


def _read_safe(path: Path) -> Weights:
    with safe_open(path, framework="pt") as file:
        if CONTENT in (file.metadata() or {}):  # a checkpoint of ours
            tensors = load_checkpoint(path).model(source=path)
            return Weights(path, tensors, tensors, {"format": "pt"})
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 -- not a dict
        return Weights(path, tensors, tensors, file.metadata())


def check_new(out: Path) -> None:
    """Raise CheckpointError unless `out` is a new file in a folder that exists."""
    if out.exists():
        raise CheckpointError(f"{out}: exists already; choose another --out")
    if not out.absolute().parent.is_dir():
        raise CheckpointError(f"{out}: there is no folder {out.absolute().parent}")


def begin_with(path: Path, state: TrainState, backend: Backend, *, drawn: bool) -> None:
    """Load the initial weights from a file, which worker 0 reads for all.

    If the classifier is `drawn`, it keeps its random weights. Raises CheckpointError if the file
    cannot be read or does not fit the model.
    """
    model, digest = state.model, None
    if backend.rank == 0:
        weights = read_weights(path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest().encode()
        own = set(classifier(model).parameters()) if drawn else set()
        names = {name for name, weight in model.named_parameters() if weight in own}
        try:
            found = weights.state_for(model, without=names)
        except CheckpointError as error:
            hint = "; to draw a new classifier, set model.head_std, such as 0.01"
            raise CheckpointError(f"{error}{'' if drawn else hint}") from None
        model.load_state_dict({**model.state_dict(), **found})
    for tensor in model.state_dict().values():
        backend.broadcast(tensor)
    state.weights_sha256 = broadcast_bytes(digest, backend).decode()
