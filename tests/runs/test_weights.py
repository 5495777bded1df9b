"""Files of weights as other libraries write them."""

import argparse
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from largebatch.errors import CheckpointError
from largebatch.models import zoo
from largebatch.runs.weights import read_weights, state_for

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


@pytest.mark.parametrize("form", FORMS)
def test_a_pth_file_is_read_in_each_form(form: str, tmp_path: Path) -> None:
    torch.save(FORMS[form](state()), tmp_path / "theirs.pth")
    found = state_for(a_model(), read_weights(tmp_path / "theirs.pth"))
    expected = state()
    for name, value in found.items():
        torch.testing.assert_close(value.float(), expected[name].float(), rtol=1e-3, atol=1e-3)
    assert {name for name in expected if "num_batches" not in name} <= found.keys()


@pytest.mark.parametrize("prefix", ["", "module."])
def test_a_safetensors_file_is_read(prefix: str, tmp_path: Path) -> None:
    save_file(prefixed(prefix, state()), tmp_path / "theirs.safetensors")
    found = state_for(a_model(), read_weights(tmp_path / "theirs.safetensors"))
    torch.testing.assert_close(found, state(), rtol=0, atol=0)


def test_tensors_in_any_layout_are_read_and_those_without_numbers_refused(tmp_path: Path) -> None:
    """Expanded and strided ones have their values; integers are not taken for weights."""
    path, own = tmp_path / "theirs.pth", state()
    row = torch.arange(512.0)
    torch.save({**own, "fc.weight": row.expand(3, 512), "bn1.bias": row[:128:2]}, path)
    found = state_for(a_model(), read_weights(path))
    assert torch.equal(found["fc.weight"], torch.stack([row, row, row]))
    assert torch.equal(found["bn1.bias"], row[:128:2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
    for bad in (torch.ones(3, device="meta"), torch.ones(3).to_sparse(), nested):
        torch.save({**own, "fc.bias": bad}, path)
        with pytest.raises(CheckpointError, match=r"fc\.bias"):
            read_weights(path)
    for dtype in (torch.int8, torch.bool, torch.complex64):
        torch.save({**own, "fc.bias": torch.ones(3).to(dtype)}, path)
        with pytest.raises(CheckpointError, match=r"type \(fc\.bias"):
            state_for(a_model(), read_weights(path))


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
    with pytest.raises(CheckpointError, match=f": {message}$"):
        state_for(a_model(), read_weights(tmp_path / "theirs.pth"))


class Evil:
    """Would run code if a file were unpickled as it says."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return print, ("ran",)


def test_a_file_that_holds_no_weights_is_refused_and_nothing_in_it_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "theirs.pth"
    torch.save({"state_dict": Evil()}, path)
    with pytest.raises(CheckpointError, match="theirs.pth"):
        read_weights(path)
    assert "ran" not in capsys.readouterr().out
    path.write_text("model: resnet50")
    with pytest.raises(CheckpointError, match="theirs.pth: .*safetensors"):
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
    for name in ("absent.pth", "absent.safetensors"):
        with pytest.raises(CheckpointError, match=f"{name}: .*no such file"):
            read_weights(tmp_path / name)
    (tmp_path / "broken.safetensors").write_bytes(b"broken")
    with pytest.raises(CheckpointError, match="broken.safetensors"):
        read_weights(tmp_path / "broken.safetensors")
