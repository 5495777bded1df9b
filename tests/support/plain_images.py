"""Images read from a folder by Pillow and torchvision, in an order worked out by NumPy."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from largebatch.optional import require_torchvision

GREY = ([0.305] * 3, [0.376] * 3)
"""Mean and standard deviation of digits_96.yaml."""


def shuffled(num: int, *, seed: int, stream: int = 0) -> list[int]:
    """Return the numbers below `num` sorted by Philox words: what the seed makes of them."""
    generator = np.random.Philox(key=[seed, stream], counter=[0, 0, 0, 0])
    words = [int(generator.random_raw()) for _ in range(num)]
    return sorted(range(num), key=words.__getitem__)


def training_files(folder: Path) -> list[Path]:
    """Return the training images, sorted by class and name."""
    return sorted(folder.glob("train/*/*"), key=lambda path: (path.parent.name, path.name))


def load(
    paths: Sequence[Path], *, colours: tuple[list[float], list[float]], size: int = 32
) -> tuple[Tensor, Tensor]:
    """Return images as the network is shown them, and their labels."""
    require_torchvision()
    from torchvision.transforms import functional

    classes = sorted({path.name for path in paths[0].parent.parent.iterdir()})
    images = []
    for path in paths:
        with Image.open(path) as image:
            small = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
        images.append(functional.normalize(functional.to_tensor(small), *colours))
    labels = torch.tensor([classes.index(path.parent.name) for path in paths])
    return torch.stack(images), labels
