"""The table of measurements, and the mark of a figure whose code has changed since."""

import json
from pathlib import Path

import pytest

from benchmarks.speed import gpu, measuring, renew, sources, table

RESULTS = sorted(measuring.RESULTS.glob("*.json"))


def test_the_table_of_benchmarks_is_that_of_the_results() -> None:
    assert table.PAGE.read_text(encoding="utf-8") == table.page()


@pytest.fixture
def lars_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the sources that the benchmark of LARS measures, and write a result for them."""
    for file in sources.measured_files("lars"):
        copy = tmp_path / file.relative_to(sources.PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(sources, "PACKAGE", tmp_path)
    for module in (measuring, table, renew):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    ratio = {"median": 1.0, "low": 0.9, "high": 1.1, "n": 3}
    monkeypatch.setattr("largebatch.accelerator.names", list)
    script = str(measuring.ROOT / "benchmarks" / "speed" / "lars.py")
    monkeypatch.setattr("sys.argv", [script, "--rounds", "3"])
    file = measuring.write("lars", {"ratios": {"ours / sgd": ratio}})
    command = json.loads(file.read_text(encoding="utf-8"))["command"]
    assert command == "python -m benchmarks.speed.lars --rounds 3"
    return tmp_path


def table_cell() -> str:
    (row,) = (line for line in table.page().splitlines() if "SGD(fused=True)" in line)
    return row.split("|")[3].strip()


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text(encoding="utf-8")
    assert old in text
    file.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_a_figure_is_stale_once_the_code_it_measures_has_changed(lars_copy: Path) -> None:
    file = lars_copy / "optim" / "lars.py"
    assert table_cell() == "1.000 (0.900 to 1.100, 3)"
    edit(file, "import math", "import math  # a comment\nCHANGED = 1")
    assert table_cell() == "1.000 (0.900 to 1.100, 3), stale"
    assert "lars" in renew.stale_benchmarks()


def test_a_figure_is_not_stale_after_a_move_or_a_change_of_words(
    lars_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = lars_copy / "optim" / "lars.py"
    edit(file, "import math", "import math  # a comment")
    edit(file, '"""', '"""Another first line. ')
    edit(file, "from largebatch.recipe.choices import", "from largebatch.moved.choices import")
    file.rename(lars_copy / "optim" / "kernels" / "moved.py")
    monkeypatch.setitem(sources.MEASURED, "lars", ("optim/kernels",))
    assert table_cell() == "1.000 (0.900 to 1.100, 3)"
    assert "lars" not in renew.stale_benchmarks()


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_every_result_names_its_commit_and_a_benchmark_the_code_it_measured(path: Path) -> None:
    name, _, _ = path.stem.rsplit("_", 2)
    result = json.loads(path.read_text(encoding="utf-8"))
    assert name not in sources.MEASURED or result["sources"]
    for part in [result] if "command" in result else result.values():
        assert part["commit"]


@pytest.mark.parametrize("row", table.ROWS, ids=lambda row: row.what)
def test_every_row_of_the_table_is_measured_by_a_command(row: table.Row) -> None:
    assert row.benchmark in renew.COMMANDS or row.benchmark in {part.name for part in gpu.PARTS}


@pytest.mark.parametrize("name", sources.MEASURED)
def test_measured_files_exist(name: str) -> None:
    assert all((sources.PACKAGE / path).exists() for path in sources.MEASURED[name])


def test_the_newest_results_of_a_name_are_not_those_of_a_longer_name(tmp_path: Path) -> None:
    for name in ("lars_cpu2_2026-01-01", "lars_cpu2_2026-01-02", "lars_big_cpu2_2026-01-03"):
        (tmp_path / f"{name}.json").touch()
    found = measuring.newest("lars", tmp_path, machine="*")
    assert found == tmp_path / "lars_cpu2_2026-01-02.json"


def test_the_interval_of_a_ratio_holds_its_median() -> None:
    ratio = measuring.paired_ratio([1.0, 2.0, 3.0], [2.0, 2.0, 2.0])
    assert ratio["low"] <= ratio["median"] == 1.0 <= ratio["high"]
    assert ratio["n"] == 3
