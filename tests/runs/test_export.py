"""What `export` writes, loaded by timm."""

import re
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from PIL import Image
from short_runs import DIGITS, weights
from torch import Tensor

from largebatch import load_recipe, run
from largebatch.cli.main import DONE, USER, main
from largebatch.errors import CheckpointError
from largebatch.models import build
from largebatch.optional import require_timm
from largebatch.runs.checkpoints import evaluate_checkpoint, find_checkpoint
from largebatch.runs.export import export, timm_config
from largebatch.runs.options import Options
from largebatch.runs.predict import predict
from largebatch.training.checkpoint import write_checkpoint

NARROW = {"stem_width": 8, "channels": [8, 8, 16, 16]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of timm's ResNet and one of our own, each polished, by the model's name."""
    folder = tmp_path_factory.mktemp("trained")
    short = ["duration={steps: 3}", "schedule.warmup={steps: 1}", "polish.clean={steps: 1}"]
    models = {
        "resnet10t": [f"model={{name: resnet10t, arguments: {NARROW}}}", "data.image_size=32"],
        "cifar_resnet8": ["model={name: cifar_resnet8}", "data.image_size=16"],
    }
    for name, changes in models.items():
        changes += [f"data.eval_resize={36 if name == 'resnet10t' else 19}"]
        run(load_recipe(DIGITS, [*short, *changes]), out=folder / name)
    return {name: folder / name for name in models}


def logits(folder: Path, model: torch.nn.Module, images: Tensor) -> Tensor:
    """What the weights of the run's checkpoint give."""
    model.load_state_dict(weights(folder))
    with torch.no_grad():
        return model.eval()(images)  # type: ignore[no-any-return]  # a module's


def test_timm_loads_the_model_and_prepares_images_alike(
    trained: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(trained["resnet10t"]), "--out", str(tmp_path / "out")]) == DONE
    names = ["README.md", "config.json", "model.safetensors", "recipe.yaml"]
    assert capsys.readouterr().out.split() == [str(tmp_path / "out" / name) for name in names]
    timm = require_timm()
    model = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True)
    images = torch.randn(4, 3, 32, 32)
    plain = build("resnet10t", num_classes=10, arguments=NARROW)
    expected = logits(trained["resnet10t"], plain, images)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(images), expected, rtol=0, atol=0)
    found: dict[str, Any] = timm.data.resolve_data_config(pretrained_cfg=model.pretrained_cfg)
    assert tuple(found["input_size"]) == (3, 32, 32)
    assert (found["crop_pct"], found["crop_mode"]) == (pytest.approx(32 / 36, abs=1e-3), "center")
    recipe = load_recipe(trained["resnet10t"] / "recipe.yaml")
    assert (tuple(found["mean"]), tuple(found["std"])) == (recipe.data.mean, recipe.data.std)
    assert list(model.pretrained_cfg["label_names"]) == [str(digit) for digit in range(10)]


@pytest.mark.parametrize(("size", "resize"), [(224, 256), (192, 225), (32, 36), (64, 93)])
def test_timm_resizes_as_the_recipe_does(size: int, resize: int) -> None:
    data = {"data.image_size": size, "data.eval_resize": resize}
    recipe = load_recipe(DIGITS, [f"{key}={value}" for key, value in data.items()])
    found: Any = timm_config(recipe.model, recipe.data, [])["pretrained_cfg"]
    shown = require_timm().data.create_transform(
        **{key: found[key] for key in ("input_size", "crop_pct", "crop_mode", "interpolation")}
    )
    assert (shown.transforms[0].size, tuple(shown.transforms[1].size)) == (resize, (size, size))


def test_tensors_of_another_shape_are_refused_in_one_line(
    trained: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = find_checkpoint(trained["resnet10t"])[1]
    model = {**checkpoint.state["model"], "fc.bias": torch.zeros(3)}
    path = write_checkpoint(
        tmp_path, replace(checkpoint, state={**checkpoint.state, "model": model})
    )
    assert main(["export", str(path), "--out", str(tmp_path / "out")]) == USER
    shown = capsys.readouterr().err
    assert shown.startswith(f"largebatch: {path}: does not fit")
    assert shown.count("\n") == 1


def test_a_model_of_ours_is_its_weights_and_its_recipe(
    trained: dict[str, Path], tmp_path: Path
) -> None:
    out, folder = tmp_path / "out", trained["cifar_resnet8"]
    assert main(["export", str(folder), "--out", str(out)]) == DONE
    assert {path.name for path in out.iterdir()} == {
        "README.md",
        "model.safetensors",
        "recipe.yaml",
    }
    found = safetensors.torch.load_file(out / "model.safetensors")
    torch.testing.assert_close(found, weights(folder), rtol=0, atol=0)


@pytest.mark.long
def test_onnx_gives_the_same_logits_for_any_number_of_images(
    trained: dict[str, Path], tmp_path: Path
) -> None:
    """Computed by the reference implementation of the ONNX package."""
    pytest.importorskip("onnx", reason="onnx is not installed: pip install 'largebatch[onnx]'")
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    from onnx.reference import ReferenceEvaluator

    out, folder = tmp_path / "out", trained["cifar_resnet8"]
    assert main(["export", str(folder), "--out", str(out), "--onnx"]) == DONE
    session = ReferenceEvaluator(str(out / "model.onnx"))
    for number in (1, 3):
        images = torch.randn(number, 3, 16, 16)
        (found,) = session.run(None, {"images": images.numpy()})
        expected = logits(folder, build("cifar_resnet8", num_classes=10), images)
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["resnet10t", "cifar_resnet8"])
def test_the_lines_of_the_card_predict_as_the_package_does(
    name: str, trained: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    export(trained[name], tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    photo = tmp_path / "out/photo.jpg"
    Image.effect_noise((81, 60), 100).save(photo)
    with chdir(tmp_path / "out"):
        exec(code, {})
    (best, *_) = capsys.readouterr().out.splitlines()
    expected = predict(trained[name], [photo])
    probability, label = expected.probabilities[0].max(0)
    found, percent = best.removesuffix("%").split(": ")
    assert found == expected.classes[int(label)]
    assert float(percent) == pytest.approx(100 * probability.item(), abs=0.02)


@pytest.mark.parametrize("name", ["resnet10t", "cifar_resnet8"])
def test_an_export_is_evaluated_and_used_and_polished_like_its_run(
    name: str, trained: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder, and the file in it; what is polished has the statistics of a polished run."""
    out, polished = tmp_path / "out", tmp_path / "polished.safetensors"
    export(trained[name], out)
    photo = tmp_path / "photo.png"
    Image.effect_noise((40, 30), 100).save(photo)
    expected = predict(trained[name], [photo])
    evaluated = evaluate_checkpoint(trained[name], Options())
    for place in (out, out / "model.safetensors"):
        found = predict(place, [photo])
        assert torch.equal(found.probabilities, expected.probabilities)
        assert found.classes == expected.classes
        again = evaluate_checkpoint(place, Options())
        assert (again.metrics, again.step) == (evaluated.metrics, None)
        with pytest.raises(CheckpointError, match="an export already"):
            export(place, tmp_path / "again")
    assert main(["polish", str(out), "--out", str(polished), "--samples", "320"]) == DONE
    run_of_it = ["--out", str(tmp_path / "run"), "--samples", "320"]
    assert main(["polish", str(trained[name]), *run_of_it]) == DONE
    found_weights = safetensors.torch.load_file(polished)
    torch.testing.assert_close(found_weights, weights(tmp_path / "run"), rtol=0, atol=0)
    capsys.readouterr()
    words = [str(polished), "--out", str(tmp_path / "again.safetensors")]
    assert main(["polish", *words]) == USER
    assert "--model" in capsys.readouterr().err
    assert main(["resume", str(out)]) == USER
    assert sorted(path.name for path in out.iterdir() if path.suffix == ".jsonl") == []


def test_an_export_without_finite_scores_fails_and_its_class_names_need_not_fit(
    trained: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1e300 is finite in float64 only; the root of a negative variance is no number."""
    out, photo = tmp_path / "out", tmp_path / "photo.png"
    export(trained["cifar_resnet8"], out)
    Image.effect_noise((40, 30), 100).save(photo)
    path = out / "model.safetensors"
    good = safetensors.torch.load_file(path)
    variance = next(name for name in good if name.endswith("running_var"))
    weight = next(name for name in good if name.endswith("conv1.weight"))
    for name, bad in {variance: -good[variance] - 1, weight: good[weight].double() + 1e300}.items():
        safetensors.torch.save_file({**good, name: bad}, path)
        for words in (["evaluate", str(out)], ["predict", str(out), str(photo)]):
            assert main(words) == USER
            assert "not finite" in capsys.readouterr().err
    for names in ('["one"]', "[" * 100_000):  # of another number of classes, of a stranger
        safetensors.torch.save_file(good, path, metadata={"classes": names})
        assert predict(out, [photo]).classes == [str(label) for label in range(10)]


def test_nothing_is_overwritten(
    trained: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.txt").write_text("x")
    assert main(["export", str(trained["cifar_resnet8"]), "--out", str(tmp_path)]) == USER
    assert "already holds files" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
