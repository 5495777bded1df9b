"""Polish weights that were trained elsewhere: any model of timm or torchvision.

Their recipe follows from the folder of images and from how the model's library prepares images;
the rest is the polishing of our own runs. Only running means and variances differ in the file that
is written.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from largebatch.data.index.index import open_content
from largebatch.distributed.agreement import Facts, checksum
from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import broadcast_bytes
from largebatch.errors import CheckpointError, DataError
from largebatch.models import zoo
from largebatch.polish import Drift
from largebatch.recipe.loading import parse_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.runs.build import join, open_measuring, open_session
from largebatch.runs.checkpoints import Comparison, compare, with_statistics, with_updates
from largebatch.runs.options import Options
from largebatch.runs.weights import Weights, check_new, read_weights
from largebatch.training.evaluation import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """Weights to polish, and their model."""

    model: str
    """Name in timm or torchvision; the prefix `torchvision/` chooses torchvision."""

    weights: Path
    ema: bool = False
    """True to polish the EMA in the file in place of the weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Polished:
    """What was measured before and after, and how far the statistics were off."""

    before: Metrics
    after: Metrics
    drift: Drift


def polish_weights(what: Pretrained, options: Options, *, samples: int | None = None) -> Polished:
    """Write a polished file to `options.out`; return the metrics before and after.

    `samples` is the number of clean training images to measure; None: all of them.
    """
    names = zoo.same_name(what.model)
    check_new(options.out)
    weights = read_weights(what.weights, ema=what.ema)
    facts = {"command": "polish", "--samples": samples, **_facts(what, weights)}
    with join(options, facts) as backend:
        recipe, state = fit_model(names, weights, options, backend)
        recipe = with_statistics(recipe, samples)
        assert recipe.polish is not None
        section = recipe.polish.statistics
        assert section is not None
        nowhere = replace(options, out=Path())
        with open_measuring(recipe, nowhere, {}, joined=backend) as session:
            session.state.model.load_state_dict(state)
            before = session.evaluator.validation()
            drift = session.evaluator.statistics(section.samples)
            after = session.evaluator.validation()
            if backend.rank == 0:
                weights.replace(_statistics(session.state.model))
                weights.write(options.out)
    return Polished(before=before, after=after, drift=drift)


@contextmanager
def compare_weights(
    what: Pretrained, options: Options, *, samples: int | None, epochs: float, lr: float | None
) -> Iterator[Comparison]:
    """Measure what each way of polishing does to a copy of the weights."""
    names = zoo.same_name(what.model)
    weights = read_weights(what.weights, ema=what.ema)
    asked = {"--samples": samples, "--epochs": epochs, "--lr": lr}
    facts = {"command": "polish --compare", **asked, **_facts(what, weights)}
    with join(options, facts, starting=True) as backend:
        recipe, state = fit_model(names, weights, options, backend)
        recipe = with_updates(with_statistics(recipe, samples), epochs=epochs, lr=lr)
        nowhere = replace(options, out=Path())
        with open_session(recipe, nowhere, {}, joined=backend) as session:
            session.state.model.load_state_dict(state)
            yield compare(session)


def _facts(what: Pretrained, weights: Weights) -> Facts:
    return {"--model": what.model, "--weights": checksum(weights.tensors)}


def fit_model(
    names: list[str], weights: Weights, options: Options, backend: Backend
) -> tuple[Recipe, dict[str, Tensor]]:
    """Return a recipe for the first model of `names` that fits the weights, and the weights for it.

    timm and torchvision have models with the same name and different parts.
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
    """Return the numbers of classes, training images and validation images in a folder.

    Only worker 0 counts them: without an index, every image is opened.
    """
    numbers = None
    if backend.rank == 0:
        train, val = (open_content(folder, split) for split in ("train", "val"))
        images = [len(content.arrays["labels"]) for content in (train, val)]
        numbers = json.dumps([len(train.header["classes"]), *images]).encode()
    classes, of_train, of_val = json.loads(broadcast_bytes(numbers, backend))
    return classes, of_train, of_val


def _recipe(name: str, numbers: dict[str, int], overrides: Sequence[str]) -> Recipe:
    """Return a recipe that shows images to a model as its library does in evaluation.

    Its schedule is not used. Spans of 64 are a usual device batch when such models are trained;
    smaller spans would give the statistics of another network.
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
    """Return the running means and variances under the names they have in a state_dict.

    These are all that `polish()` measures.
    """
    layers = {
        name: layer
        for name, layer in model.named_modules(remove_duplicate=False)
        if isinstance(layer, _NormBase) and layer.running_mean is not None
    }
    return {
        f"{name}.{key}": getattr(layer, key)
        for name, layer in layers.items()
        for key in ("running_mean", "running_var")
    }
