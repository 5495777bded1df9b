"""Cases with torchvision run in processes of their own: torch's registry cannot be cleaned up."""

import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from largebatch import optional
from largebatch.optional import require_timm

IMPORT_TWICE = """
import torch
from largebatch import optional

try:
    import torchvision
    print("the bare import works")
except RuntimeError as error:
    print("the bare import fails:", error)

torchvision = optional.require_torchvision()
assert optional.require_torchvision() is torchvision is __import__("torchvision")
print("declared" if optional._declare_operators.cache_info().currsize else "nothing declared")
"""


BROKEN = "from torchvision import registrations"

REGISTRATIONS = """
import torch

@torch.library.register_fake("torchvision::nms")
def nms(*args):
    return args[0]
"""


def output_of(code: str, *, path: Path | None = None) -> str:
    first = f"import sys; sys.path.insert(0, {str(path)!r})\n" if path else ""
    done = subprocess.run(
        [sys.executable, "-c", first + code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def write_torchvision(folder: Path, init: str) -> Path:
    package = folder / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(init)
    (package / "registrations.py").write_text(REGISTRATIONS)
    return folder


@pytest.mark.long
def test_the_installed_torchvision_and_timm_import_and_work() -> None:
    code = """
import timm
from torchvision.transforms import functional
model = timm.create_model("resnet18", num_classes=7)
print(tuple(model(torch.zeros(2, 3, 32, 32)).shape))
"""
    bare, declared, shape = output_of(IMPORT_TWICE + code).splitlines()
    assert shape == "(2, 7)"
    if bare == "the bare import works":
        assert declared == "nothing declared"
    else:
        assert "operator torchvision::nms does not exist" in bare
        assert declared == "declared"


def test_missing_operators_are_declared(tmp_path: Path) -> None:
    bare, declared = output_of(IMPORT_TWICE, path=write_torchvision(tmp_path, BROKEN)).splitlines()
    assert bare == "the bare import fails: operator torchvision::nms does not exist"
    assert declared == "declared"


@pytest.mark.parametrize("before", [{}, {"wandb": ModuleType("wandb")}], ids=["new", "imported"])
def test_timm_is_imported_without_wandb_which_can_be_imported_after_it(
    before: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[object] = []

    def imports_wandb(name: str, *_: object, **__: object) -> ModuleType:
        try:
            found.append(importlib.import_module("wandb"))
        except ImportError:
            found.append(None)
        return ModuleType(name)

    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    for name, module in before.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(optional, "require_torchvision", lambda: None)
    monkeypatch.setattr(optional, "_import", imports_wandb)
    require_timm()
    assert found == [before.get("wandb")]
    assert sys.modules.get("wandb") is before.get("wandb")
    assert ("wandb" in sys.modules) == bool(before)
