"""Polish the averaged weights in a checkpoint of timm's training script (--model-ema).

python docs/examples/averaged_timm.py resnet18 output/train/.../last.pth.tar DIR

DIR has train/<class>/* and val/<class>/*.
"""

import sys

import torch

from largebatch.optional import require_timm
from largebatch.polish import polish
from largebatch.training import evaluate

timm = require_timm()  # as `import timm`, also where torchvision was built for another torch

from timm.data import create_dataset, create_loader, resolve_data_config  # noqa: E402
from timm.models import load_checkpoint  # noqa: E402


def main(name: str, checkpoint: str, folder: str) -> None:
    """Print top-1 of the average in a checkpoint as left and polished, and save it."""
    train_set = create_dataset("", folder, split="train")
    val_set = create_dataset("", folder, split="val")
    model = timm.create_model(name, num_classes=len(train_set.reader.class_to_idx))
    load_checkpoint(model, checkpoint, use_ema=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    prepared = resolve_data_config({}, model=model)
    keys = ("input_size", "interpolation", "mean", "std", "crop_pct")
    words = {key: prepared[key] for key in keys}
    clean_loader, val_loader = (
        create_loader(images, batch_size=64, use_prefetcher=False, num_workers=0, **words)
        for images in (train_set, val_set)
    )

    left = evaluate(model, val_loader)
    polish(model, clean_loader)
    polished = evaluate(model, val_loader)
    print(f"top-1 of the average {left.top1:.2%}, polished {polished.top1:.2%}")
    torch.save(model.state_dict(), "polished.pth")


if __name__ == "__main__":
    main(*sys.argv[1:])
