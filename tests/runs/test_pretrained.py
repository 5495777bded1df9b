"""`largebatch polish` on weights from elsewhere, and --compare, from the command line."""

from pathlib import Path
from typing import Any

import pytest
import torch
from plain_images import load, shuffled, training_files
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from largebatch.cli.main import DONE, USER, main
from largebatch.data.datasets import digits
from largebatch.distributed.serial import Serial
from largebatch.models import zoo
from largebatch.optional import require_torchvision
from largebatch.runs.options import Options
from largebatch.runs.pretrained import fit_model
from largebatch.runs.weights import read_weights

IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
DIGITS = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"
SMALL = ["--set", "data.image_size=16", "--set", "data.eval_resize=null", "--samples", "320"]


@pytest.fixture(scope="module")
def images() -> str:
    return str(digits.write_digits())


def saved(path: Path, *, model: str = "resnet10t", classes: int = 10) -> dict[str, Tensor]:
    """Write a model with fresh weights as its file and return them."""
    torch.manual_seed(0)
    state = zoo.build(model, num_classes=classes, arguments={}).state_dict()
    if path.suffix == ".pth":
        torch.save({"model": {f"module.{name}": value for name, value in state.items()}}, path)
    else:
        save_file(state, path, metadata={"format": "pt"})
    return dict(state)


def largest_shift(before: dict[str, Tensor], after: dict[str, Tensor]) -> str:
    """Return the beginning of the line that polishing prints, from the two files."""
    shifts = {}
    for name, mean in before.items():
        layer, _, key = name.rpartition(".")
        if key == "running_mean":
            std = (before[f"{layer}.running_var"].double() + 1e-5).sqrt()
            shift = (after[name].double() - mean) / std
            shifts[layer] = shift.square().mean().sqrt().item()
    worst = max(shifts, key=shifts.__getitem__)
    return f"off by up to {shifts[worst]:.2g} standard deviations (layer {worst}) and"


def loaded(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".pth":
        wrapped = torch.load(path)["model"]
        return {name.removeprefix("module."): value for name, value in wrapped.items()}
    return load_file(path)


@pytest.mark.parametrize(
    ("kind", "model"),
    [(".pth", "torchvision/resnet18"), (".safetensors", "resnet10t")],
)
def test_only_running_statistics_change_and_they_are_those_of_the_images(
    model: str, kind: str, tmp_path: Path, images: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first layer's are computed here from the convolution of the images themselves."""
    theirs, ours = tmp_path / f"theirs{kind}", tmp_path / f"ours{kind}"
    before = saved(theirs, model=model)
    words = ["--model", model, "--weights", str(theirs), "--data", images, "--out", str(ours)]
    assert main(["polish", *words, *SMALL]) == DONE
    first = capsys.readouterr().out.splitlines()[0]
    after = loaded(ours)
    assert largest_shift(before, after) in first
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


def test_the_model_that_fits_is_found_in_either_library(tmp_path: Path, images: str) -> None:
    """efficientnet_b0 is in both, and they call its parts by other names."""
    for name in ("efficientnet_b0", "torchvision/efficientnet_b0"):
        path = tmp_path / f"{name.replace('/', '-')}.pth"
        torch.save(zoo.build(name, num_classes=10, arguments={}).state_dict(), path)
        options = Options(out=Path(), data=Path(images))
        names, backend = zoo.same_name("efficientnet_b0"), Serial(torch.device("cpu"))
        recipe, _ = fit_model(names, read_weights(path), options, backend)
        assert recipe.model.name == name
    assert (recipe.data.image_size, recipe.data.eval_resize) == (224, 256)
    assert recipe.data.interpolation == "bicubic"


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
    assert (
        (found["image_size"], found["eval_resize"])
        == (299, 342)
        == (
            transform.crop_size[0],
            transform.resize_size[0],
        )
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--model", "resnt18", "--out", "x.safetensors"],
            "timm has no model 'resnt18'; did you mean 'resnet18",
        ),
        (["--model", "resnet26"], "the weights do not fit: "),
        (["--model", "vit_tiny_patch16_224"], "vit_tiny_patch16_224 has no BatchNorm statistics"),
        (["--model", "resnet10t", "--set", "data.size=9"], "data.size: unknown key"),
        (["--model", "resnet10t", "--out", "theirs.pth"], "theirs.pth: exists already"),
        (["--model", "resnet10t", "--ema"], "expected weights of an EMA by name"),
        ([], "--model and --weights go together"),
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
    out = [] if "--out" in words else ["--out", "ours.pth"]
    assert main(["polish", "--weights", "theirs.pth", "--data", images, *words, *out]) == USER
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["theirs.pth"]


def test_statistics_that_were_never_finite_are_named(
    tmp_path: Path, images: str, capsys: pytest.CaptureFixture[str]
) -> None:
    state = saved(tmp_path / "theirs.safetensors")
    state["layer2.0.bn1.running_mean"][0] = torch.nan
    save_file(state, tmp_path / "theirs.safetensors")
    words = ["--model", "resnet10t", "--weights", str(tmp_path / "theirs.safetensors")]
    out = ["--out", str(tmp_path / "ours.safetensors")]
    assert main(["polish", *words, *SMALL, "--data", images, *out]) == DONE
    shown = capsys.readouterr().out
    assert shown.startswith("statistics were not finite (layer layer2.0.bn1); top-1 ")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "nothing to polish"),
        (["run"], "--out"),
        (["run", "--out", "x", "--lr", "1"], "--lr"),
        (["run", "--compare", "--epochs", "0"], "--epochs"),
        (["--model", "resnet18", "--weights", "b", "--compare"], "--compare is for a checkpoint"),
        (["--model", "resnet18", "--weights", "b", "--out", "x"], "b: "),
    ],
)
def test_words_that_do_not_go_together_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["polish", *words]) == USER
    assert message in capsys.readouterr().err


def test_a_model_with_auxiliary_classifiers_is_polished(tmp_path: Path, images: str) -> None:
    class Auxiliary(nn.Module):
        aux_logits = True

        def __init__(self) -> None:
            super().__init__()
            self.main = nn.Sequential(nn.Conv2d(3, 10, 3), nn.BatchNorm2d(10), nn.Flatten(2))
            self.head, self.side = nn.Linear(10, 10), nn.BatchNorm1d(10)

        def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            logits: Tensor = self.head(self.main(images).mean(2))
            return (logits, self.side(logits)) if self.training else logits

    torch.save(Auxiliary().state_dict(), tmp_path / "theirs.pth")
    words = ["--model", "resnet10t", "--weights", str(tmp_path / "theirs.pth"), "--data", images]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(zoo, "build", lambda *_, **__: Auxiliary())
        assert main(["polish", *words, *SMALL, "--out", str(tmp_path / "ours.pth")]) == DONE
    after = torch.load(tmp_path / "ours.pth")
    assert after["main.1.running_mean"].any()
    assert not after["side.running_mean"].any()
