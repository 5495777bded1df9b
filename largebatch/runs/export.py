"""A saved run -> the files of a model: weights, timm's configuration, a card, the recipe, ONNX."""

import json
import warnings
from collections.abc import Sequence
from pathlib import Path

import safetensors.torch
import torch
from torch import nn

from largebatch.data.datasets.own import import_own
from largebatch.errors import CheckpointError, clip, reason_of
from largebatch.formatting import TOP5, four_decimals
from largebatch.models import build, is_timms
from largebatch.optional import require_onnx, require_torchvision
from largebatch.recipe.data import Data
from largebatch.recipe.model import Model
from largebatch.recipe.writing import dump_yaml
from largebatch.runs.checkpoints import find_checkpoint, find_export
from largebatch.runs.folder import require_named
from largebatch.runs.weights import WEIGHTS, metadata_of
from largebatch.storage import write_whole, writing
from largebatch.tracking.events import RECIPE
from largebatch.training.checkpoint import Checkpoint, load_weights

CONFIG, CARD, ONNX = "config.json", "README.md", "model.onnx"

_TIMM = """import timm

model = timm.create_model("local-dir:.", pretrained=True).eval()"""

_OURS = """import largebatch.models
import safetensors.torch

arguments = {section.arguments}
model = largebatch.models.build("{section.name}", num_classes={data.classes}, arguments=arguments)
model.eval()
model.load_state_dict(safetensors.torch.load_file("model.safetensors"))"""

_CROP = """side = max(1, round(min(photo.size) * {data.image_size} / {data.eval_resize}))
left, top = ((length - side) // 2 for length in photo.size)
photo = photo.crop((left, top, left + side, top + side))
"""

_PREDICT = """
import torch
from PIL import Image, ImageOps
from torchvision import transforms

names = {names}
photo = ImageOps.exif_transpose(Image.open("photo.jpg")).convert("RGB")
{crop}photo = photo.resize(({data.image_size},) * 2, Image.Resampling.{interpolation})
pixels = transforms.Normalize({data.mean}, {data.std})(transforms.ToTensor()(photo))
with torch.inference_mode():
    probabilities = model(pixels[None]).softmax(1)[0]
for probability, label in zip(*probabilities.topk({shown})):
    print(f"{{names[label]}}: {{probability:.2%}}")"""


def export(path: Path, out: Path, *, onnx: bool = False, imports: Sequence[str] = ()) -> list[Path]:
    """Write the model of a checkpoint, or of the newest one of a run folder; return the files.

    `timm.create_model("local-dir:OUT", pretrained=True)` loads a model of timm from there; another
    one is built by `largebatch.models.build`, and its weights are loaded by safetensors. With
    `onnx` there is model.onnx too: from N x 3 x H x W images, normalised as the card says, to N x
    classes logits. `imports` are those of Options.

    Raises CheckpointError if `path` is an export already, if `out` holds files or cannot be
    written, or if PyTorch cannot export the model to ONNX.
    """
    if onnx:
        require_onnx()
    if find_export(path) is not None:
        raise CheckpointError(
            f"{path}: an export already; give the run or the checkpoint that it was made of"
        )
    path, checkpoint = find_checkpoint(path)
    require_named(path.parent.parent, imports=imports, images=True)  # it needs none
    for module in imports:
        import_own(module)
    section = checkpoint.recipe.model
    data = checkpoint.recipe.data
    weights = checkpoint.model(source=path)
    model = build(section.name, num_classes=data.classes, arguments=section.arguments)
    # Into a new model, so that weights that fit none are found here, not by who gets the export.
    load_weights(model, weights, source=str(path))
    files = {
        WEIGHTS: safetensors.torch.save(weights, metadata_of(checkpoint.origin.classes)),
        CARD: _card(checkpoint).encode(),
        RECIPE: dump_yaml(checkpoint.recipe).encode(),
    }
    if is_timms(section.name):
        config = timm_config(section, data, checkpoint.origin.classes)
        files[CONFIG] = json.dumps(config, indent=2).encode()
    if onnx:
        files[ONNX] = _to_onnx(model, data.image_size, name=section.name)
    # All files are made before the folder: an export that fails leaves nothing behind.
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise CheckpointError(f"{out}: already holds files; choose another --out")
        for name, content in files.items():
            write_whole(out / name, content)
    return sorted(out.iterdir())


def _to_onnx(model: nn.Module, side: int, *, name: str) -> bytes:
    """Return the model in ONNX, for any number of images of one size."""
    require_torchvision()  # the exporter looks for its operators
    images = torch.zeros(2, 3, side, side)
    batch = torch.export.Dim.DYNAMIC
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's exporter uses what PyTorch deprecates
            program = torch.onnx.export(
                model.eval(),
                (images,),
                input_names=["images"],
                output_names=["logits"],
                dynamic_shapes=({0: batch},),
                dynamo=True,
                verbose=False,
            )
        assert program is not None  # as always with dynamo
        content: bytes = program.model_proto.SerializeToString()
    except Exception as error:  # a model of the user's own raises all kinds
        raise CheckpointError(
            f"PyTorch cannot export {name} to ONNX: {clip(reason_of(error), 300)}; leave --onnx out"
        ) from None
    return content


def _card(checkpoint: Checkpoint) -> str:
    recipe = checkpoint.recipe
    section = checkpoint.recipe.model
    data = checkpoint.recipe.data
    library = "timm" if is_timms(section.name) else "largebatch"
    code = (_TIMM if library == "timm" else _OURS) + _PREDICT
    code = code.format(
        section=section,
        data=data,
        crop=_CROP.format(data=data) if data.eval_resize else "",
        interpolation=data.interpolation.upper(),
        names=checkpoint.origin.classes or range(data.classes),
        shown=min(5, data.classes),
    )
    shows_top5 = data.classes > TOP5
    head = ["stage", "top-1", *(["top-5"] if shows_top5 else []), "loss"]
    rows = [head, ["---"] * len(head)] if checkpoint.stages else []
    for stage in checkpoint.stages:
        name = stage.name if stage.kept else f"{stage.name} (rolled back)"
        top5 = [f"{stage.top5:.2%}"] if shows_top5 else []
        rows.append([name, f"{stage.top1:.2%}", *top5, four_decimals(stage.loss)])
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"""---
library_name: {library}
pipeline_tag: image-classification
---
# {recipe.name}: {section.name}, {data.classes} classes

Trained with largebatch for {checkpoint.progress.updates:,} updates; `{RECIPE}` is all of it.

The classes of an image, in this folder (in the evaluation's form: `largebatch predict . IMAGES`):

```python
{code}
```

Measured on {data.val_split:,} validation images{":" if rows else " after a stage; none has ended."}

{table}
"""


def timm_config(section: Model, data: Data, classes: Sequence[str]) -> dict[str, object]:
    """Return timm's configuration of a model, with the names of its classes."""
    return {
        "architecture": section.name.partition(".")[0],
        "num_classes": data.classes,
        **({"label_names": list(classes)} if classes else {}),
        "model_args": section.arguments,
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
