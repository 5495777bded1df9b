from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from decoding import decode_all
from torch import Tensor

from largebatch.data.augment import clean_request
from largebatch.data.decoders import synthetic
from largebatch.data.index.index import Index
from largebatch.data.types import Batch, Request, Resources, View


def decode(index: Index, requests: list[Request], **changes: object) -> Iterator[Batch]:
    """Values are 0 .. 255 unless `mean` and `std` are changed."""
    arguments: dict[str, Any] = {
        "image_size": int(index.heights[0]),
        "mean": (0.0, 0.0, 0.0),
        "std": (1 / 255, 1 / 255, 1 / 255),
        "interpolation": "bilinear",
    }
    view, cpu = View(**(arguments | changes)), torch.device("cpu")
    resources = Resources(cpu, threads=1, batch_size=512)
    return decode_all(synthetic.open_decoder(index, view, resources), requests)


def whole(index: Index, samples: np.ndarray) -> Request:
    return clean_request(index, samples, image_size=1, resize=None)


def decoded(index: Index, request: Request, **changes: object) -> Tensor:
    return next(decode(index, [request], **changes)).images


def test_an_image_depends_only_on_its_number() -> None:
    index = synthetic.synthetic_index(1000, 10, 64)
    images = decoded(index, whole(index, np.array([7, 900, 7, 17])))
    assert torch.equal(images[1:2], decoded(index, whole(index, np.array([900]))))
    assert torch.equal(images[0], images[2])
    assert (images[0] - images[3]).abs().mean() > 10
    assert images.shape == (4, 3, 64, 64)
    assert 0 <= images.min() < 60
    assert 195 < images.max() <= 255


def test_the_classes_alternate_and_are_visible_in_the_images() -> None:
    """The nearest mean of the first 200 images tells the class of the next 100."""
    index = synthetic.synthetic_index(300, 5, 16)
    assert index.labels[:7].tolist() == [0, 1, 2, 3, 4, 0, 1]
    images, labels = next(decode(index, [whole(index, np.arange(300))]))
    flat = images.flatten(1)
    means = torch.stack([flat[:200][labels[:200] == label].mean(0) for label in range(5)])
    assert torch.cdist(flat[200:], means).argmin(1).tolist() == labels[200:].tolist()
