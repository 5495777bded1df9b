"""Every cell of the tutorials that are notebooks runs, here with less to train."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from documents import DOCS
from real_subsets import SAMPLES, write_subset

nbformat = pytest.importorskip("nbformat", reason="not installed: pip install 'largebatch[docs]'")
nbclient = pytest.importorskip("nbclient", reason="not installed: pip install 'largebatch[docs]'")

pytestmark = pytest.mark.long

FEW = ("duration.epochs=20", *SAMPLES, "polish.statistics.samples=240")
"""Settings for a few images of every class."""


@pytest.fixture
def execute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that executes a notebook, with texts replaced, and returns its output."""
    folder = Path(sys.executable).parent
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def execute(name: str, *changes: tuple[str, str]) -> str:
        book: Any = nbformat.read(DOCS / "tutorials" / name, 4)
        for old, new in changes:
            assert any(old in cell.source for cell in book.cells), old
            for cell in book.cells:
                cell.source = cell.source.replace(old, new)
        where = {"metadata": {"path": str(tmp_path)}}
        nbclient.NotebookClient(book, timeout=300, resources=where).execute()
        outputs = (output for cell in book.cells for output in cell.get("outputs", []))
        return "".join(str(output.get("text", "")) for output in outputs)

    return execute


def test_the_loop_that_lost_accuracy_is_found_and_mended(execute: Callable[..., str]) -> None:
    text = execute("accuracy-fell.ipynb", ("EPOCHS, BATCH = 12", "EPOCHS, BATCH = 2"))
    faulty, mended = text.split("eight:")[1].split("mended:")[0].split("audit: no fault")
    assert "fault    gradient direction" in faulty
    assert "fault" not in mended.replace("no fault", "")


def test_the_resume_that_was_not_one_is_found_and_mended(execute: Callable[..., str]) -> None:
    faulty, mended = execute("resume.ipynb").split("audit: the same training")
    for check in ("epoch order", "learning rates", "averaged weights"):
        assert f"fault    {check}" in faulty
    assert "fault " not in mended


@pytest.mark.skipif("LARGEBATCH_DATA" not in os.environ, reason="LARGEBATCH_DATA is not set")
def test_a_large_batch_is_trained_and_compared(execute: Callable[..., str], tmp_path: Path) -> None:
    write_subset(Path(os.environ["LARGEBATCH_DATA"]) / "cifar10", tmp_path / "cifar10")
    short = ", ".join(f'"{one}"' for one in FEW)
    text = execute("large-batch.ipynb", ('"duration.epochs=6"', short))
    assert text.count("updates, top-1") == 3
    assert (tmp_path / "runs/lars/report.png").exists()
