"""`largebatch polish` on weights from elsewhere, from the command line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from plain_images import load, shuffled, training_files
from safetensors.torch import load_file, save_file
from torch import Tensor

from largebatch.cli.main import DONE, USER, main
from largebatch.data.datasets import digits
from largebatch.models import zoo
from largebatch.optional import require_timm, require_torchvision

IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
SMALL = ["--set", "data.image_size=16", "--set", "data.eval_resize=null", "--samples", "320"]


@pytest.fixture(scope="module")
def images() -> str:
    return str(digits.write_digits())


def saved(path: Path, *, model: str = "resnet10t") -> dict[str, Tensor]:
    """Write a model with fresh weights as its file and return them.

    A .pth file has them under a key and named by DataParallel, and a moving average beside them,
    which is twice as large.
    """
    torch.manual_seed(0)
    state = zoo.build(model, num_classes=10, arguments={}).state_dict()
    if path.suffix == ".pth":
        wrapped = {f"module.{name}": value for name, value in state.items()}
        averaged = {name: 2 * value for name, value in wrapped.items()}
        number = {"n_averaged": torch.tensor(3)}
        torch.save({"model": wrapped, "model_ema": averaged | number}, path)
    else:
        save_file(state, path, metadata={"format": "pt"})
    return dict(state)


@pytest.mark.parametrize(
    ("kind", "model", "ema"),
    [
        (".pth", "torchvision/resnet18", []),
        (".pth", "torchvision/resnet18", ["--ema"]),
        (".safetensors", "resnet10t", []),
    ],
)
def test_only_running_statistics_change_and_they_are_those_of_the_images(
    model: str,
    kind: str,
    ema: list[str],
    tmp_path: Path,
    images: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The first layer's are computed here from the convolution of the images themselves."""
    theirs, ours = tmp_path / f"theirs{kind}", tmp_path / "ours.safetensors"
    before = saved(theirs, model=model)
    if ema:
        before = {name: 2 * value for name, value in before.items()}
    words = ["--model", model, "--weights", str(theirs), "--data", images, "--out", str(ours)]
    assert main(["polish", *words, *ema, *SMALL]) == DONE
    assert "off by up to" in capsys.readouterr().out
    after = load_file(ours)
    changed = {name for name in before if not after[name].equal(before[name])}
    assert changed == {name for name in before if "running_" in name}
    if model == "torchvision/resnet18":
        files = training_files(Path(images))
        order = shuffled(len(files), seed=0)[:320]
        inputs, _ = load([files[row] for row in order], colours=IMAGENET, size=16)
        net = zoo.build(model, num_classes=10, arguments={})
        net.load_state_dict(before)
        conv = net.get_submodule("conv1")(inputs).double()
        mean, var = conv.mean((0, 2, 3)), conv.transpose(0, 1).flatten(1).var(1)
        torch.testing.assert_close(after["bn1.running_mean"].double(), mean, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(after["bn1.running_var"].double(), var, rtol=1e-4, atol=1e-5)


def test_weights_of_another_program_are_evaluated_and_used(
    tmp_path: Path, images: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By timm's and torchvision's own transform; without images the file has ten classes."""
    timm = require_timm()
    theirs = tmp_path / "theirs.pth"
    model = timm.create_model("resnet10t", num_classes=10)
    model.load_state_dict(saved(theirs))
    shown = timm.data.create_transform(
        **timm.data.resolve_data_config(pretrained_cfg=model.pretrained_cfg)
    )
    files = sorted(Path(images).glob("val/*/*"))[::60]
    pixels = torch.stack([shown(Image.open(file).convert("RGB")) for file in files])
    with torch.no_grad():
        expected = model.eval()(pixels).softmax(1)
    words = [str(theirs), "--model", "resnet10t"]
    assert main(["predict", *words, *map(str, files), "--top", "1"]) == DONE
    rows = capsys.readouterr().out.splitlines()[1:]
    values = [float(row.split(",")[2]) for row in rows]
    assert values == pytest.approx(expected.max(1).values.tolist(), abs=2e-3)
    assert {row.split(",")[1] for row in rows} <= set(map(str, range(10)))
    changes = ("image_size=16", "eval_resize=null", "interpolation=bilinear")
    small = [word for change in changes for word in ("--set", f"data.{change}")]
    assert main(["evaluate", *words, "--data", images, "--json", *small]) == DONE
    result = json.loads(capsys.readouterr().out)
    inputs, labels = load(sorted(Path(images).glob("val/*/*")), colours=IMAGENET, size=16)
    with torch.no_grad():
        scores = model(inputs)
    assert result["top1"] == (scores.argmax(1) == labels).double().mean().item()
    assert result["loss"] == pytest.approx(float(F.cross_entropy(scores, labels)), rel=1e-4)
    for command in ("evaluate", "predict", "polish", "export"):
        more = {"predict": [str(files[0])], "evaluate": []}.get(command, ["--out", "x.safetensors"])
        assert main([command, str(theirs), *more]) == USER
        message = capsys.readouterr().err
        assert "version" not in message
        assert ("--model" in message) == (command != "export")
        assert message.count("\n") == 1


def test_images_are_prepared_as_the_library_does() -> None:
    require_torchvision()
    import timm
    from torchvision import models

    model = timm.create_model("resnet50.tv_in1k")
    data: Any = timm.data
    theirs = data.create_transform(**data.resolve_model_data_config(model))
    ours = zoo.preparation("resnet50.tv_in1k")
    assert (theirs.transforms[0].size, theirs.transforms[1].size) == (256, (224, 224))
    assert (ours["eval_resize"], ours["image_size"]) == (256, 224)
    assert ours["interpolation"] == theirs.transforms[0].interpolation.value == "bilinear"
    assert zoo.preparation("resnet50")["eval_resize"] == 235  # crop_pct 0.95
    transform = models.get_model_weights("inception_v3").DEFAULT.transforms()
    found = zoo.preparation("torchvision/inception_v3")
    sizes = (transform.crop_size[0], transform.resize_size[0])
    assert (found["image_size"], found["eval_resize"]) == sizes == (299, 342)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "resnt18"], "timm has no model 'resnt18'; did you mean 'resnet18"),
        (["--model", "resnet26"], "the weights do not fit: "),
        (["--model", "vit_tiny_patch16_224"], "vit_tiny_patch16_224 has no BatchNorm"),
        (["--model", "resnet10t", "--set", "data.size=9"], "data.size: unknown key"),
        (["--model", "resnet10t", "--out", "ours.pth"], "ours.pth: expected the name of a file"),
        (["--model", "resnet10t", "--out", "other.safetensors"], "exists already"),
        (["--model", "resnet10t", "--weights", "other.safetensors", "--ema"], "no EMA"),
        ([], "pass a checkpoint, or --model NAME --weights FILE"),
        (["--model", "resnet10t", "--weights", "mixed.pth"], "int8"),
        (["--model", "resnet10t", "--weights", "bad.pth"], "fc.weight"),
    ],
)
def test_a_mistake_is_one_message_and_no_file(
    words: list[str],
    message: str,
    tmp_path: Path,
    images: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    saved(Path("theirs.pth"))
    weights = saved(Path("other.safetensors"))
    torch.save({**weights, "fc.bias": torch.ones(10, dtype=torch.int8)}, "mixed.pth")
    torch.save({**weights, "fc.weight": torch.full((10, 512), torch.nan)}, "bad.pth")
    given = [*(["--weights", "theirs.pth"] * ("--weights" not in words)), *words]
    out = [] if "--out" in words else ["--out", "ours.safetensors"]
    assert main(["polish", "--data", images, *given, *out]) == USER
    assert message in capsys.readouterr().err
    there = {"theirs.pth", "other.safetensors", "mixed.pth", "bad.pth"}
    assert {path.name for path in tmp_path.iterdir()} == there
