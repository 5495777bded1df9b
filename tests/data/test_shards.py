import io
import os
import tarfile
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from class_folders import fields, images_of, imported, write_classes, write_folder, write_image
from PIL import Image

from largebatch.data.augment import clean_request
from largebatch.data.datasets import import_data
from largebatch.data.decoders import reader as reading
from largebatch.data.index.index import BadImagesError, load_or_read, make, read_folder
from largebatch.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "folder"
    for split in ("train", "val"):
        write_folder(root, split)
    return root


pack = partial(imported, name="webdataset")


def jpeg() -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (6, 4)).save(buffer, format="jpeg")
    return buffer.getvalue()


def write_tar(path: Path, members: dict[str, bytes], *, mode: str = "w") -> Path:
    """Write a shard like other programs, member by member."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def shards(root: Path, members: dict[str, bytes]) -> Path:
    write_tar(root / "train/a.tar", members)
    (root / "classes.txt").write_text("cat\ndog\n")
    return root


@pytest.mark.parametrize("shard_bytes", [1, 10_000, 10**6])
def test_packed_images_keep_bytes_order_and_labels(
    folder: Path, tmp_path: Path, shard_bytes: int
) -> None:
    packed = pack(folder, tmp_path / "packed", size=shard_bytes)
    for split in ("train", "val"):
        before, after = read_folder(folder, split), read_folder(packed, split)
        assert images_of(after) == [
            path.read_bytes() for path in map(folder.joinpath, before.paths)
        ]
        plain, shard = fields(before), fields(after)
        for key in ("classes", "labels", "heights", "widths", "num_bytes", "bad"):
            assert shard[key] == plain[key]


def test_pythons_tarfile_reads_packed_shards(folder: Path, tmp_path: Path) -> None:
    """A WebDataset sample is the members in a row that are equal up to the first dot."""
    packed = pack(folder, tmp_path / "packed")
    assert (packed / "classes.txt").read_text() == "Zebra\ncat\ndog\n"
    samples: dict[str, dict[str, bytes]] = {}
    with tarfile.open(packed / "train/000000.tar") as tar:
        for member in tar:
            file = tar.extractfile(member)
            assert file is not None
            key, extension = member.name.split(".", 1)
            samples.setdefault(key, {})[extension] = file.read()
            assert list(samples)[-1] == key
    assert [sorted(sample) for sample in samples.values()] == [
        *[["cls", "jpg"]] * 3,
        ["cls", "png"],
    ]
    assert [int(sample["cls"]) for sample in samples.values()] == [0, 1, 2, 2]
    image = Image.open(io.BytesIO(list(samples.values())[3]["png"]))
    assert image.size == (7, 5)


def test_training_images_are_shuffled_and_their_names_record_the_order(tmp_path: Path) -> None:
    """By the seed alone; validation images keep their order, and so does an import without it."""
    numbers = {"train/a": 40, "train/b": 40, "val/a": 3, "val/b": 3}
    source = write_classes(tmp_path / "in", **numbers)
    before = images_of(read_folder(source, "train"))
    orders = []
    for seed, out in ((0, "first"), (0, "again"), (1, "other")):
        packed = pack(source, tmp_path / out, size=20_000, shuffle=seed)
        rows: list[int] = []
        for path in sorted((packed / "train").iterdir()):
            with tarfile.open(path) as tar:
                rows += [int(name[:-4]) for name in tar.getnames() if name.endswith(".cls")]
        index = read_folder(packed, "train")
        assert images_of(index) == [before[row] for row in rows]
        assert index.labels.tolist() == [row // 40 for row in rows]
        assert sorted(rows) == list(range(80))
        assert images_of(read_folder(packed, "val")) == images_of(read_folder(source, "val"))
        orders.append(rows)
    assert orders[0] == orders[1] != orders[2]
    # The classes of neighbours are independent: 79 pairs, half of them equal, 4 deviations.
    labels = np.array(orders[0]) // 40
    assert abs(int((labels[1:] == labels[:-1]).sum()) - 39.5) < 18


def test_shards_of_other_programs_are_read(tmp_path: Path) -> None:
    """Keys with folders, other members, several formats of tar, long names."""
    long_key = "folder/" + "x" * 150
    root = shards(
        tmp_path,
        {
            "._a.jpg": b"left behind by a file manager",
            "a.json": b"{}",
            "a.JPG": jpeg(),
            "a.cls": b"1\n",
            f"{long_key}.cls": b"0",
            f"{long_key}.seg.png": b"a mask",
            f"{long_key}.jpg": jpeg(),
        },
    )
    index = read_folder(root, "train")
    assert index.labels.tolist() == [1, 0]
    assert images_of(index) == [jpeg(), jpeg()]
    assert list(index.paths) == ["train/a.tar", "train/a.tar"]


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"b.jpg": b""}, "train/a.tar/b.jpg: there is no b.cls with its label"),
        ({"b.jpg": jpeg(), "b.cls": b"2"}, "b.jpg: its label is '2', expected a number from 0 to"),
        ({"b.jpg": jpeg(), "b.cls": b"-1"}, "b.jpg: its label is '-1'"),
        ({"b.jpg": jpeg(), "b.png": b"", "b.cls": b"0"}, "b: it has 2 images, expected 1"),
        ({"b.jpg": jpeg()[:-2], "b.cls": b"0"}, "train/a.tar/b.jpg: it is truncated"),
    ],
)
def test_bad_samples_are_named_and_can_be_left_out(
    tmp_path: Path, members: dict[str, bytes], reason: str
) -> None:
    before, after = {"a.jpg": jpeg(), "a.cls": b"0"}, {"c.jpg": jpeg(), "c.cls": b"1"}
    root = shards(tmp_path, {**before, **members, **after})
    with pytest.raises(BadImagesError) as caught:
        read_folder(root, "train")
    assert reason in str(caught.value)
    make(root, "train", drop_bad=True)
    index = load_or_read(root, "train")
    assert index.labels.tolist() == [0, 1]
    assert len(index.bad) == 1


def cut(root: Path) -> None:
    path = root / "train/000000.tar"
    path.write_bytes(path.read_bytes()[:-1024])


def compress(root: Path) -> None:
    write_tar(root / "train/000000.tar", {"a.jpg": jpeg()}, mode="w:gz")


def mix(root: Path) -> None:
    write_image(root / "train/cat/x.jpg")


def lose_classes(root: Path) -> None:
    (root / "classes.txt").unlink()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (compress, "000000.tar: not a whole, uncompressed tar file"),
        (mix, "only one of them; found 000000.tar, cat"),
        (lose_classes, "classes.txt: No such file or directory; shards need it"),
    ],
)
def test_broken_shards_are_refused(
    folder: Path, tmp_path: Path, change: object, message: str
) -> None:
    packed = pack(folder, tmp_path / "packed")
    change(packed)  # type: ignore[operator]
    with pytest.raises(DataError) as caught:
        read_folder(packed, "train")
    assert message in str(caught.value)


def test_an_index_of_changed_shards_is_refused(folder: Path, tmp_path: Path) -> None:
    packed = pack(folder, tmp_path / "packed", size=1)
    load_or_read(packed, "train")
    assert fields(load_or_read(packed, "train")) == fields(read_folder(packed, "train"))
    (packed / "classes.txt").write_text("a\nb\nc\n")
    with pytest.raises(DataError, match="classes.txt"):
        load_or_read(packed, "train")
    make(packed, "train")
    cut(packed)
    with pytest.raises(DataError, match=r"train/000000.tar was changed"):
        load_or_read(packed, "train")
    (packed / "train/000000.tar").unlink()
    with pytest.raises(DataError, match=r"train/000000.tar is missing"):
        load_or_read(packed, "train")


def test_failed_packing_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    (folder / "val/dog/b.png").write_bytes(b"")
    with pytest.raises(BadImagesError):
        pack(folder, tmp_path / "packed")
    write_image(folder / "val/dog/b.png", height=5, width=7)
    load_or_read(folder, "val")
    (folder / "val/dog/b.png").write_bytes(b"changed after it was looked at")

    def spoil(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(DataError, match=r"val/dog/b\.png was changed"):
        pack(folder, tmp_path / "packed")
    write_image(folder / "val/dog/b.png", height=5, width=7)
    make(folder, "val")
    packed = tmp_path / "packed"
    with pytest.raises(KeyboardInterrupt):
        import_data("webdataset", folder, packed, shard_bytes=10**6, progress=spoil)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    pack(folder, tmp_path / "packed")
    with pytest.raises(DataError, match="already exists"):
        pack(folder, tmp_path / "packed")


def test_a_shard_stays_open_and_is_reopened_if_it_cannot_be_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file that was open when its server restarted stays stale."""
    index = load_or_read(pack(folder, tmp_path / "packed"), "train")
    opened: list[str] = []
    real_open, real_read = os.open, os.preadv
    failures = iter([OSError(116, "Stale file handle")])

    def note(path: str, *flags: int) -> int:
        opened.append(str(path))
        return real_open(path, *flags)

    def stale(file: int, buffers: list[memoryview], offset: int) -> int:
        for failure in failures:
            raise failure
        return real_read(file, buffers, offset)

    request = clean_request(index, np.arange(len(index)), image_size=1, resize=None)
    expected = images_of(index)
    monkeypatch.setattr(os, "open", note)
    monkeypatch.setattr(os, "preadv", stale)
    with reading.open_reader(index, 1) as reader:
        for given in reading.read_ahead([request] * 3, reader):
            assert [content.tobytes() for content in given.contents] == expected
    assert len(opened) == 2, "the first, and to read again"
