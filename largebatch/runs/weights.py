"""Read and write files of weights as timm, torchvision and PyTorch's tools save them.

The weights may be all of the file or be under a key, with prefixes in their names, as .pth or as
.safetensors. Nothing in a file is executed. A written file keeps everything but the replaced
weights.
"""

import argparse
import hashlib
import pickle
import re
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import broadcast_bytes
from largebatch.errors import CheckpointError, reason_of, shorten
from largebatch.models import classifier
from largebatch.models.inputs import sizes
from largebatch.storage import whole_file
from largebatch.training.checkpoint import CONTENT, load_checkpoint
from largebatch.training.state import TrainState

_PLACES = (
    *("state_dict", "model", "model_state_dict"),
    *("net", "network", "module", "params", "weights", "state"),
)
_AVERAGED = (
    *("state_dict_ema", "model_ema", "ema", "ema_model"),
    *("ema_state_dict", "model_ema_state_dict", "params_ema"),
)
"""Keys of weights, and of their moving average, in files of timm, torchvision and other tools."""

_COUNTERS = {"n_averaged", "steps"}
"""Names of the number of averaged models beside a moving average, of PyTorch's and MMEngine's."""

_DEPTH = 3
"""Places inside each other that are searched; a file may contain itself."""

_WRAPPERS = {
    *("_orig_mod", "_checkpoint_wrapped_module"),
    *("_fsdp_wrapped_module", "_fpw_module", "_forward_module"),
}
"""Parts that wrappers put into names: of torch.compile, recomputed activations, FSDP, Fabric."""

_PLAIN: list[Any] = [
    argparse.Namespace,  # timm's options
    *(np.ndarray, np.dtype, *{type(np.dtype(code)) for code in np.typecodes["All"]}),
    *(
        (value.__reduce__()[0], f"{package}.multiarray.{name}")
        for name, value in {"scalar": np.float64(), "_reconstruct": np.empty(0)}.items()
        for package in ("numpy.core", "numpy._core")  # NumPy 1 and 2
    ),
]
"""Types of plain values that torch.load may build besides its own."""

_SAFE = ".safetensors"


@dataclass(frozen=True, slots=True)
class Weights:
    """Content of a file of weights."""

    path: Path
    content: Any
    """The whole content; of a .safetensors file, the tensors alone."""

    place: MutableMapping[str, Any]
    """The weights by the names in the file; a part of the content. Other values may be among them,
    and NumPy's arrays may be weights."""

    metadata: dict[str, str] | None = None
    """Metadata of a .safetensors file."""

    keys: dict[str, str] = field(default_factory=dict)
    """Names in the file by those in the last model that the weights fit."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The weights, by the names in the file."""
        return {
            key: value if isinstance(value, Tensor) else torch.tensor(value)
            for key, value in self.place.items()
            if isinstance(value, Tensor) or _is_array(value)
        }

    def state_for(self, model: nn.Module, *, without: Collection[str] = ()) -> dict[str, Tensor]:
        """Return the tensors under the model's names, except those `without`; note the names.

        Raises CheckpointError if they do not fit.
        """
        tensors, expected = self.tensors, model.state_dict()
        keys = self._by_name(expected)
        here = {name: own[0] for name, own in keys.items() if name not in without}
        there = {name: own for name, own in expected.items() if name not in without}
        counters = {name for name in there if name.endswith("num_batches_tracked")}
        problems = {
            "missing": sorted(there.keys() - here.keys() - counters),
            "not known": sorted(here[name] for name in here.keys() - there.keys()),
            "twice": [
                f"{name}: {' and '.join(keys[name])}" for name in sorted(here) if keys[name][1:]
            ],
            "of another shape": [
                f"{name}: {sizes(tensors[key])}, expected {sizes(there[name])}"
                for name, key in here.items()
                if name in there and tensors[key].shape != there[name].shape
            ],
        }
        misfits = [
            f"{len(keys)} {what} ({shorten(keys, most=3)})"
            for what, keys in problems.items()
            if keys
        ]
        if misfits:
            raise CheckpointError(f"{self.path}: the weights do not fit: {'; '.join(misfits)}")
        self.keys.clear()
        self.keys.update(here)
        return {name: tensors[key] for name, key in here.items()}

    def replace(self, changed: Mapping[str, Tensor]) -> None:
        """Replace tensors, under the names of state_for's model, each in its type in the file."""
        tensors = self.tensors
        for name, value in changed.items():
            key = self.keys[name]
            there = tensors[key]
            cast = value.detach().to("cpu", there.dtype, copy=True)
            if not cast.isfinite().all():
                raise CheckpointError(
                    f"{self.path}: the new {name} has values beyond what the {there.dtype} of the "
                    "file can hold; convert the file to float32 first"
                )
            self.place[key] = cast if isinstance(self.place[key], Tensor) else cast.numpy()

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

    def _by_name(self, expected: Collection[str]) -> dict[str, list[str]]:
        """Return the names in the file by the names expected; unknown ones by their own.

        The longest end of a name that is expected counts, as wrappers put prefixes before it,
        unless another name is equal to that end. Arrays that are not expected are not weights.
        """
        names = {
            key: [part for part in key.split(".") if part not in _WRAPPERS]
            for key, value in self.place.items()
            if (isinstance(value, Tensor) or _is_array(value)) and key not in _COUNTERS
        }
        ends = set(expected) - {".".join(parts) for parts in names.values()}
        by_name: dict[str, list[str]] = {}
        for key, parts in names.items():
            name = ".".join(parts)
            name = name if name in expected else _end(parts, ends) or name
            if name in expected or isinstance(self.place[key], Tensor):
                by_name.setdefault(name, []).append(key)
        return by_name


def read_weights(path: Path, *, ema: bool = False) -> Weights:
    """Read a file of weights to the CPU, or with `ema` their EMA.

    Nothing in the file is executed. Raises CheckpointError if it cannot be read.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file of weights")
    try:
        if _is_safe(path):
            return _read_safe(path)
        with torch.serialization.safe_globals(_PLAIN):
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
        if CONTENT in (file.metadata() or {}):  # a checkpoint of ours
            tensors = load_checkpoint(path).model(source=path)
            return Weights(path, tensors, tensors, {"format": "pt"})
        tensors = {key: file.get_tensor(key) for key in keys}
        return Weights(path, tensors, tensors, file.metadata())


def _find(path: Path, content: object, *, ema: bool) -> dict[str, Any]:
    words = _AVERAGED if ema else _PLACES
    places = dict(_places(content, words))
    if not places and not ema and _are_weights(content):
        return content
    if len(places) == 1:
        return places.popitem()[1]
    if places:
        raise CheckpointError(
            f"{path}: holds weights under {' and '.join(places)}; save those to take alone"
        )
    found = list(map(str, content)) if isinstance(content, dict) else []
    hint = "; --ema takes its EMA" if not ema and dict(_places(content, _AVERAGED)) else ""
    what = f"a mapping of {shorten(found, most=3)}" if found else type(content).__name__
    raise CheckpointError(
        f"{path}: expected weights{' of an EMA' * ema} by name, "
        f"{'' if ema else 'bare or '}under {' or '.join(words)}; found {what}{hint}"
    )


def _places(
    content: object, words: Sequence[str], above: str = ""
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the weights under these keys, or under a usual key inside, by their dotted place."""
    if not isinstance(content, dict) or above.count(".") > _DEPTH:
        return
    for word in dict.fromkeys([*words, "state"]):
        part = content.get(word)
        if word in words and _are_weights(part):
            yield f"{above}{word}", part
        else:
            yield from _places(part, words if word == "state" else _PLACES, f"{above}{word}.")


def _are_weights(content: object) -> TypeGuard[dict[str, Any]]:
    return (
        isinstance(content, dict)
        and all(isinstance(key, str) for key in content)
        and any(isinstance(value, Tensor) or _is_array(value) for value in content.values())
        and not any(isinstance(value, dict) for value in content.values())
    )


def _is_array(value: object) -> bool:
    return (
        isinstance(value, np.ndarray)
        and value.dtype.kind in "fiub"
        and value.dtype.isnative
        and value.dtype.itemsize <= np.dtype(np.float64).itemsize
    )


def _end(parts: Sequence[str], expected: Collection[str]) -> str | None:
    """Return the longest end of a name that is expected, with or without parts called module."""
    for start in range(len(parts)):
        own = parts[start:]
        for name in (".".join(own), ".".join(part for part in own if part != "module")):
            if name in expected:
                return name
    return None


def _is_safe(path: Path) -> bool:
    return path.suffix == _SAFE


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
        model.load_state_dict(
            {**model.state_dict(), **_starting_state(weights, model, drawn=drawn)}
        )
    for tensor in model.state_dict().values():
        backend.broadcast(tensor)
    state.weights_sha256 = broadcast_bytes(digest, backend).decode()


def _starting_state(weights: Weights, model: nn.Module, *, drawn: bool) -> dict[str, Tensor]:
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
    try:
        own = set(classifier(model).parameters())
    except ValueError:
        return frozenset()
    return frozenset(name for name, weight in model.named_parameters() if weight in own)
