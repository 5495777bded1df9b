"""The results in a policy database: what is left out, and what is refused."""

import json
import sqlite3
from pathlib import Path

import optuna
import pytest
from policy_databases import Policy, fill

from largebatch.errors import StudyError
from largebatch.studies.database import open_existing
from largebatch.studies.results import CellResults, read_results

ONE = Policy(reached=[4], top1=[0.9])
SEARCH = "tiny/digits/one/search"


def read(url: str) -> list[CellResults]:
    with open_existing(url) as storage:
        return read_results(storage)


def test_a_study_that_is_under_way_is_read_and_marked(tmp_path: Path) -> None:
    two = Policy(reached=[4, 5], top1=[0.9, 0.92], left=1)
    (cell,) = read(fill(tmp_path, {"one": two}))
    assert (len(cell.search), len(cell.seeds), cell.finished) == (3, 1, False)
    assert cell.cell.seed_recipe(cell.values, seed=2).seed == 2


def test_what_is_not_ours_is_left_out_and_what_cannot_be_read_is_refused(tmp_path: Path) -> None:
    url = fill(tmp_path, {"one": ONE})
    optuna.create_study(storage=url, study_name="another program's")
    (cell,) = read(url)
    assert cell.finished
    study = optuna.load_study(storage=url, study_name=SEARCH)
    number = study.get_trials()[0]._trial_id
    there = study.user_attrs["definition"]
    record = study.get_trials()[0].user_attrs["result"]
    study.set_user_attr("definition", {**there, "recipe": {}})
    with pytest.raises(StudyError, match=f"{SEARCH}: its definition cannot be read"):
        read(url)
    study.set_user_attr("definition", {**there, "format": 1})
    with pytest.raises(StudyError, match=f"{SEARCH}: .* with format 1, expected 2"):
        read(url)
    study.set_user_attr("definition", there)
    text = json.dumps({**record, "top1": "high"})
    with sqlite3.connect(tmp_path / "study.db") as connection:
        changed = "UPDATE trial_user_attributes SET value_json = ? WHERE trial_id = ? AND key = ?"
        connection.execute(changed, (text, number, "result"))
    with pytest.raises(StudyError, match="the record of search-001 cannot be read: top1"):
        read(url)
