"""Mapped files that are truncated: an error message, not a process killed by SIGBUS."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from largebatch.cli.main import USER

PROGRAM = """
import os, sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from largebatch.data.pipeline import open_images
from largebatch.distributed.serial import Serial
from largebatch.errors import DataError
from largebatch.recipe.loading import load_recipe
from largebatch.recipe.arithmetic.plan import make_plan

jobs, submit = [], ThreadPoolExecutor.submit

def note(*job):
    jobs.append(submit(*job))
    return jobs[-1]

ThreadPoolExecutor.submit = note
recipe = load_recipe("digits_96", sys.argv[2:])
pipeline = open_images(recipe, make_plan(recipe, workers=1), Serial(), folder=None)
opened = {"train": pipeline.training(range(200), clean=False), "val": pipeline.validation()}
for batches in opened.values():
    next(batches)
wait(jobs)  # a thread that reads mapped pages at this moment would be killed by a signal
for path in Path(os.environ["XDG_CACHE_HOME"]).rglob(sys.argv[1]):
    os.truncate(path, 0)
try:
    for batch in opened["train"]:
        pass
except DataError as error:
    print(error)
    sys.exit(2)
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("file", "changes"),
    [
        pytest.param(".largebatch-train.index", [], id="index"),
        pytest.param("*.pixels", ["execution.cache=memory"], id="pixels"),
    ],
)
def test_a_file_truncated_during_use_is_named(
    tmp_path: Path, file: str, changes: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, file, *changes],
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == USER, done.stderr
    assert "it has 0 of its " in done.stdout
    assert file.strip("*") in done.stdout
