"""Files of weights as other libraries write them: what is in them, and that all else stays."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from largebatch.errors import CheckpointError
from largebatch.models import zoo
from largebatch.runs.weights import check_new, read_weights

State = dict[str, Tensor]


def a_model() -> nn.Module:
    torch.manual_seed(0)
    return zoo.build("resnet10t", num_classes=3, arguments={})


def state() -> State:
    return {name: value.clone() for name, value in a_model().state_dict().items()}


def prefixed(prefix: str, content: State) -> State:
    return {prefix + name: value for name, value in content.items()}


def wrapped(content: State) -> State:
    return prefixed("module.", content)


FORMS: dict[str, Callable[[State], Any]] = {
    "bare": lambda content: content,
    "DataParallel": wrapped,
    "compiled": lambda content: prefixed("_orig_mod.", content),
    "timm": lambda content: {
        "epoch": 3,
        "arch": "resnet10t",
        "state_dict": content,
        "args": argparse.Namespace(lr=0.5),
        "state_dict_ema": {name: value + 1 for name, value in content.items()},
    },
    "torchvision": lambda content: {
        "model": content,
        "optimizer": {"state": {}, "param_groups": [{"lr": 0.5}]},
        "model_ema": {"n_averaged": torch.tensor(7), **wrapped(content)},
    },
    "PyTorch's tutorial": lambda content: {
        "model_state_dict": content,
        "optimizer_state_dict": {"state": {}, "param_groups": []},
        "loss": torch.tensor(0.5),
    },
    "pytorch-cifar": lambda content: {"net": wrapped(content), "acc": 91.5, "epoch": 3},
    "Lightning": lambda content: {"state_dict": prefixed("model.", content), "loops": {}},
    "without counters": lambda content: {
        name: value for name, value in content.items() if "num_batches" not in name
    },
    "half precision": lambda content: {
        name: value.half() if value.is_floating_point() else value
        for name, value in content.items()
    },
}


def flat(content: Any, prefix: str = "") -> dict[str, Any]:  # noqa: ANN401 -- any file
    """Return every leaf of nested dicts under its path."""
    if not isinstance(content, dict):
        return {prefix: content}
    return {
        path: leaf
        for key, below in content.items()
        for path, leaf in flat(below, f"{prefix}/{key}").items()
    }


def assert_only(changed: set[str], before: Any, after: Any) -> None:  # noqa: ANN401 -- any file
    ours, other = flat(before), flat(after)
    assert list(ours) == list(other)
    for path, value in ours.items():
        if isinstance(value, Tensor):
            assert value.dtype == other[path].dtype
            assert value.equal(other[path]) == (path not in changed), path
        else:
            assert value == other[path] or vars(value) == vars(other[path])


@pytest.mark.parametrize("form", FORMS)
def test_a_pth_file_keeps_its_form_and_all_but_what_was_replaced(form: str, tmp_path: Path) -> None:
    torch.save(FORMS[form](state()), tmp_path / "theirs.pth")
    weights = read_weights(tmp_path / "theirs.pth")
    model = a_model()
    model.load_state_dict(weights.state_for(model))
    weights.replace({"bn1.running_mean": torch.full((64,), 0.25)})
    weights.write(tmp_path / "ours.pth")
    before, after = (
        torch.load(tmp_path / name, weights_only=False) for name in ("theirs.pth", "ours.pth")
    )
    (changed,) = {
        p
        for p in flat(before)
        if p.endswith("bn1.running_mean") and "layer" not in p and "ema" not in p
    }
    assert_only({changed}, before, after)
    assert (flat(after)[changed] == 0.25).all()
    assert {path.name for path in tmp_path.iterdir()} == {"theirs.pth", "ours.pth"}


@pytest.mark.parametrize("form", ["timm", "torchvision"])
def test_the_moving_average_is_taken_where_it_is_asked_for(form: str, tmp_path: Path) -> None:
    torch.save(FORMS[form](state()), tmp_path / "theirs.pth")
    weights = read_weights(tmp_path / "theirs.pth", ema=True)
    found = weights.state_for(a_model())
    assert found["fc.bias"].equal(state()["fc.bias"] + (form == "timm"))
    weights.replace({"bn1.running_var": torch.zeros(64)})
    weights.write(tmp_path / "ours.pth")
    with torch.serialization.safe_globals([argparse.Namespace]):
        before, after = (torch.load(tmp_path / name) for name in ("theirs.pth", "ours.pth"))
    place = {"timm": "/state_dict_ema/", "torchvision": "/model_ema/module."}[form]
    assert_only({f"{place}bn1.running_var"}, before, after)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_safetensors_file_keeps_its_names_and_its_metadata(prefix: str, tmp_path: Path) -> None:
    metadata = {"format": "pt", "config": json.dumps({"epochs": 3})}
    theirs = {prefix + name: value for name, value in state().items()}
    save_file(theirs, tmp_path / "theirs.safetensors", metadata=metadata)
    weights = read_weights(tmp_path / "theirs.safetensors")
    weights.state_for(a_model())
    weights.replace({"bn1.running_mean": torch.ones(64)})
    weights.write(tmp_path / "ours.safetensors")
    with safe_open(tmp_path / "ours.safetensors", framework="pt") as file:
        assert file.metadata() == metadata
        ours = {key: file.get_tensor(key) for key in theirs}
        assert set(file.keys()) == set(theirs)
    assert_only({f"/{prefix}bn1.running_mean"}, theirs, ours)


def extra(content: State) -> State:
    return {**content, "head.weight": torch.zeros(1)}


def without_a_layer(content: State) -> State:
    return {name: value for name, value in content.items() if not name.startswith("layer2.0.conv")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(extra, r"1 not known \(head.weight\)", id="unknown"),
        pytest.param(
            without_a_layer,
            r"2 missing \(layer2.0.conv1.weight, layer2.0.conv2.weight\)",
            id="missing",
        ),
        pytest.param(
            lambda content: {**prefixed("student.", content), **prefixed("teacher.", content)},
            r"\d+ twice \(bn1.bias, .*",
            id="two networks",
        ),
        pytest.param(
            lambda content: {**content, "fc.weight": torch.zeros(10, 512)},
            r"1 of another shape \(fc.weight: 10 x 512, expected 3 x 512\)",
            id="shape",
        ),
    ],
)
def test_keys_that_do_not_fit_are_named(
    change: Callable[[State], State], message: str, tmp_path: Path
) -> None:
    torch.save(change(state()), tmp_path / "theirs.pth")
    with pytest.raises(CheckpointError, match=f"theirs.pth: the weights do not fit: {message}$"):
        read_weights(tmp_path / "theirs.pth").state_for(a_model())


class Evil:
    """Would run code if a file were unpickled as it says."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return print, ("ran",)


def test_a_file_that_holds_no_weights_is_refused_and_nothing_in_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "theirs.pth"
    torch.save({"state_dict": Evil()}, path)
    with pytest.raises(CheckpointError, match="theirs.pth: not a readable file of weights: "):
        read_weights(path)
    assert "ran" not in capsys.readouterr().out
    path.write_text("model: resnet50")
    with pytest.raises(CheckpointError, match="neither .pth nor .safetensors"):
        read_weights(path)
    for value, name in [(Evil(), "print"), (Path(), "pathlib.PosixPath"), (a_model(), "ResNet")]:
        torch.save({"state_dict": state(), "config": value}, path)
        with pytest.raises(CheckpointError, match=rf"theirs.pth: .*\b{name}"):
            read_weights(path)
    for content, message in [
        ({"epoch": 3, "best": 0.5}, "found epoch, best"),
        ({"model": state(), "net": state()}, "model and net"),
        ({}, "found nothing"),
        ({0: torch.zeros(3), None: 1}, "found 0, None"),
        ([torch.zeros(3)], "found nothing"),
        ({"model_ema": state()}, "found model_ema"),
    ]:
        torch.save(content, path)
        with pytest.raises(CheckpointError, match=message):
            read_weights(path)
    with pytest.raises(CheckpointError, match="expected weights of an EMA by name, under state"):
        read_weights(path.parent / _saved(tmp_path), ema=True)
    for name in ("absent.pth", "absent.safetensors"):
        with pytest.raises(CheckpointError, match=f"{name}: there is no such file of weights"):
            read_weights(tmp_path / name)
    (tmp_path / "broken.safetensors").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="broken.safetensors: not a readable file of weights"):
        read_weights(tmp_path / "broken.safetensors")


def _saved(folder: Path) -> str:
    torch.save(state(), folder / "bare.pth")
    return "bare.pth"


def test_a_result_replaces_nothing(tmp_path: Path) -> None:
    (tmp_path / "theirs.pth").touch()
    for out in ("theirs.pth", "nowhere/ours.pth"):
        with pytest.raises(CheckpointError, match=out.partition("/")[0]):
            check_new(tmp_path / out)
    check_new(tmp_path / "ours.safetensors")


def test_the_average_of_a_training_checkpoint_is_written_as_safetensors(tmp_path: Path) -> None:
    """Tensors that share memory, or are parts of others, too: safetensors takes none of these."""
    average = state() | {"tied": torch.arange(12.0).view(3, 4).T}
    average["tied too"] = average["tied"]
    torch.save({"state_dict_ema": average, "epoch": 3}, tmp_path / "last.pth.tar")
    read_weights(tmp_path / "last.pth.tar", ema=True).write(tmp_path / "ours.safetensors")
    torch.testing.assert_close(load_file(tmp_path / "ours.safetensors"), average, rtol=0, atol=0)
    again = read_weights(tmp_path / "ours.safetensors")
    assert again.metadata == {"format": "pt"}
    again.write(tmp_path / "again.pth")
    torch.testing.assert_close(torch.load(tmp_path / "again.pth"), average, rtol=0, atol=0)


def test_values_beyond_the_type_of_the_file_are_refused(tmp_path: Path) -> None:
    halves = {
        name: value.half() if value.is_floating_point() else value
        for name, value in state().items()
    }
    torch.save(halves, tmp_path / "theirs.pth")
    weights = read_weights(tmp_path / "theirs.pth")
    weights.state_for(a_model())
    with pytest.raises(CheckpointError, match="bn1.running_var has values beyond .*float16"):
        weights.replace({"bn1.running_var": torch.full((64,), 7e4)})
