"""What the page of a run says of its learners."""

import re
from pathlib import Path

import pytest
from fake_runs import FakeRun

from largebatch.cli.main import DONE, main
from largebatch.training.protocols.section import learners_section

COUNTS = {
    "gradients": [1200, 480, 1320],
    "lost": [{"learner": 1, "update": 1037, "mini_batch": 3111, "silent": False}],
}


@pytest.mark.parametrize(
    "summary",
    [
        pytest.param({"extra": {"protocol": COUNTS}}, id="in extra"),
        pytest.param(COUNTS, id="at the top, in older folders"),
    ],
)
def test_the_page_lists_gradients_by_learner_and_lost_learners(
    summary: dict[str, object], tmp_path: Path
) -> None:
    run = FakeRun(tmp_path / "run")
    run.train(0, 2)
    assert main(["report", str(run.write(**summary)), "--out", str(tmp_path / "out")]) == DONE
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    text = " ".join(re.sub("<[^>]*>", " ", page).split())
    assert "Gradients by learner 1,200 · 480 · 1,320 Lost learners 1 after 1,037 updates" in text


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"extra": {}}', '{"extra": {"protocol": 1}}'])
def test_a_folder_without_counts_of_learners_has_no_section(content: str, tmp_path: Path) -> None:
    assert learners_section(tmp_path) is None
    (tmp_path / "summary.json").write_text(content)
    assert learners_section(tmp_path) is None
