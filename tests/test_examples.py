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
PRELUDE = """
import runpy, sys
from largebatch.optional import require_torchvision
require_torchvision()  # where it was built for another torch, other libraries cannot import it
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
MAKE_CHECKPOINT = """
import numpy, timm, torch
from pathlib import Path
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.utils import CheckpointSaver, ModelEmaV3

torch.manual_seed(0)
draw = numpy.random.default_rng(0)
pixels = draw.integers(0, 100, (48, 64, 64, 3), dtype=numpy.uint8)
labels = torch.arange(48) % 2
pixels[1::2, :, :, 0] += 100
for number, image in enumerate(pixels):
    folder = Path("images", "train" if number < 32 else "val", "ab"[number % 2])
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(folder / f"{number}.png")
mean, std = map(torch.tensor, (IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD))
images = ((torch.from_numpy(pixels) / 255 - mean) / std).permute(0, 3, 1, 2)
model = timm.create_model("resnet10t", num_classes=2)
ema = ModelEmaV3(model, decay=0.8, exclude_buffers=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for _ in range(15):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(images[:32]), labels[:32]).backward()
    optimizer.step()
    ema.update(model)
CheckpointSaver(model, optimizer, model_ema=ema, checkpoint_dir=".").save_checkpoint(0)
"""
TRAIN_PY = """
import sys
import timm, torch
from timm.optim import create_optimizer_v2

assert sys.argv[1:] == ["--opt", "larsreference"], sys.argv
model = timm.create_model("with_span", of="resnet10t", span=4, num_classes=3)
optimizer = create_optimizer_v2(model, opt=sys.argv[2], lr=0.1, weight_decay=1e-4, momentum=0.9)
adapted, plain = (
    {id(w) for group in optimizer.param_groups if group["adapt"] == on for w in group["params"]}
    for on in (True, False)
)
assert {id(w) for w in model.parameters() if w.ndim > 1} == adapted
assert {id(w) for w in model.parameters() if w.ndim == 1} == plain
before = model.bn1.running_mean.clone()
model(torch.randn(8, 3, 64, 64)).sum().backward()
optimizer.step()
moved = bool((model.bn1.running_mean != before).any())
print(type(optimizer).__mro__[1].__module__, model.bn1.span, moved)
"""


def on_torchrun(name: str) -> str:
    """Run an example on two workers, at most three times.

    Gloo's threads sometimes abort the exit of a Python process, without this package too: they free
    the tensors of the last exchange while the interpreter ends.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    for _ in range(2):
        try:
            return output_of(*torchrun, "--nproc-per-node=2", str(EXAMPLES / name))
        except AssertionError as error:
            if "terminate called without an active exception" not in str(error):
                raise
    return output_of(*torchrun, "--nproc-per-node=2", str(EXAMPLES / name))


def test_there_is_a_test_for_every_example() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f'"{path.name}"' in text


@pytest.mark.long
def test_the_example_with_distributed_data_parallel_runs() -> None:
    found = re.search(r"top-1 .*%, polished (.*)% of 360 images", on_torchrun("ddp.py"))
    assert found is not None
    assert float(found[1]) > 80


def same_weights(printed: str) -> bool:
    sums = dict(re.findall(r"worker (\d): (\d+\.\d{12})", printed))
    return sums.keys() == {"0", "1"} and sums["0"] == sums["1"]


def has_no_fault(printed: str) -> bool:
    unknown = re.findall(r"^unknown +(.*?)  ", printed, re.MULTILINE)
    return "audit: no fault" in printed and unknown == ["not examined"]  # needs more arguments


@pytest.mark.long
@pytest.mark.parametrize(
    ("example", "is_right"), [("reducer.py", same_weights), ("audit_timm.py", has_no_fault)]
)
def test_an_example_is_right_with_torchrun(example: str, is_right: Callable[[str], bool]) -> None:
    assert is_right(on_torchrun(example))


@pytest.mark.long
@pytest.mark.parametrize(
    ("example", "is_right"), [("reducer.py", same_weights), ("audit_horovod.py", has_no_fault)]
)
def test_an_example_is_right_with_horovod(example: str, is_right: Callable[[str], bool]) -> None:
    pytest.importorskip(
        "horovod.torch", reason="horovod is not installed; run launch/install_horovod.sh"
    )
    horovodrun = str(Path(sysconfig.get_path("scripts"), "horovodrun"))
    words = ["-np", "2", "--gloo", sys.executable, str(EXAMPLES / example)]
    assert is_right(output_of(horovodrun, *words))


@pytest.mark.long
def test_timms_training_script_gets_lars_and_spans(tmp_path: Path) -> None:
    """A script that makes model and optimizer as timm's does; that one is in no package."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN_PY, encoding="utf-8")
    words = [str(EXAMPLES / "timm_script.py"), str(script), "--opt", "larsreference"]
    found = output_of(sys.executable, *words)
    assert found.split() == ["largebatch.optim.lars", "4", "True"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("library", "example"),
    [
        pytest.param("lightning", "lightning_module.py", id="lightning"),
        pytest.param("transformers", "transformers_trainer.py", id="transformers"),
    ],
)
def test_a_trainer_is_audited_and_its_average_polished(library: str, example: str) -> None:
    if find_spec(library) is None:
        pytest.skip(f"no {library}: pip install {library}")
    found = output_of(sys.executable, "-c", PRELUDE, str(EXAMPLES / example))
    assert has_no_fault(found)
    (top1,) = re.findall("polished: top-1 (.*)%", found)
    assert float(top1) > 85


def gain(printed: str) -> tuple[float, float]:
    """Return top-1 of an average, as left and polished, in percent."""
    ((left, polished),) = re.findall(r"top-1 of the average (.*)%, polished (.*)%", printed)
    return float(left), float(polished)


def test_averaged_weights_of_distributed_data_parallel_are_polished() -> None:
    left, polished = gain(on_torchrun("averaged_ddp.py"))
    assert left < 80
    assert polished > 85


@pytest.mark.long
@pytest.mark.skipif(find_spec("accelerate") is None, reason="no Accelerate: pip install accelerate")
def test_a_loop_of_accelerate_is_audited_and_its_average_polished() -> None:
    found = on_torchrun("loop_accelerate.py")
    assert has_no_fault(found)
    left, polished = gain(found)
    assert left < 80
    assert polished > 85


@pytest.mark.long
def test_averaged_weights_of_timms_training_script_are_polished(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(MAKE_CHECKPOINT, encoding="utf-8")
    output_of(sys.executable, "-c", PRELUDE, str(script), cwd=tmp_path)
    example = str(EXAMPLES / "averaged_timm.py")
    words = [example, "resnet10t", "checkpoint-0.pth.tar", "images"]
    _, polished = gain(output_of(sys.executable, *words, cwd=tmp_path))
    assert polished > 85
    before = torch.load(tmp_path / "checkpoint-0.pth.tar", weights_only=False)["state_dict_ema"]
    after = torch.load(tmp_path / "polished.pth")
    changed = {name for name, value in after.items() if not value.equal(before[name])}
    assert changed == {name for name in after if name.endswith(("running_mean", "running_var"))}


def rows(text: str) -> list[tuple[str, str]]:
    """Return level and check of each finding in a table of an audit."""
    names = "|".join(get_args(Check))
    found = re.findall(rf"^({'|'.join(get_args(Level))}) +({names}) ", text, re.MULTILINE)
    return [(level, check) for level, check in found]


def test_an_audit_of_distributed_data_parallel_finds_what_its_page_shows() -> None:
    printed = on_torchrun("audit_ddp.py")
    assert has_no_fault(printed)
    page = (EXAMPLES.parent / "audit.md").read_text(encoding="utf-8")
    shown = page.split("```text\n")[1].split("```")[0]
    assert rows(shown) == rows(printed)


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
