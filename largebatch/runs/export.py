"""A saved run -> files for other programs: weights, timm's configuration, a model card, ONNX."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from largebatch.data.datasets.own import import_own
from largebatch.errors import CheckpointError
from largebatch.models import build, is_timms
from largebatch.optional import require_onnx
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.writing import dump_recipe
from largebatch.runs.checkpoints import find_checkpoint
from largebatch.storage import write_whole
from largebatch.tracking.environment import versions
from largebatch.tracking.events import RECIPE
from largebatch.training.checkpoint import Checkpoint
from largebatch.training.saving import require_fit

WEIGHTS, CONFIG, CARD, ONNX = "model.safetensors", "config.json", "README.md", "model.onnx"


def export(path: Path, out: Path, *, onnx: bool = False, imports: Sequence[str] = ()) -> list[Path]:
    """Write the model of a checkpoint, or of the newest one of a run folder; return the files.

    `timm.create_model("local-dir:OUT", pretrained=True)` loads a model of timm from there. ONNX
    takes N x 3 x H x W images, normalised by the recipe's mean and std, and returns N x classes.
    `imports` are those of Options.

    Raises CheckpointError if `out` holds files or cannot be written, RecipeError for a language
    model.
    """
    for module in imports:
        import_own(module)
    path, checkpoint = find_checkpoint(path)
    recipe = checkpoint.recipe
    model = build(
        recipe.model.name, num_classes=recipe.data.classes, arguments=recipe.model.arguments
    )
    weights = checkpoint.model(source=path)
    with require_fit(str(path)):
        model.load_state_dict(weights)
    model.eval()
    if onnx:
        require_onnx()
    files = {
        WEIGHTS: safetensors.torch.save(weights, metadata={"format": "pt"}),
        CARD: _card(checkpoint, source=path).encode(),
        RECIPE: dump_recipe(recipe).encode(),
    }
    if is_timms(recipe.model.name):
        config = timm_config(recipe, checkpoint.origin.classes)
        files[CONFIG] = json.dumps(config, indent=2).encode()
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise CheckpointError(f"{out}: already holds files; choose another --out")
        for name, content in files.items():
            write_whole(out / name, content)
        if onnx:
            _write_onnx(model, recipe, out / ONNX)
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written: {error.strerror}") from None
    return sorted(out.iterdir())


def timm_config(recipe: Recipe, classes: Sequence[str]) -> dict[str, object]:
    """Return timm's configuration of a model."""
    data = recipe.data
    return {
        "architecture": recipe.model.name.partition(".")[0],
        "num_classes": data.classes,
        **({"label_names": list(classes)} if classes else {}),
        "model_args": recipe.model.arguments,
        "pretrained_cfg": {
            "input_size": [3, data.image_size, data.image_size],
            "interpolation": data.interpolation,
            # timm rounds image_size / crop_pct down; 0.01 makes up for the rounding of floats.
            "crop_pct": data.image_size / (data.eval_resize + 0.01) if data.eval_resize else 1.0,
            "crop_mode": "center" if data.eval_resize else "squash",
            "mean": list(data.mean),
            "std": list(data.std),
            "num_classes": data.classes,
        },
    }


def loading_code(recipe: Recipe) -> tuple[str, str]:
    """Return the library that loads the model, and Python code that loads it."""
    name, arguments = recipe.model.name, recipe.model.arguments
    if is_timms(name):
        code = (
            'import timm\n\nmodel = timm.create_model("local-dir:<this folder>", pretrained=True)'
        )
        return "timm", code
    given = f", arguments={arguments}" if arguments else ""
    return "largebatch", (
        "import largebatch.models\nimport safetensors.torch\n\n"
        f'model = largebatch.models.build("{name}", num_classes={recipe.data.classes}{given})\n'
        f'model.load_state_dict(safetensors.torch.load_file("{WEIGHTS}"))'
    )


def _card(checkpoint: Checkpoint, *, source: Path) -> str:
    recipe, name = checkpoint.recipe, checkpoint.recipe.model.name
    library, load = loading_code(recipe)
    rows = [
        f"| {stage.name} | {stage.top1:.2%} | {stage.top5:.2%} | {stage.loss:.4f} | "
        f"{'yes' if stage.kept else 'rolled back'} |"
        for stage in checkpoint.stages
    ]
    rounding = " (the weights are fp32, with which it differs slightly)"
    rounding = "" if recipe.precision == "fp32" else rounding
    evaluated = ["No stage had ended, so that it was not evaluated."]
    if rows:
        images = f"{recipe.data.val_split:,} validation images"
        evaluated = [
            f"On {images}, computed in {recipe.precision}{rounding}, after each stage that ended:",
            "",
            "| stage | top-1 | top-5 | loss | kept |",
            "|---|---|---|---|---|",
            *rows,
        ]
    batches = ", then ".join(f"{size:,}" for size in recipe.batch.by_key.values())
    return f"""---
library_name: {library}
pipeline_tag: image-classification
---
# {recipe.name}: {name}, {recipe.data.classes} classes

Trained with largebatch {versions()["largebatch"]} in batches of {batches} for
{checkpoint.progress.updates:,} updates; `{RECIPE}` is all of it. From `{source.name}`.

```python
{load}
```

{_describe_input(recipe, checkpoint.origin.classes)}

{chr(10).join(evaluated)}
"""


def _describe_input(recipe: Recipe, classes: Sequence[str]) -> str:
    data = recipe.data
    side, how = data.image_size, data.interpolation
    cut = f"the whole image, resized ({how})"
    if data.eval_resize:
        cut = f"the centre after the short side is resized to {data.eval_resize} ({how})"
    rows = [
        "| input | RGB, channels first, values from 0 to 1, then (value - mean) / std |",
        "|---|---|",
        f"| size | {side} x {side} pixels, {cut} |",
        f"| mean | {', '.join(map(str, data.mean))} |",
        f"| std | {', '.join(map(str, data.std))} |",
    ]
    if classes:
        names = ", ".join(f"{label} `{name}`" for label, name in enumerate(classes))
        rows += ["", f"Classes by label: {names}"]
    return "\n".join(rows)


def _write_onnx(model: nn.Module, recipe: Recipe, path: Path) -> None:
    """Write the model for batches of any size."""
    side = recipe.data.image_size
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's exporter uses what PyTorch deprecates
        torch.onnx.export(
            model,
            (torch.zeros(2, 3, side, side),),
            path,
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim.DYNAMIC},),
            external_data=False,
            dynamo=True,
            verbose=False,
        )
