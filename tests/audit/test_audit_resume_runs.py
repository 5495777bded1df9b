"""The four runs of `largebatch audit resume`: where scripts run, and commands that cannot be."""

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from on_forked_workers import on_forked_workers
from programs import output_of
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from largebatch.audit import audit
from largebatch.audit.resume import observing, running
from largebatch.audit.resume.running import Commands, Runs, observe, words_of
from largebatch.cli.main import USER, main
from largebatch.errors import DataError

LONG = pytest.mark.long

SCRIPT = """
import os
import sys
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

words = sys.argv[1:]
print("printed by", *words)
if "raises" in words:
    raise ValueError("of the script")
if "exits" in words:
    sys.exit(3)
torch.manual_seed(0)
data = TensorDataset(torch.randn(8, 4), torch.arange(8) % 2)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
epoch = 0
last = f"last-{os.environ.get('RANK', 0)}.pth"  # workers do not wait for each other
if "resume" in words:
    checkpoint = torch.load(last)
    model.load_state_dict(checkpoint["model"])
    epoch = checkpoint["epoch"]
while epoch < int(words[0]):
    for images, labels in DataLoader(data, 4):
        nn.functional.cross_entropy(model(images), labels).backward()
        if "idle" not in words:
            optimizer.step()
        optimizer.zero_grad()
    epoch += 1
    if "forgetful" not in words:
        torch.save({"model": model.state_dict(), "epoch": epoch}, last)
if "leaves" in words:
    os._exit(0)
sys.exit(75 if "pauses" in words else 0)
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A script whose runs are forked: starting Python takes longer than they do."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    monkeypatch.setattr(running, "_start", _fork)
    return str(path)


def _fork(command: Sequence[str], workers: int, _: Path) -> None:
    failure = on_forked_workers(_failure_in, [*command[2:]], workers=workers)
    if failure:
        raise DataError(failure)


def _failure_in(words: list[str]) -> str:
    try:
        observing.main(words)
    except DataError as error:
        return str(error)
    return ""


def observed(script: str, out: Path, whole: str, first: str, rest: str) -> Runs:
    whole, first, rest = (f"{script} {it}" for it in (whole, first, rest))
    commands = Commands(
        whole=words_of("whole", whole),
        first=words_of("first", first),
        rest=words_of("rest", rest),
    )
    return observe(commands, out)


def test_the_rest_runs_where_the_first_part_has_saved(script: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    runs = observed(script, out, "2", "1 pauses", "2 resume")
    assert [len(it[0].updates) for it in (runs.whole, runs.repeat, runs.first, runs.rest)] == [
        *(4, 4, 2, 2)
    ]
    assert runs.whole[0].updates == runs.repeat[0].updates
    assert runs.whole[0].updates[2].weights == runs.rest[0].updates[0].weights
    assert runs.rest[0].resumed_from == ("last-0.pth",)
    assert not runs.first[0].resumed_from
    assert runs.rest[0].end is not None
    assert runs.whole[0].end is not None
    assert runs.rest[0].end.weights == runs.whole[0].end.weights
    assert sorted(it.name for it in (out / "first" / "files").iterdir()) == ["last-0.pth"]
    log = (out / "rest" / "worker-0.log").read_text(encoding="utf-8")
    assert log == "printed by 2 resume\n"


@pytest.mark.parametrize(
    ("whole", "first", "rest", "named"),
    [
        pytest.param("2 raises", "1", "2 resume", "--whole.*ValueError", id="raises"),
        pytest.param("2 exits", "1", "2 resume", "--whole.*3", id="exits", marks=LONG),
        pytest.param("2 idle", "1", "2 resume", "--whole.*no update", id="no update"),
        pytest.param("1", "1 forgetful", "2 resume", "--first.*saved", id="saves", marks=LONG),
        pytest.param("1", "1", "1 forgetful", "--rest.*loaded nothing", id="loads nothing"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(
    whole: str, first: str, rest: str, named: str, script: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=named):
        observed(script, tmp_path / "out", whole, first, rest)


def test_a_failed_script_is_shown_by_its_last_lines(script: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        observed(script, tmp_path / "out", "1 raises", "1", "1")
    message = str(caught.value)
    assert "ValueError: of the script" in message.splitlines()[-2]
    log = Path(message.splitlines()[-1].rpartition(" ")[2])
    assert log.read_text(encoding="utf-8").startswith("printed by 1 raises\n")


@pytest.mark.long
def test_a_script_that_ends_its_process_has_a_record(script: str, tmp_path: Path) -> None:
    words = words_of("whole", f"{script} 2")
    assert running._run(tmp_path / "a", "whole", words, 1, 60)[0].end is not None
    folder = tmp_path / "b" / "whole"
    (folder / "files").mkdir(parents=True)
    with pytest.raises(FileNotFoundError):  # its process left without a result for the test
        _fork(["", "", "60", str(folder), str(folder / "files"), *words, "leaves"], 1, folder)
    (worker,) = running.read_run(folder)
    assert len(worker.updates) == 4
    assert worker.end is None


@pytest.mark.parametrize(
    ("command", "named"),
    [
        pytest.param("missing.py --epochs 2", "missing.py", id="missing script"),
        pytest.param("torchrun --nproc-per-node 2 train.py", "--workers", id="launcher"),
        pytest.param("-m largebatch_missing", "largebatch_missing", id="missing module"),
        pytest.param("train.py 'a", "quotes", id="quotes"),
        pytest.param("", "train.py", id="empty"),
    ],
)
def test_a_command_that_is_none_is_refused_at_once(
    command: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text("", encoding="utf-8")
    words = ["--whole", str(script), "--first", command, "--rest", str(script)]
    assert main(["audit", "resume", *words]) == USER
    message = capsys.readouterr().err
    assert "--first" in message
    assert named in message
    assert len(message.splitlines()) == 1


def test_words_are_those_behind_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "my train.py"
    script.write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    expected = [str(script), "--name", "a b"]
    assert words_of("whole", "python3.11 'my train.py' --name 'a b'") == expected
    assert words_of("whole", "'my train.py' --name 'a b'") == expected
    module = ["-m", "largebatch", "train", "digits_96"]
    assert words_of("whole", "-m largebatch train digits_96") == module


def test_records_of_an_earlier_audit_are_kept(script: str, tmp_path: Path) -> None:
    (tmp_path / "out" / "whole").mkdir(parents=True)
    with pytest.raises(DataError, match="--out"):
        observed(script, tmp_path / "out", "1", "1", "1")


@pytest.mark.parametrize(
    ("lost", "faults"),
    [
        pytest.param("", set(), id="all is loaded"),
        pytest.param("optimizer", {"optimizer state"}, id="not the optimizer"),
        pytest.param("generator", {"epoch order"}, id="not the generator", marks=pytest.mark.long),
    ],
)
def test_save_and_load_of_a_loop_are_audited_in_its_process(lost: str, faults: set[str]) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 6), torch.arange(32) % 3)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(data, 8, shuffle=True, generator=generator)

    def step(batch: tuple[Tensor, Tensor]) -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    def save() -> dict[str, Any]:
        states: dict[str, Any] = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        return states | {"generator": generator.get_state()}

    def load(checkpoint: dict[str, Any]) -> None:
        model.load_state_dict(checkpoint["model"])
        if lost != "optimizer":
            optimizer.load_state_dict(checkpoint["optimizer"])
        if lost != "generator":
            generator.set_state(checkpoint["generator"])

    before = copy.deepcopy(model.state_dict())
    findings = audit(model, loader, cross_entropy, optimizer, step, 2, save=save, load=load)
    assert {it.check for it in findings.faults} == faults
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert not optimizer.state
    assert generator.initial_seed() == 1
    assert generator.get_state().equal(torch.Generator().manual_seed(1).get_state())


def test_save_without_load_is_refused() -> None:
    model = nn.Linear(6, 3)
    findings = audit(model, [], cross_entropy, save=dict)
    assert not findings.is_compared
    assert any("load" in it.text for it in findings if it.level == "unknown")


SLEEPING = """
import time
time.sleep(1000)
"""


@pytest.mark.long
def test_a_script_that_does_nothing_for_long_is_ended(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SLEEPING, encoding="utf-8")
    with pytest.raises(DataError, match=r"(?s)--whole.*train.py"):
        running._run(tmp_path / "out", "whole", words_of("whole", str(script)), 1, 1)


@pytest.mark.long
def test_the_command_compares_runs_of_two_workers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    whole, first, rest = f"{script} 2", f"{script} 1", f"{script} 2 resume"
    command = [sys.executable, "-m", "largebatch", "audit", "resume", "--workers", "2"]
    out = tmp_path / "out"
    words = ["--whole", whole, "--first", first, "--rest", rest, "--out", str(out)]
    assert "the same training" in output_of(*command, *words, cwd=tmp_path)
    assert [it.rank for it in running.read_run(out / "rest")] == [0, 1]
