"""Polish weights that were trained elsewhere: any model of timm or torchvision.

A recipe is made for them, from the folder of images and from how the model's library prepares
images; everything else is what polishes our own runs. Only running means and variances change in
the file that is written: what timm, torchvision and PyTorch's tools save differs in where the
weights are (bare, under a word beside other things, with a prefix before every name, as .pth or as
.safetensors), and all of that is kept.
"""

import argparse
import json
import pickle
import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from largebatch.data.index.index import open_content
from largebatch.distributed.agreement import Facts, checksum
from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import broadcast_bytes
from largebatch.errors import CheckpointError, DataError, shorten
from largebatch.models import zoo
from largebatch.recipe.loading import parse_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.runs.build import Options, build_trainer, join
from largebatch.runs.checkpoints import (
    Comparison,
    compare,
    small_lr,
    with_statistics,
    with_updates,
)
from largebatch.storage import whole_file
from largebatch.training.evaluation import Metrics
from largebatch.training.stages import describe_unsettled, measure_statistics
from largebatch.training.trainer import Trainer

_PLACES = ("state_dict", "model")
_AVERAGED = ("state_dict_ema", "model_ema")
"""Under which words timm and torchvision keep weights, and the moving average of weights."""

_WRAPPERS = re.compile(r"^(?:module\.|_orig_mod\.)+")
"""What DistributedDataParallel, AveragedModel and torch.compile put before a name."""

_SAFE = ".safetensors"


@dataclass(frozen=True, slots=True)
class Weights:
    """The content of a file of weights."""

    path: Path
    content: Any
    """All of it; of a .safetensors file, the tensors alone."""

    tensors: MutableMapping[str, Tensor]
    """The weights, by the names in the file: a part of the content."""

    metadata: dict[str, str] | None = None
    """Words that a .safetensors file carries."""

    def state_for(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the tensors under the model's names. Raises CheckpointError if they do not fit."""
        here = self._by_plain_name()
        there = model.state_dict()
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
        """Take over tensors under the model's names, in the type that each has in the file."""
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
        """Write a file of the same format, whole or not at all."""
        try:
            with whole_file(path) as file:
                if _is_safe(path):
                    from safetensors.torch import save

                    file.write(save(dict(self.tensors), metadata=self.metadata))
                else:
                    torch.save(self.content, file)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be written: {error.strerror}") from None

    def _by_plain_name(self) -> dict[str, str]:
        """Return the name in the file of each tensor, by the name in a model."""
        return {_WRAPPERS.sub("", key): key for key in self.tensors if key != "n_averaged"}


def read_weights(path: Path, *, ema: bool = False) -> Weights:
    """Read a file of weights to the CPU; `ema` takes the EMA beside them.

    Nothing in the file is executed. Raises CheckpointError saying what is wrong with it.
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
            f"{path}: not a readable file of weights: neither .pth nor .safetensors, or with more "
            "in it than tensors and plain values, which only code from the file could rebuild"
        ) from None
    except Exception as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CheckpointError(f"{path}: not a readable file of weights: {reason}") from None
    return Weights(path, content, _find(path, content, ema=ema))


def check_format(path: Path, out: Path) -> None:
    """Raise CheckpointError unless `out` is a new file of the format of `path`."""
    if _is_safe(path) != _is_safe(out):
        raise CheckpointError(
            f"{out}: polished weights are written as they came: give a name that ends in "
            f"{path.suffix}"
        )
    if out.exists():
        raise CheckpointError(f"{out}: is there already; choose another --out")
    if not out.absolute().parent.is_dir():
        raise CheckpointError(f"{out}: there is no folder {out.absolute().parent}")


def _read_safe(path: Path) -> Weights:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 -- no mapping
        return Weights(path, tensors, tensors, file.metadata())


def _find(path: Path, content: object, *, ema: bool) -> MutableMapping[str, Tensor]:
    """Return the part of the content that holds the weights asked for."""
    found = list(content) if isinstance(content, dict) else []
    if isinstance(content, dict):
        for word in _AVERAGED if ema else _PLACES:
            if _are_weights(content.get(word)):
                return content[word]  # type: ignore[no-any-return]  # just seen
        if _are_weights(content) and not ema:
            return content
    words = " or ".join(_AVERAGED if ema else _PLACES)
    hint = "; its EMA is taken with --ema" if set(found) & set(_AVERAGED) else ""
    what = f"a mapping of {shorten(found, most=3)}" if found else type(content).__name__
    raise CheckpointError(
        f"{path}: expected weights{' of an EMA' * ema} by name, "
        f"{'' if ema else 'bare or '}under {words}; found {what}{hint if not ema else ''}"
    )


def _are_weights(content: object) -> bool:
    """Tell a mapping from names to tensors."""
    return (
        isinstance(content, dict)
        and len(content) > 0
        and all(isinstance(value, Tensor) for value in content.values())
    )


def _is_safe(path: Path) -> bool:
    return path.suffix == _SAFE


def _shape(tensor: Tensor) -> str:
    return " x ".join(map(str, tensor.shape)) or "a number"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """What to polish, and how its images are shown."""

    model: str
    """As timm or torchvision call it; `torchvision/` before it leaves no doubt."""

    weights: Path
    ema: bool = False
    """Take the EMA that the file holds beside the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Polished:
    """What was measured before and after."""

    before: Metrics
    after: Metrics
    note: str | None
    """A remark: that statistics never came to rest."""


def polish_weights(what: Pretrained, options: Options, *, samples: int | None = None) -> Polished:
    """Write a polished file to `options.out`; return what was measured before and after.

    `samples` is the number of clean training images to measure; None: all of them.
    """
    names = zoo.same_name(what.model)
    check_format(what.weights, options.out)
    weights = read_weights(what.weights, ema=what.ema)
    facts = {"command": "polish", "--samples": samples, **_facts(what, weights)}
    with join(options, facts) as backend:
        recipe, state = _fit(names, weights, options, backend)
        recipe = with_statistics(recipe, samples)
        assert recipe.polish is not None
        section = recipe.polish.statistics
        assert section is not None
        with _open(recipe, state, options, backend, measuring=True) as trainer:
            before = trainer.measure()
            drift = measure_statistics(trainer, section.samples, sequential=section.sequential)
            after = trainer.measure()
            if backend.rank == 0:
                weights.replace(_statistics(trainer.state.model))
                weights.write(options.out)
    return Polished(before=before, after=after, note=describe_unsettled(drift))


@contextmanager
def compare_weights(
    what: Pretrained, options: Options, *, samples: int | None, epochs: float, lr: float | None
) -> Iterator[Comparison]:
    """Measure what each way of polishing would do; the file is only read."""
    names = zoo.same_name(what.model)
    weights = read_weights(what.weights, ema=what.ema)
    asked = {"--samples": samples, "--epochs": epochs, "--lr": lr}
    facts = {"command": "polish --compare", **asked, **_facts(what, weights)}
    with join(options, facts) as backend:
        recipe, state = _fit(names, weights, options, backend)
        rate = lr or small_lr(recipe)
        recipe = with_updates(with_statistics(recipe, samples), epochs=epochs, lr=rate)
        with _open(recipe, state, options, backend, measuring=False) as trainer:
            yield compare(trainer)


def _facts(what: Pretrained, weights: Weights) -> Facts:
    """Return what every worker must be given alike, beside what is asked of the weights."""
    content = checksum(weights.tensors)
    return {"--model": what.model, "--weights": content}


@contextmanager
def _open(
    recipe: Recipe,
    state: dict[str, Tensor],
    options: Options,
    backend: Backend,
    *,
    measuring: bool,
) -> Iterator[Trainer]:
    """Build the model with these weights and all that works on it; no run folder."""
    nowhere = replace(options, out=Path())
    with build_trainer(recipe, nowhere, backend, measuring=measuring) as trainer:
        trainer.state.model.load_state_dict(state)
        yield trainer


def _fit(
    names: list[str], weights: Weights, options: Options, backend: Backend
) -> tuple[Recipe, dict[str, Tensor]]:
    """Return a recipe for the model that fits the weights, and these under its names.

    timm and torchvision have models of the same name whose parts differ: of `names`, the first that
    fits is it.
    """
    if options.data is None:
        raise DataError("polishing measures images; pass --data DIR")
    classes, train, val = _count(options.data, backend)
    problems = []
    for name in names:
        with torch.device("meta"):
            model = zoo.build(name, num_classes=classes, arguments={})
        if not any(isinstance(module, _BatchNorm) for module in model.modules()):
            raise CheckpointError(f"{name} has no BatchNorm statistics to polish")
        try:
            state = weights.state_for(model)
        except CheckpointError as error:
            problems.append(f"{name}, {classes} classes: {error}")
            continue
        numbers = {"classes": classes, "train_samples": train, "val_samples": val}
        return _recipe(name, numbers, options.overrides), state
    raise CheckpointError("\n".join(problems))


def _count(folder: Path, backend: Backend) -> tuple[int, int, int]:
    """Return how many classes, training and validation images a folder holds.

    Worker 0 looks for all: where there is no index yet, every image is opened.
    """
    numbers = None
    if backend.rank == 0:
        with backend.busy():
            train, val = (open_content(folder, split) for split in ("train", "val"))
        images = [len(content.arrays["labels"]) for content in (train, val)]
        numbers = json.dumps([len(train.header["classes"]), *images]).encode()
    classes, of_train, of_val = json.loads(broadcast_bytes(numbers, backend))
    return classes, of_train, of_val


def _recipe(name: str, numbers: dict[str, int], overrides: Sequence[str]) -> Recipe:
    """Return a recipe that shows images to a model as its library does in evaluation.

    Its schedule is never followed. Spans of 64 are what one device of those that train such models
    usually holds; statistics of smaller ones are another network's.
    """
    tree = {
        "name": name.replace("/", "-"),
        "seed": 0,
        "duration": {"steps": 1},
        "data": {
            "source": "folder",
            **numbers,
            **zoo.preparation(name),
            "crop_area": None,
            "flip": False,
        },
        "model": {"name": name},
        "batch": {"global_batch": 256, "bn_span": 64},
        "optimizer": {"kind": "sgd"},
        "schedule": {"peak_lr": 1.0, "warmup": None, "decay": {"kind": "constant"}},
    }
    return parse_recipe(json.dumps(tree), overrides, source=f"the recipe of {name}")


def _statistics(model: nn.Module) -> dict[str, Tensor]:
    """Return the running means and variances under the names they have in a state_dict."""
    layers = {
        name: layer
        for name, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, _BatchNorm)
    }
    return {
        f"{name}.{key}": getattr(layer, key)
        for name, layer in layers.items()
        for key in ("running_mean", "running_var")
    }
