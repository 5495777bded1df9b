"""Studies of servers: their files, what they find, and the bytes on real links."""

import json
from pathlib import Path
from typing import Any

import pytest
from on_hosts import needs_hosts
from short_servers import with_recipe, write_study
from short_staleness import SETTINGS

from largebatch.cli.main import DONE, USER, main
from largebatch.lab.studies.servers import study as files
from largebatch.lab.studies.servers.study import cells_of, load_study
from largebatch.recipe.protocols import Hardsync

LARS = {name: value for name, value in SETTINGS.items() if name != "optimizer"}
"""The settings of the study with the optimizer of the recipe."""


def test_every_layout_makes_the_same_update_of_the_same_samples(tmp_path: Path) -> None:
    cells = {
        cell.layout: cell for cell in cells_of(load_study(str(write_study(tmp_path))), tmp_path)
    }
    sizes = {name: len(cell.placement.workers_per_host) for name, cell in cells.items()}
    assert sizes == {"alone": 1, "central": 3, "beside": 2, "ring": 2, "ring-horovod": 2}
    assert cells["alone"].recipe.batch.global_batch == 2
    for name in ("central", "beside", "ring", "ring-horovod"):
        recipe = cells[name].recipe
        assert recipe.batch.global_batch == 4
        assert recipe.model_copy(update={"protocol": None}) == cells["ring"].recipe
        assert isinstance(recipe.protocol, Hardsync) == (name in {"central", "beside"})
    assert cells["ring-horovod"].placement.backend == "horovod"


def test_the_installed_study_judges_the_papers_two_models_by_what_it_found_of_each() -> None:
    """LeNet-5 of five layers and an LSTM; Caffe's LeNet-5 and ResNet-50 are ours."""
    claims = {name: trained.paper for name, trained in load_study("jaeger").recipes.items()}
    assert claims == {
        "lenet5-lecun": "faster", "lenet5": None, "resnet50": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"layouts": {"alone": "torch"}}, "layouts.alone: that is what one worker is called",
            id="layout-alone",
        ),
        pytest.param({"layouts": {"x": "central"}}, "layouts.x", id="layout"),
        pytest.param({"megabits": 0}, "megabits", id="megabits"),
        pytest.param({"recipes": with_recipe(workers=[1])}, "workers.0", id="one-worker"),
        pytest.param(
            {"recipes": with_recipe(computed=None)}, "compute and computed belong together",
            id="computed-missing",
        ),
        pytest.param(
            {"recipes": with_recipe(computed=17)},
            "computed (17) must be at most mini_batch (16)", id="computed-too-many",
        ),
        pytest.param(
            {"recipes": with_recipe(compute=None, computed=None), "simulated": {"workers": [2]}},
            "recipes.lenet5.compute: simulated needs the time", id="simulated-without-times",
        ),
        pytest.param(
            {"recipes": with_recipe(set={**LARS, "duration": {"steps": 40}}),
             "layouts": {"parts": {"split": "decentralised"}}},
            "lenet5-parts-2: digits-96: 1 problem\n  protocol.split: LARS needs", id="split-lars",
        ),
        pytest.param(
            {"recipes": with_recipe(updates=40)}, "the recipe ends after 40 updates, and 43",
            id="updates",
        ),
        pytest.param(
            {"recipes": with_recipe(recipe="digits_96_softsync", set={})}, "has a protocol",
            id="protocol",
        ),
        pytest.param(
            {"recipes": with_recipe(recipe="digits_97", set={})}, "digits_97", id="recipe"
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_before_anything_is_started(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    assert main(["lab", "study", "servers", str(write_study(tmp_path, **changes))]) == USER
    assert message in capsys.readouterr().err


def test_what_is_left_is_listed_without_horovod_where_it_is_not_installed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    path = write_study(tmp_path, repeats=2)
    words = ["lab", "study", "servers", str(path), "--out", str(tmp_path / "out"), "--dry-run"]
    assert main(words) == DONE
    first, *rest, total = capsys.readouterr().out.splitlines()
    assert first == "horovod is not installed: ring-horovod is left out"
    assert total.startswith("8 starts; about 0:")
    assert total.endswith(
        " of starting workers, gradients and messages in 1 process on this machine"
    )
    cells = ["alone-1", "central-2", "beside-2", "ring-2"]
    assert rest == [f"lenet5-{cell} seed {seed}" for seed in (1, 2) for cell in cells]
    assert main([*words, "--data", "resnet=x"]) == USER
    assert "the study has the recipes lenet5" in capsys.readouterr().err
    assert main(["lab", "study", "servers", "jaegers"]) == USER
    assert "neither a file nor an installed study; those are jaeger" in capsys.readouterr().err
    assert main(["lab", "study", "servers", "rudra"]) == USER
    assert "run this study with `largebatch study staleness rudra`" in capsys.readouterr().err


def test_the_data_that_recipes_lack_is_named_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["lab", "study", "servers", "jaeger", "--data", "lenet5=x", "--out", str(tmp_path)]
    assert main(words) == USER
    found = capsys.readouterr().err
    assert found == (
        "largebatch: jaeger: its recipes read data from folders; pass --data lenet5-lecun=DIR\n"
    )


@pytest.mark.long
@needs_hosts
def test_counters_of_all_links_are_within_five_percent_of_the_formulas(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real start of each layout, and nothing is measured twice."""
    words = ["lab", "study", "servers", str(write_study(tmp_path)), "--out", str(tmp_path / "out")]
    assert main(words) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("The counters of all links are within 5%") for line in lines)
    assert lines[-1] == f"page: {tmp_path / 'out' / 'study.html'}"
    model = 4 * 432_080  # LeNet-5 for three colours and ten classes
    for layout, busiest in {"central": 2, "beside": 0, "ring": 0, "ring-horovod": 1}.items():
        if not (path := tmp_path / "out" / f"lenet5-{layout}-2" / "seed-1.json").exists():
            continue  # without Horovod
        found = json.loads(path.read_bytes())["found"]
        assert sum(found["shards"]) == model
        expected = 2 * model if layout == "central" else model
        assert list(found["sent"].values())[busiest] == pytest.approx(expected, rel=0.05)
        assert list(found["received"].values())[busiest] == pytest.approx(expected, rel=0.05)
        assert len(found["seconds"]) == 4
    monkeypatch.delattr("largebatch.lab.studies.hosts.starts.measure_on_hosts")
    assert main(words) == DONE
    assert capsys.readouterr().out.splitlines() == [line for line in lines if "seed" not in line]
    for file in (tmp_path / "out").rglob("seed-1.json"):
        file.write_text(json.dumps({"settings": json.loads(file.read_bytes())["settings"]}))
    assert main(words) == USER
    assert "is not the record of a start; remove it" in capsys.readouterr().err
    changed = str(write_study(tmp_path, megabits=100))
    assert main(["lab", "study", "servers", changed, "--out", str(tmp_path / "out")]) == USER
    assert "was recorded with other settings than the study has now" in capsys.readouterr().err


@pytest.mark.long
@needs_hosts
def test_a_mistake_that_only_a_worker_can_find_is_one_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_study(tmp_path, layouts={"central": {"centralised": 30}})
    assert main(["lab", "study", "servers", str(path), "--out", str(tmp_path / "out")]) == USER
    assert "servers hold whole tensors" in capsys.readouterr().err
