"""The decoders: common behaviour, and the allowed difference of DALI from Pillow.

Decoding agrees to the bit: JPEG with every chroma layout, grey, palette, CMYK, alpha. Resizing
nearly does. Pillow rounds to bytes between its two passes, DALI does not: one step of 255. And
where a shrinking filter hangs over the edge of the box, Pillow weighs the pixels that are there,
DALI repeats the outermost one. At most an eighth of a linear filter hangs over an edge: 32 steps
of 255 in the outermost rows and columns; in a corner 15 / 64, 60 steps. Photographs have up to 28
(benchmarks/results/decoder_pixels_*.json).
"""

import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from decoding import Decode, augmented, both_decoders, needs_dali, photograph, run, view
from PIL import Image, ImageOps
from torch import Tensor

from largebatch.data.augment import clean_request
from largebatch.data.decoders import dali, torchvision
from largebatch.data.index.index import Index, read_folder
from largebatch.data.types import Request
from largebatch.optional import require_dali

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Index:
    """One image of each format in image folders, larger than 128 x 128."""
    rgb, tall = (Image.fromarray(photograph(*size)) for size in ((375, 500), (431, 229)))
    grey, alpha, exif = rgb.convert("L"), rgb.copy(), Image.Exif()
    alpha.putalpha(grey)
    exif[0x0112] = 6  # orientation: turned by a quarter
    images: dict[str, tuple[Image.Image, dict[str, Any]]] = {
        "jpeg/4-4-4.jpg": (rgb, {"quality": 92, "subsampling": 0}),
        "jpeg/4-2-0.jpg": (rgb, {"quality": 92, "subsampling": 2}),
        "jpeg/4-2-2.JPEG": (tall, {"quality": 92, "subsampling": 1, "progressive": True}),
        "jpeg/grey.jpg": (grey, {}),
        "jpeg/cmyk.jpg": (rgb.convert("CMYK"), {}),
        "jpeg/turned.jpg": (rgb, {"exif": exif}),
        "other/rgb.png": (tall, {}),
        "other/grey.png": (grey, {}),
        "other/black and white.png": (grey.convert("1"), {}),
        "other/palette.png": (rgb.convert("P"), {}),
        "other/alpha.png": (alpha, {}),
        "other/grey with alpha.png": (alpha.convert("LA"), {}),
        "other/tall é ✓.png": (tall, {}),
        "web/lossy.webp": (rgb, {"quality": 70}),
        "web/lossless.WEBP": (tall, {"lossless": True, "format": "webp"}),
        "web/alpha.webp": (alpha, {"quality": 70}),
        "web/turned.webp": (rgb, {"exif": exif}),
    }
    root = tmp_path_factory.mktemp("images")
    for name, (image, options) in images.items():
        path = root / "train" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path, **options)
    # Adobe's segment, which marks inks as inverted: without it libjpeg and DALI do not invert them.
    path = root / "train/jpeg/cmyk without a mark.jpg"
    rgb.convert("CMYK").save(path, exif=exif)
    content = path.read_bytes()
    mark = content.index(b"\xff\xee\0\x0eAdobe")
    path.write_bytes(content[:mark] + content[mark + 16 :])
    return read_folder(root, "train")


def one_by_one(index: Index, box: tuple[int, int, int, int]) -> list[Request]:
    no_flip = np.zeros(1, dtype=np.bool_)
    return [Request(np.array([n]), np.array([box]), no_flip) for n in range(len(index))]


def by_hand(index: Index, request: Request, image_size: int) -> Tensor:
    images = []
    for sample, (top, left, height, width), flip in zip(
        request.samples, request.boxes.tolist(), request.flips, strict=True
    ):
        with Image.open(index.locate(int(sample)).path) as image:
            seen = ImageOps.exif_transpose(image).convert("RGB")
        part = seen.crop((left, top, left + width, top + height))
        pixels = np.asarray(part.resize((image_size, image_size), Image.Resampling.BILINEAR))
        images.append(pixels[:, ::-1] if flip else pixels)
    scaled = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).double() / 255
    mean, std = (torch.tensor(x, dtype=torch.float64).view(3, 1, 1) for x in (MEAN, STD))
    return (scaled - mean) / std


def test_torchvision_matches_pillow(folder: Index) -> None:
    requests = augmented(folder, 17, 3)
    batches = list(run(torchvision.open_decoder, folder, requests, mean=MEAN, std=STD))
    for batch, request in zip(batches, requests, strict=True):
        expected = by_hand(folder, request, 128).float()
        torch.testing.assert_close(batch.images, expected, rtol=0, atol=2e-6)


@both_decoders
def test_pixels_that_are_not_resized_are_exact_for_every_kind_of_image(
    decode: Decode, folder: Index
) -> None:
    """The box is away from the edges and of odd offset, so JPEG chroma is cut between samples."""
    requests = one_by_one(folder, (101, 53, 128, 128))
    for sample, batch in enumerate(run(decode, folder, requests)):
        with Image.open(folder.locate(sample).path) as image:
            seen = ImageOps.exif_transpose(image).convert("RGB")
        expected = np.asarray(seen)[101:229, 53:181]
        found = batch.images[0].permute(1, 2, 0).round().to(torch.uint8).numpy()
        assert (found == expected).all(), folder.paths[sample]


@both_decoders
def test_batches_follow_the_order_of_the_requests(decode: Decode, folder: Index) -> None:
    requests = augmented(folder, 5, 6)
    last = requests[-1]
    requests[-1] = Request(last.samples[:2], last.boxes[:2], last.flips[:2])
    batches = list(run(decode, folder, requests, mean=MEAN, std=STD))
    assert [len(batch.labels) for batch in batches] == [5, 5, 5, 5, 5, 2]
    for batch, request in zip(batches, requests, strict=True):
        assert batch.labels.tolist() == folder.labels[request.samples].tolist()
        assert (batch.images.dtype, batch.labels.dtype) == (torch.float32, torch.int64)
        assert batch.images.shape == (len(request.samples), 3, 128, 128)
        assert batch.images.is_contiguous()
        expected = by_hand(folder, request, 128).float()
        assert (batch.images - expected).abs().mean() < 0.01


@both_decoders
def test_a_batch_does_not_change_while_others_are_decoded(decode: Decode, folder: Index) -> None:
    requests = augmented(folder, 5, 6)
    copies = [batch.images.clone() for batch in run(decode, folder, requests)]
    kept = [batch.images for batch in run(decode, folder, requests)]
    for copy, images in zip(copies, kept, strict=True):
        assert torch.equal(copy, images)


@both_decoders
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_images_of_16_bits_are_those_of_32_rounded_once(
    decode: Decode, dtype: torch.dtype, folder: Index
) -> None:
    requests = augmented(folder, 5, 2)
    normalised: dict[str, Any] = {"mean": MEAN, "std": STD}
    whole = run(decode, folder, requests, **normalised)
    rounded = run(decode, folder, requests, **normalised, dtype=dtype)
    for a, b in zip(whole, rounded, strict=True):
        assert b.images.dtype == dtype
        assert torch.equal(b.images, a.images.to(dtype))


@needs_dali
def test_one_run_of_dali_decodes_several_batches_with_the_pixels_of_one_each(
    folder: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 batches of 7 and one of 3 fit into two runs; batches of 200 do not share one."""
    package = require_dali()
    real, runs = package.Pipeline.run, []

    def counted(*args: Any, **settings: Any) -> Any:  # noqa: ANN401 -- as DALI's
        outputs = real(*args, **settings)
        runs.append(len(outputs[0]))
        return outputs

    monkeypatch.setattr(package.Pipeline, "run", counted)
    small = [*augmented(folder, 7, 40), *augmented(folder, 3, 1)]
    found = list(run(dali.open_decoder, folder, small))
    assert runs == [36 * 7, 4 * 7 + 3]
    assert [len(batch.images) for batch in found] == [7] * 40 + [3]
    runs.clear()
    alone = [next(run(dali.open_decoder, folder, [request])) for request in small[::20]]
    for batch, expected in zip(found[::20], alone, strict=True):
        assert torch.equal(batch.images, expected.images)
        assert torch.equal(batch.labels, expected.labels)
    runs.clear()
    assert len(list(run(dali.open_decoder, folder, augmented(folder, 100, 3)))) == 3
    assert runs == [200, 100]


@needs_dali
def test_a_gpus_decoder_gets_hints_of_the_images_and_dali_knows_them(folder: Index) -> None:
    """DALI refuses an unknown option where an operator is made, which needs no GPU."""
    hints = dali._gpu_hints(folder)
    assert hints["preallocate_width_hint"] == hints["preallocate_height_hint"] == 500
    assert hints["device_memory_padding"] == 2 * hints["host_memory_padding"] == 2**24
    large = replace(folder, heights=folder.heights * 40, widths=folder.widths * 40)
    hints = dali._gpu_hints(large)
    assert (hints["preallocate_width_hint"], hints["device_memory_padding"]) == (1200, 2**26)
    package = require_dali()
    source = SimpleNamespace(inputs=iter(()))
    with package.Pipeline(batch_size=1, num_threads=1, device_id=0) as pipeline:
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            dali._graph(package, source, view(dtype=dtype), hints, on_gpu=True)
        assert pipeline is not None


@pytest.fixture(scope="module")
def photographs(real_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Index:
    """The 100 full-size ImageNet JPEGs."""
    root = tmp_path_factory.mktemp("photographs")
    (root / "train/any").mkdir(parents=True)
    with zipfile.ZipFile(real_data / "imagenet_samples/samples.zip") as samples:
        for name in samples.namelist():
            (root / "train/any" / Path(name).name).write_bytes(samples.read(name))
    index = read_folder(root, "train")
    assert len(index) == 100
    return index


@needs_dali
def test_the_decoders_agree_on_real_photographs(photographs: Index) -> None:
    clean = clean_request(photographs, np.arange(100), image_size=224, resize=256)
    assert_alike(photographs, [*augmented(photographs, 100, 1), clean], image_size=224)


@needs_dali
@pytest.mark.parametrize("size", [64, 32])
def test_black_edges_differ_by_an_eighth_of_the_filter_and_photographs_by_less(
    size: int, photographs: Index, tmp_path: Path
) -> None:
    some = np.arange(0, 100, 4)
    clean = clean_request(photographs, some, image_size=size, resize=round(size * 8 / 7))
    assert_alike(photographs, [clean], image_size=size)
    pixels = np.full((512, 512, 3), 255, dtype=np.uint8)
    pixels[0] = pixels[:, 0] = 0
    (tmp_path / "train/any").mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "train/any/edges.png")
    edges = read_folder(tmp_path, "train")
    whole = Request(np.zeros(1, np.int64), np.array([[0, 0, 512, 512]]), np.zeros(1, np.bool_))
    assert_alike(edges, [whole], image_size=size, mean=2.0)
    ours, theirs = (
        next(run(decode, edges, [whole], image_size=size)).images[0, 0]
        for decode in (torchvision.open_decoder, dali.open_decoder)
    )
    assert (ours - theirs).abs()[0, 1:].max() > 25  # the bound is near


@pytest.mark.long
@needs_dali
def test_the_decoders_nearly_agree_on_bicubic_photographs(photographs: Index) -> None:
    """Pillow clips the cubic's overshoot over 0 or 255 between its two passes."""
    clean = clean_request(photographs, np.arange(100), image_size=224, resize=256)
    requests = [*augmented(photographs, 100, 1), clean]
    both = [
        run(decode, photographs, requests, image_size=224, interpolation="bicubic")
        for decode in (dali.open_decoder, torchvision.open_decoder)
    ]
    bilinear = run(torchvision.open_decoder, photographs, requests, image_size=224)
    for a, b, other in zip(*both, bilinear, strict=True):
        difference = (a.images - b.images).abs()
        assert difference.max() <= 32
        assert (difference > 1.01).float().mean() <= 0.002
        assert difference.mean() <= 0.25
        assert (b.images - other.images).abs().mean() > 0.5


def assert_alike(
    index: Index, requests: list[Request], *, image_size: int = 128, mean: float = 0.25
) -> None:
    """Compare in steps of 255."""
    theirs = run(dali.open_decoder, index, requests, image_size=image_size)
    ours = run(torchvision.open_decoder, index, requests, image_size=image_size)
    for a, b in zip(theirs, ours, strict=True):
        difference = (a.images - b.images).abs()
        assert difference[:, :, 1:-1, 1:-1].max() <= 1.01
        assert difference[:, :, 1:-1].max() <= 32
        assert difference[:, :, :, 1:-1].max() <= 32
        assert difference.max() <= 60
        assert difference.mean() <= mean
