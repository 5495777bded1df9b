"""Groups of workers, and what is built on them, in real processes on this machine."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import group_work
import pytest
import torch
from on_forked_workers import on_forked_workers

import largebatch
from largebatch import load_recipe
from largebatch.distributed.serial import Serial
from largebatch.errors import RecipeError
from largebatch.runs.build import open_session
from largebatch.runs.options import Options
from largebatch.runs.run import run

RECIPES = Path(__file__).parents[2] / "recipes"
DIGITS = RECIPES / "quickstart" / "digits_96.yaml"
FUJITSU = str(RECIPES / "imagenet" / "resnet50_86016_fujitsu.yaml")

Start = Callable[[str, int], None]


def on_torch(name: str, workers: int) -> None:
    on_forked_workers(group_work.work, name, workers=workers)


def on_horovod(name: str, workers: int) -> None:
    launcher = Path(sysconfig.get_path("scripts"), "horovodrun")
    here = str(Path(largebatch.__file__).parents[1])
    done = subprocess.run(
        [launcher, "-np", str(workers), "--gloo", sys.executable, group_work.__file__, name],
        env=os.environ | {"PYTHONPATH": here, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


every_backend = pytest.mark.parametrize(
    "start",
    [
        pytest.param(on_torch, id="torch"),
        pytest.param(
            on_horovod,
            id="horovod",
            marks=[
                pytest.mark.long,
                pytest.mark.skipif(
                    importlib.util.find_spec("horovod") is None,
                    reason="horovod is not installed; launch/install_horovod.sh builds it",
                ),
            ],
        ),
    ],
)


@pytest.mark.long
@every_backend
def test_parts_of_four_workers_compute_together_and_compressed_sums_stay_finite(
    start: Start,
) -> None:
    names = "every_division parts_while_all_are_busy compressed_fp16"
    start(names if start is on_horovod else f"{names} compressed_bf16", 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "reduction.dtype=bf16",
            "reduction.dtype: bf16",
        ),
        (
            "protocol={kind: hardsync, learners: 1, servers: {centralised: 1}}",
            "protocol",
        ),
    ],
    ids=["bf16", "protocol"],
)
def test_a_protocol_that_horovod_cannot_run_is_refused_before_data_are_read(
    change: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(DIGITS, [change, "data.source=folder"])
    backend = Serial(torch.device("cpu"))
    backend.name = "horovod"
    monkeypatch.setattr("largebatch.runs.build.connect", lambda *_, **__: backend)
    with (
        pytest.raises(RecipeError, match=message),
        open_session(recipe, Options(out=tmp_path), {}),
    ):
        pass
    with pytest.raises(RecipeError, match=message):  # nor are workers started for it
        run(recipe, workers=2, backend="horovod", out=tmp_path)
