"""Whether a script may set the epoch is read from its code, not from its comments."""

import runpy
from pathlib import Path

import pytest

CALL = "from largebatch.audit.calling import may_set_epoch\nfound = may_set_epoch()\n"


def found_in(folder: Path, source: str) -> bool:
    path = folder / "train_script.py"
    path.write_text(CALL + source, encoding="utf-8")
    found: bool = runpy.run_path(str(path))["found"]
    return found


@pytest.mark.parametrize(
    ("source", "may"),
    [
        pytest.param("def loop(loader): loader.sampler.set_epoch(1)", True, id="a call"),
        pytest.param("def loop(it): return hasattr(it, 'set_epoch')", True, id="a test"),
        pytest.param("'''Without set_epoch.'''  # set_epoch", False, id="a comment"),
        pytest.param("def offset_epoch(): return 1", False, id="another name"),
    ],
)
def test_a_script_may_set_the_epoch_if_its_code_names_it(
    source: str, may: bool, tmp_path: Path
) -> None:
    assert found_in(tmp_path, source) is may


def test_modules_of_the_script_are_read_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = "def train(loader, epoch): loader.sampler.set_epoch(epoch)\n"
    (tmp_path / "engine_of_script.py").write_text(engine, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "main.py"
    path.write_text("from engine_of_script import train\n" + CALL, encoding="utf-8")
    assert runpy.run_path(str(path))["found"] is True
