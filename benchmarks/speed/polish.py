"""Compare the time of the statistics pass of Final Polishing with that of its peers.

    [LARGEBATCH_DATA=DIR] python -m benchmarks.speed.polish [--rounds 15] [--images 144]

The peers are torch.optim.swa_utils.update_bn and fvcore's update_bn_stats (pip install fvcore);
the baseline is a plain forward pass in training mode, which every such pass contains. All read
the same batches on the device, on copies of a ResNet-18 at 96 pixels, in turns.
The peers know plain BatchNorm; a recipe's model has spans, and is measured too.

What each gets wrong: polish_error.py. Images are Imagenette's if LARGEBATCH_DATA names the folder
that holds imagenette224, else noise. Writes benchmarks/results/polish_<hardware>_<date>.json.
"""

import argparse
import copy
import importlib.util
import io
import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from benchmarks.speed.measuring import Step, add_seconds, paired_ratio, spread, take_turns, write
from largebatch.distributed.serial import Serial
from largebatch.models import build
from largebatch.models.batchnorm import with_span
from largebatch.polish.statistics import polish

CPU = Serial(torch.device("cpu"))
TARGET = 1.03
PIXELS = 96
SPAN = 32

Pairs = list[tuple[Tensor, Tensor]]
Pass = Callable[[nn.Module, Pairs], object]


def ours(model: nn.Module, batches: Pairs) -> object:
    return polish(model, batches, Serial())


def swa(model: nn.Module, batches: Pairs) -> None:
    update_bn(batches, model.train())


def fvcore(model: nn.Module, batches: Pairs) -> None:
    from fvcore.nn.precise_bn import update_bn_stats

    update_bn_stats(model.train(), [images for images, _ in batches], num_iters=len(batches))


@torch.no_grad()
def plain(model: nn.Module, batches: Pairs) -> None:
    model.train()
    for images, _ in batches:
        model(images)


PEERS: dict[str, Pass] = {"update_bn": swa}
if importlib.util.find_spec("fvcore"):
    PEERS["fvcore"] = fvcore


def network() -> nn.Module:
    torch.manual_seed(0)
    return build("resnet18", num_classes=10)


def images(number: int, batch: int) -> Pairs:
    """Return images of all of Imagenette's classes, or noise, in batches."""
    data = os.environ.get("LARGEBATCH_DATA")
    if data is None:
        images = torch.randn(number, 3, PIXELS, PIXELS, generator=torch.Generator().manual_seed(0))
    else:
        pixels = _imagenette(Path(data) / "imagenette224/val.zip", number)
        images = (torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255 - 0.45) / 0.22
    images = images.contiguous()
    labels = torch.zeros(number, dtype=torch.long)
    return list(zip(images.split(batch), labels.split(batch), strict=True))


def _imagenette(path: Path, number: int) -> npt.NDArray[np.uint8]:
    with zipfile.ZipFile(path) as archive:
        names = [name for name in sorted(archive.namelist()) if name.endswith(".JPEG")]
        found = []
        for name in names[:: len(names) // number][:number]:
            with Image.open(io.BytesIO(archive.read(name))) as image:
                found.append(np.asarray(image.convert("RGB").resize((PIXELS, PIXELS))))
    return np.stack(found)


def times(
    batches: Pairs, *, layout: torch.memory_format, rounds: int, seconds: float
) -> dict[str, Any]:
    """Time all rivals in turns; a step is a pass over all batches."""
    device = Serial().device
    model = network().to(device)
    model.to(memory_format=layout)  # type: ignore[call-overload]  # torch's stubs
    moved = [(x.to(device, memory_format=layout), y.to(device)) for x, y in batches]

    def step(rival: Pass, span: int | None = None) -> Step:
        own = copy.deepcopy(model)
        if span is not None:
            own = with_span(own, span)
        return lambda: rival(own, moved)

    rivals = {"ours": ours, "forward": plain, **PEERS}
    steps = {name: step(rival) for name, rival in rivals.items()}
    steps |= {f"{name}, span {SPAN}": step(rivals[name], SPAN) for name in ("ours", "forward")}
    found = take_turns(steps, rounds=rounds, steps=1, seconds=seconds)
    spans = found.pop(f"ours, span {SPAN}"), found.pop(f"forward, span {SPAN}")
    number = sum(len(images) for images, _ in batches)
    return {
        "milliseconds an image": {
            name: spread([1000 * seconds / number for seconds in values])
            for name, values in found.items()
        },
        "ratios": {
            f"ours / {name}": paired_ratio(found["ours"], found[name])
            for name in found
            if name != "ours"
        }
        | {
            f"ours, span {SPAN} / forward": paired_ratio(spans[0], found["forward"]),
            f"ours, span {SPAN} / forward, span {SPAN}": paired_ratio(*spans),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--images", type=int, default=144)
    parser.add_argument("--batch", type=int, default=64)
    add_seconds(parser)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    batches = images(args.images, args.batch)
    layouts = {"NCHW": torch.contiguous_format, "channels last": torch.channels_last}
    result: dict[str, Any] = {
        "settings": {**vars(args), "images are": source()},
        "target": f"ours at most {TARGET} of each",
    }
    if "fvcore" not in PEERS:
        result["not installed"] = ["fvcore"]
    for name, layout in layouts.items():
        result[name] = times(
            batches, layout=layout, rounds=args.rounds, seconds=args.seconds / len(layouts)
        )
    print(json.dumps(result, indent=1))
    print(write("polish", result))


def source() -> str:
    return "imagenette224" if "LARGEBATCH_DATA" in os.environ else "noise"


if __name__ == "__main__":
    main()
