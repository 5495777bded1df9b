"""Files of weights to begin with, of timm, torchvision and PyTorch: state dicts by name.

The weights may be all of the file or be under a key, as .pth or as .safetensors, with the prefixes
of DataParallel, torch.compile or a module around the network. Nothing in a file is executed.
"""

import argparse
import hashlib
import json
import pickle
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import broadcast_bytes
from largebatch.errors import CheckpointError, printable, reason_of, shorten
from largebatch.models import classifier
from largebatch.models.inputs import sizes
from largebatch.models.wrappers import without_wrappers
from largebatch.training.checkpoint import CONTENT, constants_of, load_checkpoint, require_finite
from largebatch.training.state import TrainState

WEIGHTS, CLASSES = "model.safetensors", "classes"
"""File of an export with the weights, and the key in its metadata of the classes, as JSON."""

_PLACES = ("state_dict", "model", "model_state_dict", "net")
_AVERAGED = ("state_dict_ema", "model_ema", "ema", "ema_state_dict")
"""Keys of weights, and of their moving average, in files of timm, torchvision and other tools."""


def begin_with(path: Path, state: TrainState, backend: Backend, *, drawn: bool) -> None:
    """Load the initial weights from a file, which worker 0 reads for all.

    If the classifier is `drawn`, it keeps its random weights. Raises CheckpointError if the file
    cannot be read or does not fit the model.
    """
    model = state.model
    digest = None
    # Other hosts may not have the file: its weights are sent, and its digest for the record.
    if backend.rank == 0:
        load_initial(path, model, drawn=drawn)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest().encode()
    for tensor in model.state_dict().values():
        backend.broadcast(tensor)
    state.weights_sha256 = broadcast_bytes(digest, backend).decode()


def load_initial(path: Path, model: nn.Module, *, drawn: bool) -> None:
    """Load a file of weights into a model, except into a classifier that is `drawn`."""
    weights = read_weights(path)
    of_head = set(classifier(model).parameters()) if drawn else set()
    names = {name for name, weight in model.named_parameters() if weight in of_head}
    try:
        state = state_for(model, weights, without=names)
        require_finite(state, constants_of(model), source="the weights")
    except CheckpointError as error:
        hint = "; to draw a new classifier, set model.head_std, such as 0.01"
        raise CheckpointError(f"{path}: {error}{'' if drawn else hint}") from None
    model.load_state_dict({**model.state_dict(), **state})


def read_weights(path: Path, *, ema: bool = False) -> dict[str, Tensor]:
    """Read the weights of a file, or their moving average, to the CPU, by the names in the file.

    Nothing in the file is executed. Raises CheckpointError if it cannot be read.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: there is no such file of weights")
    if ema and path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: holds one set of weights, and no EMA beside them")
    try:
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                if CONTENT in (file.metadata() or {}):  # a checkpoint of ours
                    return load_checkpoint(path).model(source=path)
                names = file.keys()
                return {name: file.get_tensor(name) for name in names}
        with torch.serialization.safe_globals([argparse.Namespace]):  # timm's options
            content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        refused = re.search(r"GLOBAL (\S+)", str(error))
        reason = "neither .pth nor .safetensors"
        if refused:
            reason = (
                f"it holds {refused[1]}, which only code could rebuild: load the file where you "
                "trust that code, and save the model's state_dict() alone"
            )
        raise CheckpointError(f"{path}: not a readable file of weights: {reason}") from None
    except Exception as error:
        reason = reason_of(error).partition(". In PyTorch")[0]  # then: trust the file
        raise CheckpointError(f"{path}: not a readable file of weights: {reason}") from None
    inside = content if isinstance(content, dict) else {}
    keys = _AVERAGED if ema else _PLACES
    by_key = {key: _tensors(inside.get(key)) for key in keys}
    filled = [key for key, tensors in by_key.items() if tensors]
    if len(filled) > 1:
        raise CheckpointError(f"{path}: holds weights under {' and '.join(filled)}; save one alone")
    tensors: dict[str, Tensor] = {}
    if filled:
        tensors = by_key[filled[0]]
    elif not ema:  # a state dict alone; an average is never without its key
        tensors = _tensors(inside)
    if not tensors:
        raise CheckpointError(
            f"{path}: expected weights by name{'' if ema else ', bare or'} under "
            f"{' or '.join(keys)}; found {shorten(list(map(str, inside)), most=3)}"
        )
    return {name: _plain(tensor, f"{path}: {name}") for name, tensor in tensors.items()}


def _plain(tensor: Tensor, source: str) -> Tensor:
    """Return a tensor whose elements are in one piece of memory; CheckpointError if it has none."""
    if tensor.is_meta:
        raise CheckpointError(f"{source} has no numbers (device meta); save the loaded model")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else "sparse"
        raise CheckpointError(f"{source} is {kind}; save it dense, in floating point")
    return tensor.detach().contiguous()


def metadata_of(classes: Sequence[str]) -> dict[str, str]:
    """Return the metadata of a file of weights, with the names of the classes."""
    return {"format": "pt", CLASSES: json.dumps(list(classes))}


def read_classes(path: Path, *, number: int) -> list[str]:
    """Return the names of the classes that an export stores beside its weights, by label.

    None are returned unless there is one for each of the `number` of classes.
    """
    with safe_open(path, framework="pt") as file:
        text = (file.metadata() or {}).get(CLASSES, "[]")
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if not isinstance(names, list) or len(names) != number:
        return []
    return list(map(printable, map(str, names)))


def _tensors(content: object) -> dict[str, Tensor]:
    if not isinstance(content, dict):
        return {}
    tensors = {
        key: value
        for key, value in content.items()
        if isinstance(key, str) and isinstance(value, Tensor)
    }
    tensors.pop("n_averaged", None)  # the number of averaged models, of PyTorch's AveragedModel
    return tensors


def state_for(
    model: nn.Module, tensors: Mapping[str, Tensor], *, without: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return tensors under the model's names and in its types, except those `without`.

    Counters keep their type, in which NaN can be seen. Raises CheckpointError if they do not fit.
    """
    expected = model.state_dict()
    keys: dict[str, list[str]] = {}
    for key in tensors:
        keys.setdefault(_name(key, expected), []).append(key)
    # Several keys of the file may have one name, with and without a wrapper: see "twice".
    key_of = {name: same_name[0] for name, same_name in keys.items() if name not in without}
    wanted = {name: tensor for name, tensor in expected.items() if name not in without}
    counters = {name for name in wanted if name.endswith("num_batches_tracked")}
    shared = [name for name in key_of if name in wanted]
    problems = {
        "missing": sorted(wanted.keys() - key_of.keys() - counters),
        "not known": sorted(key_of[name] for name in key_of.keys() - wanted.keys()),
        "twice": [name for name in sorted(key_of) if len(keys[name]) > 1],
        "of another shape": [
            f"{name}: {sizes(tensors[key_of[name]])}, expected {sizes(wanted[name])}"
            for name in shared
            if tensors[key_of[name]].shape != wanted[name].shape
        ],
        "of another type": [
            f"{name}: {_type(tensors[key_of[name]])}, expected {_type(wanted[name])}"
            for name in shared
            if not _converts(tensors[key_of[name]], wanted[name])
        ],
    }
    misfits = [
        f"{len(names)} {problem} ({shorten(names, most=3)})"
        for problem, names in problems.items()
        if names
    ]
    if misfits:
        raise CheckpointError(f"the weights do not fit: {'; '.join(misfits)}")
    state: dict[str, Tensor] = {}
    for name, key in key_of.items():
        state[name] = tensors[key]
        if wanted[name].is_floating_point():
            # Here, for require_finite: a number may be finite in float64 and infinite in the model.
            state[name] = tensors[key].to(wanted[name].dtype)
    return state


def named_as(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the model's names, where it has them."""
    expected = model.state_dict()
    return {_name(key, expected): value for key, value in tensors.items()}


def _converts(tensor: Tensor, expected: Tensor) -> bool:
    """Return True if a tensor's numbers are those of the expected one in another precision.

    Integers in place of weights have a scale of their own, which is not in the file.
    """
    if expected.is_complex():
        return tensor.is_complex()
    if expected.is_floating_point():
        return tensor.is_floating_point()
    return not tensor.is_complex()  # counters, which averages keep as floats


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _name(key: str, expected: Collection[str]) -> str:
    """Return the expected name of a key, without wrappers and the module around the network."""
    # A network that was an attribute of a module has one more name in front, such as `model.`; it
    # is dropped only where the rest is a name of this model.
    unwrapped = without_wrappers(key)
    inner = unwrapped.partition(".")[2]
    return inner if inner in expected and unwrapped not in expected else unwrapped
