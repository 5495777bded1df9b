"""Every file of docs/examples runs with the command in its first lines."""

import re
import sys
import sysconfig
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest
import torch
from programs import output_of

from largebatch.audit.findings import Check
from largebatch.rules import Level

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"
SUPPORT = Path(__file__).parent / "support"


def alone(example: str) -> str:
    """Run an example in one process; return what it prints."""
    return output_of(sys.executable, str(SUPPORT / "with_torchvision.py"), str(EXAMPLES / example))


def on_torchrun(example: str) -> str:
    """Run an example on two workers, at most three times; return what it prints.

    Gloo's threads sometimes abort the exit of a Python process, without this package too: they free
    the tensors of the last exchange while the interpreter ends.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for attempts_left in (2, 1, 0):
        try:
            return output_of(*torchrun, str(EXAMPLES / example))
        except AssertionError as error:
            if not attempts_left or "terminate called without" not in str(error):
                raise
    raise AssertionError("not reached")


def on_horovodrun(example: str) -> str:
    """Run an example on two workers of Horovod; return what they print."""
    pytest.importorskip("horovod.torch", reason="run launch/install_horovod.sh")
    horovodrun = Path(sysconfig.get_path("scripts"), "horovodrun")
    script = [sys.executable, str(EXAMPLES / example)]
    printed = output_of(str(horovodrun), "-np", "2", "--gloo", *script)
    return re.sub(r"^\[\d\]<stdout>:", "", printed, flags=re.MULTILINE)  # the worker's number


def has_learned(printed: str) -> None:
    match = re.search(r"top-1 .*%, polished (.*)% of 360 images", printed)
    assert match is not None
    assert float(match[1]) > 80


def has_equal_weights(printed: str) -> None:
    sums = dict(re.findall(r"worker (\d): (\d+\.\d{12})", printed))
    assert sums.keys() == {"0", "1"}
    assert sums["0"] == sums["1"]


def has_no_fault(printed: str) -> None:
    """Nothing is unknown but what needs more arguments."""
    assert "audit: no fault" in printed
    assert re.findall(r"^unknown +(.*?)  ", printed, re.MULTILINE) == ["not examined"]


def gains_by_polishing(printed: str) -> None:
    match = re.search(r"top-1 of the average (.*)%, polished (.*)%", printed)
    assert match is not None
    assert float(match[1]) < 80
    assert float(match[2]) > 85


def is_audited_and_gains(printed: str) -> None:
    has_no_fault(printed)
    gains_by_polishing(printed)


def is_audited_and_learns(printed: str) -> None:
    has_no_fault(printed)
    (top1,) = re.findall("polished: top-1 (.*)%", printed)
    assert float(top1) > 85


def finds_what_its_page_shows(printed: str) -> None:
    has_no_fault(printed)
    page = (EXAMPLES.parent / "audit.md").read_text(encoding="utf-8")
    shown = page.split("```text\n")[1].split("```")[0]
    assert rows(shown) == rows(printed)


def rows(text: str) -> list[tuple[str, str]]:
    """Return level and check of each finding in a table of an audit."""
    levels = "|".join(get_args(Level))
    checks = "|".join(get_args(Check))
    return re.findall(rf"^({levels}) +({checks}) ", text, re.MULTILINE)


LONG = pytest.mark.long
RUNS = [
    pytest.param("audit_ddp.py", on_torchrun, finds_what_its_page_shows, marks=LONG),
    pytest.param("averaged_ddp.py", on_torchrun, gains_by_polishing, marks=LONG),
    pytest.param("audit_horovod.py", on_horovodrun, has_no_fault, marks=LONG),
    pytest.param("audit_timm.py", on_torchrun, has_no_fault, marks=LONG),
    pytest.param("ddp.py", on_torchrun, has_learned, marks=LONG),
    pytest.param("lightning_module.py", alone, is_audited_and_learns, marks=LONG),
    pytest.param("loop_accelerate.py", on_torchrun, is_audited_and_gains, marks=LONG),
    pytest.param("reducer.py", on_horovodrun, has_equal_weights, marks=LONG),
    pytest.param("reducer.py", on_torchrun, has_equal_weights, marks=LONG),
    pytest.param("transformers_trainer.py", alone, is_audited_and_learns, marks=LONG),
]
"""Examples, how each is started, and what it must print."""

NEEDS = {
    "lightning_module.py": "lightning",
    "loop_accelerate.py": "accelerate",
    "transformers_trainer.py": "transformers",
}
"""Libraries of other examples than ours, which `make test` does not install."""


@pytest.mark.parametrize(("example", "start", "check"), RUNS)
def test_an_example_runs(
    example: str, start: Callable[[str], str], check: Callable[[str], None]
) -> None:
    if example in NEEDS and find_spec(NEEDS[example]) is None:
        pytest.skip(f"pip install {NEEDS[example]}")
    check(start(example))


@LONG
def test_timms_training_script_gets_lars_and_spans() -> None:
    """The example `timm_script.py`, with a script that makes its parts as timm's own does."""
    script = str(SUPPORT / "timm_train.py")
    command = [str(EXAMPLES / "timm_script.py"), script, "--opt", "larsreference"]
    printed = output_of(sys.executable, *command)
    assert printed.split() == ["largebatch.optim.lars", "4", "True"]


@LONG
def test_averaged_weights_of_timms_training_script_are_polished(tmp_path: Path) -> None:
    """The example `averaged_timm.py`; nothing but running statistics changes."""
    script = str(SUPPORT / "timm_checkpoint.py")
    prelude = str(SUPPORT / "with_torchvision.py")
    output_of(sys.executable, prelude, script, cwd=tmp_path)
    command = [str(EXAMPLES / "averaged_timm.py"), "resnet10t", "checkpoint-0.pth.tar", "images"]
    printed = output_of(sys.executable, *command, cwd=tmp_path)
    (polished,) = re.findall(r"top-1 of the average .*%, polished (.*)%", printed)
    assert float(polished) > 85
    before = torch.load(tmp_path / "checkpoint-0.pth.tar", weights_only=False)["state_dict_ema"]
    after = torch.load(tmp_path / "polished.pth")
    changed = {name for name, value in after.items() if not value.equal(before[name])}
    assert changed == {name for name in after if name.endswith(("running_mean", "running_var"))}


def test_there_is_a_test_for_every_example() -> None:
    run = {getattr(case, "values", case)[0] for case in RUNS}
    assert {path.name for path in EXAMPLES.glob("*.py")} == run | {
        "timm_script.py",
        "averaged_timm.py",
    }


def programs_of(page: str) -> dict[str, str]:
    """Return the first Python block behind each link to a program that a page explains."""
    text = (EXAMPLES.parent / page).read_text(encoding="utf-8")
    _, *parts = re.split(r"\(examples/(\w+\.py)\)", text)
    return {
        name: part.split("```python\n")[1].split("```")[0]
        for name, part in zip(parts[::2], parts[1::2], strict=True)
    }


def test_the_page_on_audits_has_the_command_of_each_program() -> None:
    page = (EXAMPLES.parent / "audit.md").read_text(encoding="utf-8")
    for name in programs_of("audit.md"):
        path = EXAMPLES / name
        command = path.read_text(encoding="utf-8").splitlines()[2]
        command = re.split(", or |; ", command)[0]
        assert command.endswith(path.name)
        assert f"`{command}`:\n" in page


def code_of(block: str) -> set[str]:
    """Return the lines of a program without indentation and comments."""
    return {line.split("  # ")[0].strip() for line in block.splitlines()} - {""}


@pytest.mark.parametrize(
    ("page", "start"), [("final-polishing.md", "averaged_"), ("audit.md", "audit_")]
)
def test_the_lines_of_a_page_are_those_of_its_programs(page: str, start: str) -> None:
    programs = programs_of(page)
    assert programs.keys() > {path.name for path in EXAMPLES.glob(f"{start}*.py")}
    for name, shown in programs.items():
        assert code_of(shown) <= code_of((EXAMPLES / name).read_text(encoding="utf-8")), name
