"""The results in a policy database: what is left out, and what is refused."""

import json
import sqlite3
from pathlib import Path

import optuna
import pytest
from policy_databases import Policy, fill

from largebatch.errors import StudyError
from largebatch.lab.studies.queue.database import Queue, open_existing
from largebatch.lab.studies.queue.results import CellResults, read_results

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
    for damaged, cause in (({**record, "top1": "high"}, "top1"), ([1, 2], "seed"), (None, "seed")):
        with sqlite3.connect(tmp_path / "study.db") as connection:
            change = (
                "UPDATE trial_user_attributes SET value_json = ? WHERE trial_id = ? AND key = ?"
            )
            connection.execute(change, (json.dumps(damaged), number, "result"))
        with pytest.raises(StudyError, match=f"the record of search-001 cannot be read: {cause}"):
            read(url)


def test_a_definition_without_what_was_found_is_refused(tmp_path: Path) -> None:
    url = fill(tmp_path, {"one": ONE})
    name = SEARCH.replace("search", "seeds")
    study = optuna.load_study(storage=url, study_name=name)
    there = study.user_attrs["definition"]
    for values in (None, "high", {"schedule.peak_lr": "high"}):
        study.set_user_attr("definition", {**there, "values": values})
        with pytest.raises(StudyError, match=f"{name}: its definition cannot be read: values: "):
            read(url)
    study.set_user_attr("definition", "none")
    assert read(url)[0].finished is False
    with (
        pytest.raises(StudyError, match=f"{name}: .* with no format, expected 2"),
        open_existing(url) as storage,
    ):
        Queue(storage, name, {"values": {}}, [])
