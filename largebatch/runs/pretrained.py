"""Polish weights that were trained elsewhere: a model of timm or torchvision.

Their recipe follows from the folder of images and from how the model's library prepares images;
the rest is the polishing of our own runs. Only running means and variances change.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import safetensors.torch

from largebatch.data.index.index import Index, check_same_classes, load_or_read
from largebatch.distributed.agreement import checksum
from largebatch.errors import CheckpointError, DataError
from largebatch.models import zoo
from largebatch.polish import Drift
from largebatch.recipe.loading import Overrides, parse_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.runs.build import open_measuring
from largebatch.runs.checkpoints import with_statistics
from largebatch.runs.options import Options
from largebatch.runs.weights import read_weights, state_for
from largebatch.storage import write_whole
from largebatch.training.evaluation import Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Polished:
    """What was measured before and after, and how far the statistics were off."""

    before: Metrics
    after: Metrics
    drift: Drift


def polish_weights(
    name: str, path: Path, options: Options, *, ema: bool = False, samples: int | None = None
) -> Polished:
    """Write polished weights to `options.out` as .safetensors, under the model's own names.

    `name` is a model of timm, or of torchvision with `torchvision/` before it; `ema` takes the
    moving average in the file, and `samples` is the number of clean training images to measure
    (None: all of them). Raises CheckpointError for weights that cannot be read or do not fit the
    model, or if the output exists, RecipeError for an unknown model, DataError for images that
    cannot be used.
    """
    if options.data is None:
        raise DataError("polishing measures images; pass --data DIR")
    out = options.out
    if out.suffix != ".safetensors":
        raise CheckpointError(f"{out}: expected the name of a file that ends in .safetensors")
    if out.exists():
        raise CheckpointError(f"{out}: exists already; choose another --out")
    zoo.require_known(name)
    weights = read_weights(path, ema=ema)
    train, val = (load_or_read(options.data, split) for split in ("train", "val"))
    check_same_classes(options.data, train.classes, val.classes)
    recipe = with_statistics(recipe_for(name, train, val, options.overrides), samples)
    facts = {"command": "polish", "--weights": checksum(weights)}
    with open_measuring(recipe, replace(options, out=Path()), facts) as session:
        model, evaluator = session.state.model, session.evaluator
        try:
            model.load_state_dict({**model.state_dict(), **state_for(model, weights)})
        except CheckpointError as error:
            raise CheckpointError(f"{path}: {error}") from None
        before = evaluator.validation()
        drift = evaluator.statistics(samples or len(train))
        after = evaluator.validation()
        if session.training.backend.rank == 0:
            tensors = model.state_dict().items()
            state = {key: value.cpu().clone().contiguous() for key, value in tensors}  # untied
            write_whole(out, safetensors.torch.save(state, metadata={"format": "pt"}))
    return Polished(before=before, after=after, drift=drift)


def recipe_for(name: str, train: Index, val: Index, overrides: Overrides) -> Recipe:
    """Return a recipe that shows images to a model as its library does in evaluation.

    Its schedule is not used. Spans of 64 are a usual device batch when such models are trained;
    smaller spans would give the statistics of another network.
    """
    numbers = {
        "classes": len(train.classes),
        "train_samples": len(train),
        "val_samples": len(val),
    }
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
