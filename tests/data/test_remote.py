"""Data sets in a bucket and on a web server, beside the same one on disk."""

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
from class_folders import fields, imported, png, write_classes
from s3_server import Storage, connected, upload
from slow_proxy import Fault, Proxy, Seen

from largebatch import bucket as buckets
from largebatch.address import Address, place_of
from largebatch.cli.main import main
from largebatch.data.datasets import import_data
from largebatch.data.decoders.reader import read
from largebatch.data.decoders.sources import open_source
from largebatch.data.index.index import Index, load_or_read, make
from largebatch.errors import DataError
from largebatch.recipe.loading import load_recipe
from largebatch.storage import silent

PLACE = place_of("s3://photos/small")
SHARDS = [f"train/{number:06d}.tar" for number in range(3)] + ["val/000000.tar"]
NAMES = ["classes.txt", *SHARDS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards on disk, three of them for training; images of 20 kB are longer than a read."""
    root = tmp_path_factory.mktemp("folders")
    write_classes(root / "classes/train", cat=9, dog=7)
    write_classes(root / "classes/val", cat=2, dog=3)
    (root / "classes/train/dog/large.png").write_bytes(png(99, side=80))
    (root / "classes/train/cat/large.png").write_bytes(png(98, side=80))
    return imported(root / "classes", root / "shards", name="webdataset", size=40_000)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, own_cache: None) -> Iterator[tuple[Storage, Proxy]]:
    with connected(monkeypatch) as both:
        yield both


def length_of(range_: str) -> int:
    """Return the number of bytes that a header Range asks for."""
    first, last = range_.removeprefix("bytes=").split("-")
    return int(last) - int(first) + 1


@contextmanager
def web_server(folder: Path, place: Path) -> Iterator[int]:
    """Serve a folder with nginx; yield its port."""
    nginx = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    if nginx is None:
        pytest.skip("nginx is not installed")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    temporary = "".join(
        f"{kind}_temp_path {place}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = place / "nginx.conf"
    config.write_text(
        f"user {getpass.getuser()}; daemon off; pid {place}/pid; events {{}}\n"
        f"error_log {place}/error.log;\n"
        f"http {{ access_log off; {temporary} "
        f"server {{ listen 127.0.0.1:{port}; root {folder}; }} }}\n"
    )
    command = [nginx, "-e", f"{place}/error.log", "-c", str(config)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            for _ in range(200):
                with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(0.02)
            yield port
        finally:
            process.terminate()


def images(index: Index) -> list[bytes]:
    source = open_source(index)
    return [read(index.locate(row), source) for row in range(len(index))]


def plain(index: Index) -> dict[str, object]:
    """What must be equal on disk and in a bucket."""
    return {key: value for key, value in fields(index).items() if key not in {"root", "digest"}}


def test_the_index_of_a_bucket_is_that_of_the_folder(
    folder: Path, server: tuple[Storage, Proxy]
) -> None:
    objects, proxy = server
    upload(folder, objects, to="small")
    for split in ("train", "val"):
        here, there = load_or_read(folder, split), load_or_read(PLACE, split)
        assert plain(there) == plain(here)
        assert images(there) == images(here)
    assert len(load_or_read(PLACE, "train")) == 18
    # It is stored beside the shards, so that nothing is indexed again.
    proxy.seen.clear()
    load_or_read(PLACE, "train")
    assert not proxy.ranges
    assert "small/.largebatch-train.index" in objects.objects


def test_an_index_reads_a_part_of_large_images(
    tmp_path: Path, server: tuple[Storage, Proxy]
) -> None:
    objects, proxy = server
    for split in ("train", "val"):
        write_classes(tmp_path / split, cat=6, dog=6, side=160)
    shards = imported(tmp_path, tmp_path / "shards", name="webdataset", size=10**7)
    upload(shards, objects, to="small")
    load_or_read(PLACE, "train")
    length = len(objects.objects["small/train/000000.tar"])
    parts = [range_ for path, range_ in proxy.ranges if path.endswith("train/000000.tar")]
    assert len(parts) <= 12 + 3, "a read for each image, and for the ends of the tar"
    assert sum(map(length_of, parts)) < length / 4


def test_a_run_of_small_images_is_read_in_long_ranges(
    tmp_path: Path, server: tuple[Storage, Proxy]
) -> None:
    objects, proxy = server
    for split in ("train", "val"):
        write_classes(tmp_path / split, cat=99, dog=99)
    upload(
        imported(tmp_path, tmp_path / "shards", name="webdataset", size=10**7), objects, to="small"
    )
    load_or_read(PLACE, "train")
    length = len(objects.objects["small/train/000000.tar"])
    parts = [range_ for path, range_ in proxy.ranges if path.endswith("train/000000.tar")]
    assert length > 400_000
    assert len(parts) < 12


def test_an_import_writes_the_same_shards_into_a_bucket(
    folder: Path, server: tuple[Storage, Proxy]
) -> None:
    objects, _ = server
    import_data("webdataset", folder, PLACE, shard_bytes=40_000, progress=silent, seed=None)
    for name in NAMES:
        assert objects.objects[f"small/{name}"] == (folder / name).read_bytes(), name
    assert sorted(objects.objects) == [f"small/{name}" for name in NAMES]
    with pytest.raises(DataError, match="s3://photos/small: has objects already"):
        import_data("webdataset", folder, PLACE, shard_bytes=40_000, progress=silent)
    # And from one bucket into another place of it.
    import_data("webdataset", PLACE, Address(f"{PLACE}-2"), shard_bytes=40_000, progress=silent)
    assert objects.objects["small-2/val/000000.tar"] == (folder / NAMES[-1]).read_bytes()


def test_the_commands_take_an_address(
    folder: Path,
    server: tuple[Storage, Proxy],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["data", "import", "webdataset", str(folder), "--out", str(PLACE)]) == 0
    assert main(["data", "index", str(PLACE)]) == 0
    assert main(["init", str(PLACE), "--weights", "none", "--image-size", "16"]) == 0
    assert load_recipe(tmp_path / "small.yaml").data.train_samples == 18
    words = ["small.yaml", "--data", str(PLACE), "--out", "sheet.png"]
    assert main(["data", "show", *words]) == 0
    text = capsys.readouterr().out
    assert "18 training and 5 validation images" in text
    assert f"largebatch train small.yaml --data {PLACE} --out runs/small" in text
    assert main(["data", "index", "s3://key:secret@photos/small"]) == 2
    assert "secret" not in capsys.readouterr().err


def test_a_long_object_is_written_in_parts(server: tuple[Storage, Proxy]) -> None:
    objects, _ = server
    content = os.urandom(11 * 10**6)
    buckets.open_bucket(PLACE).write("000000.tar", content)
    assert objects.objects == {"small/000000.tar": content}
    assert len(objects.parts["0"]) == 3


def test_an_import_that_fails_leaves_nothing_in_the_bucket(
    folder: Path, server: tuple[Storage, Proxy]
) -> None:
    objects, proxy = server

    def refuse(seen: Seen) -> str | None:
        return "403" if seen.method == "PUT" and "val" in seen.path else None

    proxy.fault = refuse  # type: ignore[assignment]
    with pytest.raises(DataError, match=r"val/000000\.tar: access is denied.*nothing was written"):
        import_data("webdataset", folder, PLACE, shard_bytes=40_000, progress=silent)
    assert not objects.objects


def test_a_web_server_has_numbered_shards_and_stores_no_index(
    folder: Path, tmp_path: Path, own_cache: None
) -> None:
    """nginx and others list nothing; an index is in the user's cache."""
    with web_server(folder, tmp_path) as port:
        root = place_of(f"http://127.0.0.1:{port}/")
        content = make(root, "train")
        assert isinstance(content.file, Path)
        here, there = load_or_read(folder, "train"), load_or_read(root, "train")
        assert plain(there) == plain(here)
        assert images(there) == images(here)
        with pytest.raises(DataError, match="a web server does not list"):
            import_data("webdataset", folder, root, shard_bytes=10**6, progress=silent)


def test_a_file_address_is_a_bucket_too(folder: Path, tmp_path: Path, own_cache: None) -> None:
    root = place_of(f"file://{tmp_path}/shards")
    import_data("webdataset", folder, root, shard_bytes=40_000, progress=silent)
    here, there = load_or_read(folder, "val"), load_or_read(root, "val")
    assert plain(there) == plain(here)
    assert images(there) == images(here)


def test_a_changed_shard_is_refused_by_name(folder: Path, server: tuple[Storage, Proxy]) -> None:
    objects, _ = server
    upload(folder, objects, to="small")
    index = load_or_read(PLACE, "train")
    name = "small/train/000002.tar"
    objects.objects[name] = objects.objects[name][:-1] + b"x"  # of the same length
    source = open_source(index)
    assert read(index.locate(0), source) == images(load_or_read(folder, "train"))[0]
    with pytest.raises(DataError, match=f"s3://photos/{name}: was changed since it was indexed"):
        read(index.locate(len(index) - 1), source)
    with pytest.raises(DataError, match=r"train/000002\.tar was changed .*data index s3://photos"):
        load_or_read(PLACE, "train")
    del objects.objects[name]
    with pytest.raises(DataError, match=r"train/000002\.tar is missing"):
        load_or_read(PLACE, "train")


def test_an_index_of_files_is_not_one_of_objects(
    folder: Path, server: tuple[Storage, Proxy]
) -> None:
    objects, _ = server
    upload(folder, objects, to="small")
    make(folder, "train")
    name = ".largebatch-train.index"
    objects.objects[f"small/{name}"] = (folder / name).read_bytes()
    with pytest.raises(DataError, match=r"the index is of a folder .*data index s3://photos"):
        load_or_read(PLACE, "train")
    make(PLACE, "train")
    assert len(load_or_read(PLACE, "train")) == 18


@pytest.mark.parametrize("fault", ["503", "reset", "cut", "hang"])
def test_a_request_that_fails_is_repeated(
    fault: Fault,
    folder: Path,
    server: tuple[Storage, Proxy],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(buckets, "REQUEST_SECONDS", timedelta(seconds=1))
    objects, proxy = server
    upload(folder, objects, to="small")
    index = load_or_read(PLACE, "val")
    failing = iter([True, True])
    proxy.fault = lambda _: fault if next(failing, False) else None
    assert images(index) == images(load_or_read(folder, "val"))
    assert proxy.faults == {fault: 2}


def test_a_server_that_refuses_connections_ends_with_one_line(
    server: tuple[Storage, Proxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "RETRIES", 1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    with pytest.raises(DataError, match=r"s3://photos/small/.largebatch-val.index: ") as caught:
        load_or_read(PLACE, "val")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("403", "access is denied; renew"), ("expired", "the credentials have expired; renew")],
)
def test_denied_access_ends_with_one_line_without_the_secret(
    fault: Fault, reason: str, folder: Path, server: tuple[Storage, Proxy]
) -> None:
    objects, proxy = server
    upload(folder, objects, to="small")
    index = load_or_read(PLACE, "val")
    proxy.fault = lambda _: fault
    with pytest.raises(DataError, match=reason) as caught:
        read(index.locate(0), open_source(index))
    assert "\n" not in str(caught.value)
    assert "testing" not in str(caught.value)
    with pytest.raises(DataError, match=rf"largebatch-val\.index: {reason}"):
        load_or_read(PLACE, "val")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s3://key:secret@bucket/a", "contains credentials"),
        ("https://host/a?X-Amz-Signature=secret", "contains credentials"),
        ("ftp://host/a", "ftp://: unknown kind of storage"),
        ("s3:///a", "expected an address such as s3://bucket/folder"),
        ("file://host/a", "expected an address such as file:///folder"),
    ],
)
def test_an_address_is_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        place_of(text)
    assert "secret" not in str(caught.value)


def test_a_bucket_that_is_not_there(server: tuple[Storage, Proxy]) -> None:
    with pytest.raises(DataError, match=r"s3://other/x: .*"):
        load_or_read(place_of("s3://other/x"), "train")
    with pytest.raises(DataError, match=r"there is no train/000000\.tar; expected shards"):
        load_or_read(place_of("s3://photos/x"), "train")
