"""What a model gets wrong, as its page shows it: the pairs of classes."""

from pathlib import Path

import numpy as np
from fake_runs import FakeRun

from largebatch.report.page import wrong_predictions
from largebatch.report.run import read_run
from largebatch.tracking.events import Mistakes


def test_what_is_mixed_up_most_comes_first() -> None:
    random = np.random.default_rng(0)
    labels, predicted = random.integers(0, 4, (2, 500))
    wrong = np.flatnonzero(labels != predicted)
    found = Mistakes(
        stage="train", step=1, classes=("a", "b", "c", "d"),
        sizes=tuple(np.bincount(labels).tolist()), samples=tuple(wrong.tolist()),
        labels=tuple(labels[wrong].tolist()), predicted=tuple(predicted[wrong].tolist()),
    )  # fmt: skip
    counted = [[int(((labels == i) & (predicted == j)).sum()) for j in range(4)] for i in range(4)]
    off = {(i, j): counted[i][j] for i in range(4) for j in range(4) if i != j}
    first = max(off, key=lambda pair: (off[pair], -pair[0], -pair[1]))
    (table,) = wrong_predictions(found)
    label, predicted, images = (column.values for column in table.columns)
    assert (label[0], predicted[0]) == ("abcd"[first[0]], "abcd"[first[1]])
    assert images[0] == f"{off[first]} of {sum(counted[first[0]])}"
    most = sorted(off.values(), reverse=True)[:10]
    assert [int(shown.split()[0]) for shown in images] == most


def test_the_mistakes_shown_are_those_of_the_stage_that_was_kept(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.end("train", 600, 0.9, wrong=(3, 13, 14))
    run.end("statistics", 0, 0.5, wrong=range(180))
    run.decide("statistics", before=0.9, after=0.5)
    found = read_run(run.write())
    assert found.last_stage is not None
    assert found.last_stage.name == "train"
    assert found.final_mistakes is not None
    assert found.final_mistakes.stage == "train"
