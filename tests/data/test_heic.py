"""HEIC, the photographs of phones, through every path, where pillow-heif is installed."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from class_folders import imported
from decoding import Decode, both_decoders, photograph, run
from PIL import Image

from largebatch.data.index.headers import BadImageError, measure_bytes
from largebatch.data.index.index import read_folder
from largebatch.data.types import Request

needs_heif = pytest.mark.skipif(
    importlib.util.find_spec("pillow_heif") is None, reason="pillow-heif is not installed"
)


@needs_heif
@both_decoders
def test_photographs_of_a_phone_are_imported_measured_and_decoded(
    decode: Decode, tmp_path: Path
) -> None:
    """One is stored turned by a quarter, as its EXIF says; a WebP and a PNG are in one batch."""
    from pillow_heif import register_heif_opener

    register_heif_opener()
    image, exif = Image.fromarray(photograph(200, 170)), Image.Exif()
    exif[0x0112] = 6
    for split in ("train", "val"):
        for name in ("cat/a.HEIC", "cat/b.png", "dog/a.heif", "dog/b.webp"):
            path = tmp_path / "in" / split / name
            path.parent.mkdir(parents=True, exist_ok=True)
            options = {"exif": exif.tobytes()} if name == "dog/a.heif" else {}
            kind = "heif" if path.suffix.lower().startswith(".he") else path.suffix[1:]
            image.save(path, format=kind, **options)
    index = read_folder(imported(tmp_path / "in", tmp_path / "out"), "train")
    assert index.heights.tolist() == [200, 200, 170, 200]
    box = np.array([[11, 23, 128, 128]] * 4)
    (batch,) = run(decode, index, [Request(np.arange(4), box, np.zeros(4, dtype=np.bool_))])
    names = ("cat/a.HEIC", "cat/b.png", "dog/a.heif", "dog/b.webp")
    for name, found in zip(names, batch.images, strict=True):
        with Image.open(tmp_path / "in/train" / name) as expected:
            pixels = np.asarray(expected.convert("RGB"))[11:139, 23:151]
        np.testing.assert_array_equal(found.permute(1, 2, 0).round().numpy(), pixels)


@needs_heif
def test_a_heic_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    from pillow_heif import register_heif_opener

    register_heif_opener()
    Image.fromarray(photograph(64, 48)).save(tmp_path / "a.heic")
    content = (tmp_path / "a.heic").read_bytes()
    assert measure_bytes(content) == (64, 48, 1, True)  # left to Pillow
    for length in (20, len(content) // 2, len(content) - 1):
        with pytest.raises(BadImageError):
            measure_bytes(content[:length])
