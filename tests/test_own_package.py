"""The package of docs/own-package.md adds one part of each kind, and its commands work.

It is installed as pip does it, without pip: its modules and its metadata are on the path.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import pytest
from documents import DOCS, blocks

import largebatch
from largebatch.cli.main import DONE, USER
from largebatch.registry import PREFIX, Group
from largebatch.report.run import read_run

PAGE = DOCS / "own-package.md"
PROJECT = tomllib.loads(blocks(PAGE, "toml")[0].text)["project"]

EVERY = """
import sys
from largebatch.cli.main import main
code = main(sys.argv[1:])
assert "torch" not in sys.modules, "torch was imported"
sys.exit(code)
"""
"""A command that must not import torch."""

IN_TURN = """
import json
import sys
from largebatch.cli.main import main
sys.exit(max(main(words) for words in json.loads(sys.argv[1])))
"""
"""Several commands."""


def install(site: Path, name: str, points: dict[str, dict[str, str]]) -> None:
    """Write the metadata of a package with these entry points."""
    folder = site / f"{name}-1.0.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    groups = (
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in entries.items())
        for group, entries in points.items()
    )
    (folder / "entry_points.txt").write_text("\n".join(groups))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Return a folder with the page's recipe, and its package in the folder `site`."""
    package = tmp_path / "site" / "extras"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name, block in zip(("sections", "parts"), blocks(PAGE, "python"), strict=True):
        (package / f"{name}.py").write_text(block.text)
    install(tmp_path / "site", PROJECT["name"], PROJECT["entry-points"])
    (tmp_path / "all.yaml").write_text(blocks(PAGE, "yaml")[0].text)
    return tmp_path


def call(place: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a program in the folder, with its packages installed."""
    paths = [str(Path(largebatch.__file__).parents[1]), str(place / "site")]
    environment = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words],
        cwd=place,
        env=os.environ | environment | {"CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def write(place: Path, name: str, *changes: str) -> str:
    """Write the page's recipe with changes; return the name of its file."""
    text = (place / "all.yaml").read_text()
    for change in changes:
        before, _, after = change.partition(" -> ")
        assert before in text
        text = text.replace(before, after)
    (place / name).write_text(text)
    return name


def check(place: Path, *changes: str) -> subprocess.CompletedProcess[str]:
    """Check the page's recipe with changes, without torch."""
    return call(place, "-c", EVERY, "check", write(place, "changed.yaml", *changes))


def problems(place: Path, *variants: Sequence[str]) -> list[str]:
    """Check variants of the page's recipe in one process; return what each is refused for.

    An empty text is a recipe without a problem.
    """
    names = [write(place, f"{number}.yaml", *changes) for number, changes in enumerate(variants)]
    done = call(place, "-c", EVERY, "check", *names)
    parts = re.split(r"^(?:largebatch: )?(\d+\.yaml): ", done.stderr, flags=re.MULTILINE)
    texts = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert done.stdout.splitlines() == [f"{name}: ok" for name in names if name not in texts]
    assert done.returncode == (USER if texts else DONE)
    return [texts.get(name, "") for name in names]


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_the_page_has_a_part_of_every_group() -> None:
    assert {*PROJECT["entry-points"]} == {PREFIX + group for group in get_args(Group)}


def test_a_run_on_two_workers_is_resumed_with_every_part(place: Path) -> None:
    """Resumed on one worker, without the start of others; the protocol has one learner too."""
    commands = [line for block in blocks(PAGE, "sh") for line in block.commands]
    resumed = [f"{command} --workers 1" for command in commands if "resume" in command]
    careful = [
        command.replace("--workers 2", "--workers 1").replace("learners: 2", "learners: 1")
        for command in commands
        if "protocol" in command
    ]
    assert resumed
    assert careful
    for command in commands[:3]:
        done = call(place, "-m", *shlex.split(command))
        assert done.returncode == DONE, done.stdout + done.stderr
        if "explain" in command:
            assert "sign" in done.stdout
    words = [shlex.split(command)[1:] for command in (*resumed, *careful)]
    done = call(place, "-c", IN_TURN, json.dumps(words))
    assert done.returncode == DONE, done.stdout + done.stderr
    runs = place / "runs"
    summary = json.loads((runs / "all" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["steps"] == 12
    assert summary["versions"]["extras"] == "1.0"
    assert [stage["name"] for stage in summary["stages"]] == ["train", "shrink", "statistics"]
    log = log_of(runs / "all")
    steps = [event for event in log if event["event"] == "step"]
    assert [step["step"] for step in steps] == [*range(12)]
    assert steps[0]["lr"] == 0.02
    assert steps[3]["lr"] == pytest.approx(0.02 / 4**0.25)
    assert all(step["measured"]["weights.largest"] > 0 for step in steps)
    kinds = (runs / "all" / "lines.txt").read_text().split()
    assert kinds == [event["event"] for event in log]
    saved = (runs / "all" / "recipe.yaml").read_text()
    assert all(word in saved for word in ("sign", "root", "shrink", "negative", "tiny", "lines"))
    page = (runs / "all" / "report.html").read_text()
    assert all(word in page for word in ("shrink", "weights.largest"))
    assert [stage.name for stage in read_run(runs / "all").polishing] == ["shrink", "statistics"]
    careful = [event["lr"] for event in log_of(runs / "careful") if event["event"] == "step"]
    assert len(careful) == 3


def test_recipes_are_checked_with_the_keys_of_the_package(place: Path) -> None:
    right, wrong, other, twice = problems(
        place,
        (),
        ("weight_decay: 0.01 -> weight_decay: -1", "power: -> pwer:"),
        ("factor: 0.5 -> factor: 2", "tracking: -> optimizr: 1\ntracking:"),
        ("[{kind: shrink -> [{kind: shrink, factor: 1.0}, {kind: shrink",),
    )
    assert not right
    assert "optimizer.weight_decay" in wrong
    assert "schedule.decay.pwer: unknown key; did you mean 'power'?" in wrong
    assert "polish.others.0.factor: input should be less than" in other
    assert "polish: others: each stage can run once" in twice


def test_a_part_of_no_installed_package_is_named(place: Path) -> None:
    missing = {
        "optimizer.kind": "kind: sign -> kind: sgn",
        "schedule.decay.kind": "kind: root -> kind: branch",
        "polish.others.0.kind": "kind: shrink -> kind: grow",
        "execution.decoder": "negative -> positive",
        "monitor.0": "[weights] -> [lengths]",
        "tracking.trackers.0": "[lines] -> [pages]",
    }
    texts = problems(place, *((change,) for change in missing.values()))
    for (key, change), text in zip(missing.items(), texts, strict=True):
        name = change.rsplit(maxsplit=1)[-1].strip("[]")
        assert key in text
        assert repr(name) in text or json.dumps(name) in text


def test_a_broken_package_stops_only_recipes_that_name_it(place: Path) -> None:
    broken = {"largebatch.optimizers": {"lost": "nowhere:Lost", "wrong": "json:loads"}}
    install(place / "site", "broken", broken)
    sign = "kind: sign, weight_decay: 0.01"
    right, lost, wrong = problems(
        place, (), (f"{sign} -> kind: lost",), (f"{sign} -> kind: wrong",)
    )
    assert not right
    assert "nowhere:Lost of broken 1.0 cannot be loaded: ModuleNotFoundError" in lost
    assert lost.count("\n") == 2
    assert "must be a subclass of largebatch.recipe.optimizers.Optimizer" in wrong
    sections = place / "site" / "extras" / "sections.py"
    sections.write_text(sections.read_text().replace("sections:build_root", "lost:build_root"))
    done = check(place)
    assert "extras.lost:build_root of extras cannot be loaded: ModuleNotFound" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_name_of_two_packages_is_refused_with_both(place: Path) -> None:
    rivals = {
        "optimizers": ("sign",),
        "trackers": ("lines", "wandb"),
        "schedules": ("cosine",),
    }
    points = {
        f"largebatch.{group}": dict.fromkeys(names, "extras.sections:Sign")
        for group, names in rivals.items()
    }
    install(place / "site", "rival", points)
    constant = "{kind: root, power: 0.25} -> {kind: constant}"
    cosine = "{kind: root, power: 0.25} -> {kind: cosine}"
    wandb = "tracking: [lines] -> tracking: [wandb]"
    lars = "kind: sign, weight_decay: 0.01 -> kind: lars"
    untracked = "tracking: [lines]\n -> "
    others, *refused = problems(
        place,
        (constant, lars, untracked),
        (constant, untracked),
        (constant, lars),
        (cosine, lars, untracked),
        (constant, lars, wandb),
    )
    assert not others
    owners = ("extras 1.0", "extras 1.0", "largebatch", "largebatch")
    for text, name, owner in zip(
        refused, ("sign", "lines", "cosine", "wandb"), owners, strict=True
    ):
        assert repr(name) in text
        assert owner in text
        assert "rival 1.0" in text


@pytest.mark.parametrize(
    ("before", "after", "key"),
    [
        ("    power: Positive = 0.5", "    power: memoryview", "schedule.decay.kind"),
        ('    builder: ClassVar = "extras.parts:build_sign"\n', "", "optimizer.kind"),
        ('Literal["sign"]', 'Literal["sgn"]', "optimizer.kind"),
    ],
)
def test_a_wrong_section_is_one_line_in_recipes_that_name_it(
    place: Path, before: str, after: str, key: str
) -> None:
    sections = place / "site" / "extras" / "sections.py"
    text = sections.read_text()
    assert before in text
    sections.write_text(text.replace(before, after))
    done = call(place, "-c", EVERY, "check", "all.yaml", "digits_96")
    assert done.returncode == USER
    assert key in done.stderr
    assert "extras.sections." in done.stderr
    assert done.stderr.count("\n") == 2
    assert done.stdout == "digits_96: ok\n"


def test_a_policy_can_refuse_what_other_sections_have(place: Path) -> None:
    sections = place / "site" / "extras" / "sections.py"
    conflict = "    def conflicts(self, recipe):\n        yield f'root: seed {recipe.seed}'\n\n\n"
    text = sections.read_text()
    sections.write_text(text.replace("def build_root", f"{conflict}def build_root"))
    done = check(place)
    assert done.returncode == USER
    assert "root: seed 1" in done.stderr


def test_an_optimizer_can_wrap_another(place: Path) -> None:
    sections = place / "site" / "extras" / "sections.py"
    field = "\n\nclass Sign(Optimizer):\n    inner: Optimizer | None = None\n"
    sections.write_text(sections.read_text().replace("\n\nclass Sign(Optimizer):\n", field))
    change = (
        "kind: sign, weight_decay: 0.01 -> kind: sign, inner: {kind: sign, inner: {kind: lars}}"
    )
    assert check(place, change).returncode == DONE
    done = call(place, "-m", "largebatch", "explain", "optimizer.inner")
    assert done.returncode == DONE, done.stderr
    assert "sign" in done.stdout
