"""Runs whose images are in a bucket, beside the same runs from a folder."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from class_folders import imported, png
from s3_server import Storage, connected, upload
from short_runs import a_recipe, content
from slow_proxy import Proxy
from torch import Tensor

from largebatch import run
from largebatch.data.decoders import host_cache
from largebatch.errors import LargebatchError
from largebatch.recipe.recipe import Recipe
from largebatch.runs.options import Options

PLACE = "s3://photos/small"
SECRET = "testing-secret"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("folders")
    for split, number in (("train", 192), ("val", 24)):
        for image in range(number):
            path = root / "classes" / split / "ab"[image % 2] / f"{image:03d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(png(1000 * len(split) + image, side=32))
    imported(root / "classes", root / "shards", name="webdataset", size=300_000)
    return root / "shards"


@pytest.fixture
def server(
    folder: Path, monkeypatch: pytest.MonkeyPatch, own_cache: None
) -> Iterator[tuple[Storage, Proxy]]:
    with connected(monkeypatch) as (objects, proxy):
        upload(folder, objects, to="small")
        yield objects, proxy
    host_cache._keeper.cache_clear()


def recipe() -> Recipe:
    return a_recipe(
        "statistics: {samples: 96}",
        changes=(
            *("data.source=folder", "data.classes=2", "data.train_samples=192"),
            *("data.val_samples=24", "execution.cache=none"),
        ),
    )


def weights(out: Path) -> dict[str, Tensor]:
    model: dict[str, Tensor] = content(out)["model"]
    return model


def test_a_run_from_a_bucket_is_that_from_a_folder_and_its_record_has_no_secret(
    folder: Path, server: tuple[Storage, Proxy], tmp_path: Path
) -> None:
    _, proxy = server
    run(recipe(), data=folder, out=tmp_path / "disk", report=False)
    cache = tmp_path / "blocks"
    out = tmp_path / "bucket"
    run(recipe(), data=PLACE, cache_dir=cache, out=out, max_steps=5, report=False)
    summary = run(recipe(), data=PLACE, cache_dir=cache, out=out, resume=True, report=False)
    assert summary.status == "finished"
    torch.testing.assert_close(weights(out), weights(tmp_path / "disk"), rtol=0, atol=0)
    assert json.loads((out / "options.json").read_text())["data"] == PLACE
    for path in (*out.rglob("*"), *cache.rglob("*")):
        if path.is_file():
            assert SECRET.encode() not in path.read_bytes(), path
    fetched = [one for one in proxy.ranges if "train/" in one[0]]
    assert len(set(fetched)) == len(fetched), "an index in 1 read, and each block once"


@pytest.mark.long
@pytest.mark.parametrize(("workers", "cache_gb"), [(2, 1.0), (2, 0.0004), (8, 1.0)])
def test_workers_share_the_blocks_of_their_host(
    workers: int, cache_gb: float, folder: Path, server: tuple[Storage, Proxy], tmp_path: Path
) -> None:
    """In processes: the weights are those from a folder, and a block is fetched once if it fits."""
    _, proxy = server
    run(recipe(), data=folder, out=tmp_path / "disk", workers=workers, report=False)
    run(recipe(), data=PLACE, out=tmp_path / "indexed", max_steps=1, report=False)
    proxy.seen.clear()
    run(
        recipe(),
        data=PLACE,
        cache_dir=tmp_path / "blocks",
        cache_gb=cache_gb,
        out=tmp_path / "bucket",
        workers=workers,
        report=False,
    )
    torch.testing.assert_close(
        weights(tmp_path / "bucket"), weights(tmp_path / "disk"), rtol=0, atol=0
    )
    number = Counter(proxy.ranges)
    assert (max(number.values()) == 1) == (cache_gb == 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_dir": Path("c")}, "--cache-dir c: keeps what is read from an address"),
        ({"cache_gb": 1.0}, "--cache-gb 1: name the folder"),
    ],
)
def test_a_cache_without_an_address_is_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(LargebatchError, match=message):
        Options(**options)  # type: ignore[arg-type]  # bad ones too
