"""What a run sets for its process: the garbage collector, and how convolutions are chosen."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from short_runs import CLEAN, a_recipe
from torch.backends import cudnn

from largebatch import run
from largebatch.runs import run as running
from largebatch.training.evaluation import Metrics
from largebatch.training.judging import Evaluator
from largebatch.training.session import Session
from largebatch.training.stages import collected_by_hand, run_stages

Collections = list[int]
"""The generations that were collected, in their order."""


@contextmanager
def collections() -> Iterator[Collections]:
    found: Collections = []

    def note(phase: str, about: dict[str, int]) -> None:
        if phase == "start":
            found.append(about["generation"])

    gc.callbacks.append(note)
    try:
        yield found
    finally:
        gc.callbacks.remove(note)


def test_a_run_collects_once_for_each_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not when the stages begin: looking through all of PyTorch takes 0.2 s."""
    found: list[Collections] = []

    def counted(session: Session, *, until: int) -> bool:
        with collections() as generations:
            found.append(generations)
            return run_stages(session, until=until)

    monkeypatch.setattr(running, "run_stages", counted)
    run(a_recipe(CLEAN, changes=("evaluation={every_epochs: 0.2}",)), out=tmp_path / "run")
    log = (tmp_path / "run" / "log.jsonl").read_text()
    (generations,) = found
    whole = [generation for generation in generations if generation == 2]
    assert len(whole) == log.count('"event":"evaluation"') > 2
    assert gc.isenabled()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_afterwards_as_before(*, enabled: bool) -> None:
    was = gc.isenabled()
    gc.unfreeze()  # what the start of forked workers has frozen
    (gc.enable if enabled else gc.disable)()
    try:
        with collected_by_hand():
            assert not gc.isenabled()
            assert gc.get_freeze_count() > 1000
        assert gc.isenabled() == enabled
        assert not gc.get_freeze_count()
    finally:
        (gc.enable if was else gc.disable)()


@pytest.mark.parametrize(
    ("changes", "deterministic", "tries"),
    [
        pytest.param((), False, True, id="one size"),
        pytest.param((), True, False, id="deterministic"),
        pytest.param(
            ("data.resolution=[{until: {steps: 4}, image_size: 12}]",), False, False, id="two sizes"
        ),
    ],
)
def test_convolutions_are_tried_where_all_images_have_one_size(
    changes: tuple[str, ...],
    deterministic: bool,
    tries: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[bool] = []

    def noted(evaluator: Evaluator, *args: Any) -> Metrics:  # noqa: ANN401 -- its own
        found.append(cudnn.benchmark)
        return evaluate(evaluator, *args)

    evaluate = Evaluator.validation
    monkeypatch.setattr(Evaluator, "validation", noted)
    monkeypatch.setattr(cudnn, "deterministic", deterministic)
    run(a_recipe(CLEAN, changes=changes), out=tmp_path / "run")
    assert set(found) == {tries}
    assert not cudnn.benchmark
