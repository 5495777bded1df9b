"""Write images of two classes, and a checkpoint with an average as timm's training script does.

Both go into the current folder: images/train, images/val and checkpoint-0.pth.tar.
"""

from pathlib import Path

import numpy as np
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.utils import CheckpointSaver, ModelEmaV3

IMAGES = 48
TRAINED = 32
"""The rest is validated."""


def main() -> None:
    """Draw the images, train on them for a few updates, and save."""
    torch.manual_seed(0)
    pixels = np.random.default_rng(0).integers(0, 100, (IMAGES, 64, 64, 3), dtype=np.uint8)
    pixels[1::2, :, :, 0] += 100  # images of the second class are red
    labels = torch.arange(IMAGES) % 2
    for number, image in enumerate(pixels):
        split = "train" if number < TRAINED else "val"
        folder = Path("images", split, "ab"[number % 2])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{number}.png")
    mean = torch.tensor(IMAGENET_DEFAULT_MEAN)
    std = torch.tensor(IMAGENET_DEFAULT_STD)
    images = ((torch.from_numpy(pixels) / 255 - mean) / std).permute(0, 3, 1, 2)
    model = timm.create_model("resnet10t", num_classes=2)
    average = ModelEmaV3(model, decay=0.8, exclude_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(15):
        optimizer.zero_grad()
        F.cross_entropy(model(images[:TRAINED]), labels[:TRAINED]).backward()
        optimizer.step()
        average.update(model)
    saver = CheckpointSaver(model, optimizer, model_ema=average, checkpoint_dir=".")
    saver.save_checkpoint(0)


if __name__ == "__main__":
    main()
