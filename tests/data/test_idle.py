"""Decoders that stay open from one evaluation to the next."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import pytest
import torch
from decoding import has_dali, needs_dali
from short_runs import CLEAN, a_recipe, log

from largebatch import run
from largebatch.data.decoders import dali
from largebatch.data.decoders.reader import Reader
from largebatch.data.pipeline import Pipeline, open_images
from largebatch.data.types import Batch
from largebatch.distributed.serial import Serial
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.loading import load_recipe

DIGITS = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"
every_way = pytest.mark.parametrize(
    "way",
    [
        pytest.param("execution.decoder=dali", marks=needs_dali, id="dali"),
        pytest.param("execution.decoder=torchvision", id="torchvision"),
        pytest.param("execution.cache=memory", id="cache"),
        pytest.param("data.source=synthetic", id="synthetic"),
    ],
)


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def opened(*changes: str) -> Pipeline:
    recipe = load_recipe(DIGITS, list(changes))
    return open_images(
        recipe, make_plan(recipe, workers=1), Serial(torch.device("cpu")), folder=None
    )


def copies(batches: Iterable[Batch]) -> list[Batch]:
    return [Batch(*(tensor.clone() for tensor in batch)) for batch in batches]


def assert_same(ours: list[Batch], other: list[Batch]) -> None:
    for one, expected in zip(ours, other, strict=True):
        assert torch.equal(one.images, expected.images)
        assert torch.equal(one.labels, expected.labels)


def test_all_evaluations_of_a_run_share_one_decoder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = "dali" if has_dali else "torchvision"
    opened = count(monkeypatch, Reader, "__init__")
    built = count(monkeypatch, dali._Graph, "build")
    often = ("duration={steps: 4}", "evaluation={every_epochs: 0.07}", "execution.cache=null")
    recipe = a_recipe(CLEAN, changes=(*often, f"execution.decoder={decoder}"))
    run(recipe, out=tmp_path / "run", report=False)
    assert len(log(tmp_path / "run", "evaluation")) > 2
    assert len(opened) == 3, "that of training, that of clean training, that of evaluations"
    assert len(built) == (3 if decoder == "dali" else 0)


def count(monkeypatch: pytest.MonkeyPatch, owner: type, name: str) -> list[object]:
    """Return a list to which every call of a method adds."""
    real: Callable[..., object] = getattr(owner, name)
    calls: list[object] = []

    def note(self: object, *arguments: object, **settings: object) -> object:
        calls.append(self)
        return real(self, *arguments, **settings)

    monkeypatch.setattr(owner, name, note)
    return calls


@every_way
def test_an_interrupted_evaluation_does_not_affect_the_next(way: str) -> None:
    with closing(opened(way)) as pipeline:
        expected = copies(pipeline.validation())
        with closing(pipeline.validation()) as batches:
            list(islice(batches, 1))
        assert pipeline.idle == {}, "it has batches that nobody used"
        assert_same(copies(pipeline.validation()), expected)
