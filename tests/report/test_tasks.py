"""A task is one value: its words show in the console, the page and the comparison.

The core has no branch for text, and a third task that is entered here shows that it needs none.
"""

import math
import re
from io import StringIO
from pathlib import Path

import pytest
from fake_runs import FakeRun

import largebatch
from largebatch.recipe.keys import TASKS
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.task import IMAGES, TOP1, TOP5, Metric, Task
from largebatch.recipe.text import TEXT
from largebatch.recipe.writing import dump_recipe
from largebatch.report import write_comparison, write_report
from largebatch.report.run import read_run
from largebatch.tracking.console import Console
from largebatch.tracking.events import METRICS

BITS = Metric(
    key="bits",
    name="bits",
    title="Bits a note",
    column="Bits",
    value=lambda found: found.loss / math.log(2),
    lower_is_better=True,
    caption="Mean over the {labels}.",
)
MELODIES = Task(
    data="music",
    samples="melodies",
    labelled="notes",
    classes="pitches",
    metrics=(BITS,),
    fit=0.9,
    loss_note="Both count notes.",
)
BIRDS = Task(
    data="recordings",
    samples="clips",
    labelled="clips",
    classes="species",
    metrics=(TOP1, TOP5),
    fit=0.5,
    loss_note="Only training clips are mixed with noise.",
)


@pytest.fixture
def melodies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a run on melodies, a task that is entered for one test."""
    monkeypatch.setitem(TASKS, "melodies", MELODIES)
    return trained(tmp_path / "melodies", source="melodies")


def trained(folder: Path, *, source: str | None) -> Path:
    run = FakeRun(folder, clean_steps=0)
    run.curve(600, best=0.9)
    run.end("train", 600, 0.9)
    run.write()
    recipe = f"name: {run.name}\ndata: {{source: {source}}}\n"
    (folder / "recipe.yaml").write_text(recipe if source else "name: x\n", encoding="utf-8")
    return folder


def words(page: Path) -> str:
    hidden = r"<style.*?</style>|<script.*?</script>|<pre.*?</pre>|<svg.*?</svg>|<[^>]+>"
    return " ".join(re.sub(hidden, " ", page.read_text("utf-8"), flags=re.DOTALL).split())


def test_a_third_task_shows_its_metric_in_the_console(melodies: Path) -> None:
    stream = StringIO()
    Console(stream, task=MELODIES).record(read_run(melodies).evaluations[-1])
    assert re.search(
        r"train  epoch  40.08  bits 0.58  top-1  90.00%  .*val loss", stream.getvalue()
    )


def test_a_third_task_gives_the_page_its_headline_its_chart_and_its_nouns(melodies: Path) -> None:
    page = write_report(melodies)
    text = words(page)
    assert "Bits a note 0.58 after 600 steps" in text
    assert "the final bits is 0.58, the lowest of the run" in text
    assert "806 melodies/s" in text
    assert "Mean over the 360 notes." in text
    assert "Both count notes." in text
    assert "image" not in text
    assert (melodies / "bits.png").exists()
    assert not (melodies / "accuracy.png").exists()


def test_a_comparison_has_a_column_of_a_third_task_and_a_chart_of_its_runs(
    melodies: Path, tmp_path: Path
) -> None:
    images = trained(tmp_path / "images", source="digits")
    page, comparison = write_comparison([melodies, images], tmp_path)
    text = page.read_text(encoding="utf-8")
    assert ">Bits a note</button>" in text
    assert '<figure class="part chart" id="bits">' in text
    assert [one.run.task for one in comparison.runs] == [MELODIES, IMAGES]
    assert [group.data for group in comparison.groups] == [
        "melodies, 360 validation notes",
        "digits, 360 validation images",
    ]


def test_a_third_task_that_accuracy_judges_has_the_page_of_images_with_its_own_nouns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(TASKS, "birds", BIRDS)
    folder = trained(tmp_path / "birds", source="birds")
    text = words(write_report(folder))
    assert "Top-1 accuracy 90.00 %" in text
    assert "Accuracy on the 360 validation clips" in text
    assert "image" not in text
    assert (folder / "accuracy.png").exists()


def test_the_task_of_a_run_is_that_of_its_recipe_or_of_its_log(tmp_path: Path) -> None:
    run = FakeRun(tmp_path / "run")
    run.end("train", 600, 0.9)
    folder = run.write()
    assert read_run(folder).task is IMAGES
    (folder / "recipe.yaml").write_text(dump_recipe(load_recipe("ptb_lstm_20")))
    assert read_run(folder).task is TEXT
    (folder / "recipe.yaml").unlink()
    assert read_run(folder).task is IMAGES
    log = (folder / "log.jsonl").read_text()
    (folder / "log.jsonl").write_text(
        log.replace('"samples": 360', '"samples": 360, "perplexity": 2')
    )
    assert read_run(folder).task is TEXT


@pytest.mark.parametrize("task", [IMAGES, TEXT])
def test_what_a_task_records_is_followed_by_the_trackers(task: Task) -> None:
    assert task.metric.key in METRICS


CORE = (
    *("recipe", "schedules", "data", "models", "optim", "distributed", "polish", "training"),
    *("tracking", "report", "runs"),
)
OF_TEXT = re.compile(
    r"[Pp]erplexity|of_words|\bText\(\)|, Text\)|\bTEXT\b|LANGUAGE_MODEL|(recipe|data)\.text\b"
)
ALLOWED = {
    "recipe/text.py": "the section and the task of text",
    "recipe/keys.py": "lists the sections and the tasks",
    "recipe/validation.py": "holds the rules between sections",
    "runs/build.py": "chooses the pipeline",
    "tracking/events.py": "names the fields of log.jsonl and summary.json",
}


def test_the_core_has_no_branch_for_text() -> None:
    package = Path(largebatch.__file__).parent
    files = {
        path.relative_to(package).as_posix(): path
        for room in CORE
        for path in (package / room).rglob("*")
        if path.suffix in {".py", ".html"}
    }
    found = {
        name
        for name, path in files.items()
        if not name.startswith("data/text/") and OF_TEXT.search(path.read_text(encoding="utf-8"))
    }
    assert len(files) > 100
    assert found == set(ALLOWED)
