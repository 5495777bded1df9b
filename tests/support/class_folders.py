"""A small folder of images for tests, and what an index says as plain values."""

from pathlib import Path

from PIL import Image

from largebatch.data.index.index import Index


def write_image(path: Path, *, height: int = 4, width: int = 6, mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, (width, height)).save(path)


def write_folder(root: Path, split: str = "train") -> Path:
    """Write four images of three classes."""
    write_image(root / split / "dog/b.png", height=5, width=7)
    write_image(root / split / "dog/a.JPEG", height=9, width=3)
    write_image(root / split / "cat/x.jpg")
    write_image(root / split / "Zebra/z.jpg")
    return root


def fields(index: Index) -> dict[str, object]:
    """Plain values, which compare with ==."""
    columns = ("labels", "heights", "widths", "num_bytes")
    plain = {name: getattr(index, name) for name in ("root", "classes", "bad", "digest")}
    return {
        **plain,
        "paths": list(index.paths),
        **{name: getattr(index, name).tolist() for name in columns},
    }
