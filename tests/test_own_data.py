"""The commands of docs/your-own-data.md, on a few photographs, from an empty home."""

import json
import shlex
import shutil
import zipfile
from pathlib import Path

import pytest
from documents import commands

from largebatch.cli.main import DONE, main

PAGE = Path(__file__).parents[1] / "docs" / "your-own-data.md"
SHORT = ("duration={epochs: 2}", "schedule.warmup={steps: 2}", "polish.clean={epochs: 1}")


def write_photos(archive: Path, photos: Path) -> None:
    """Write 30 photographs of each of three classes."""
    with zipfile.ZipFile(archive) as file:
        names = sorted(name for name in file.namelist() if name.endswith(".JPEG"))
        for class_name in sorted({name.split("/")[1] for name in names})[:3]:
            (photos / class_name).mkdir(parents=True)
            for name in [name for name in names if name.split("/")[1] == class_name][:30]:
                (photos / class_name / Path(name).name).write_bytes(file.read(name))


@pytest.mark.long
def test_the_commands_lead_from_photographs_to_a_polished_run(
    real_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    draws: None,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    write_photos(real_data / "imagenette224/train.zip", tmp_path / "photos")
    shutil.copytree(next((tmp_path / "photos").iterdir()), tmp_path / "new-photos")
    for command in commands(PAGE, here=True):
        program, *words = shlex.split(command)
        assert program == "largebatch"
        short = [word for each in SHORT for word in ("--set", each)] if "train" in words else []
        assert main([*words, *short]) == DONE
    summary = json.loads((tmp_path / "runs/photos/summary.json").read_text())
    assert [stage["name"] for stage in summary["stages"]] == ["train", "clean", "statistics"]
    assert len((tmp_path / "classes.csv").read_text().splitlines()) == 31
    for name in ("runs/photos/report.html", "sheet.png", "photos.yaml"):
        assert (tmp_path / name).exists()
