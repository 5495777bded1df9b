"""The names of `largebatch`: what they are, how light they are, what their signatures show."""

import inspect
import pickle
import pydoc
import re
import subprocess
import sys
from importlib import import_module
from inspect import isfunction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import largebatch
from largebatch.recipe.section import Section
from largebatch.tracking.events import Summary


def test_the_package_is_imported_without_its_libraries_and_shows_its_names() -> None:
    program = "import sys, largebatch; print(*sys.modules, *dir(largebatch))"
    words = [sys.executable, "-c", program]
    shown = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "pydantic"} & {*shown}
    assert {*largebatch.__all__} <= {*shown}


@pytest.mark.parametrize("name", sorted({*largebatch.__all__} - {"LargebatchError", "__version__"}))
def test_a_name_is_a_function_or_class_whose_signature_has_plain_types(name: str) -> None:
    value = getattr(largebatch, name)
    assert callable(value)
    assert pickle.loads(pickle.dumps(value)) is value
    shown = str(inspect.signature(value))
    assert "Annotated" not in shown
    assert "pydantic" not in shown.lower()


def test_sections_of_a_recipe_have_plain_types_and_their_defaults() -> None:
    kinds: list[type] = [Section, Summary]
    for kind in kinds:
        kinds += kind.__subclasses__()
        shown = str(inspect.signature(kind))
        assert "Annotated" not in shown
        assert "FieldInfo" not in shown
    found = inspect.signature(largebatch.Recipe).parameters
    assert found["seed"].annotation is int
    assert found["seed"].default is inspect.Parameter.empty
    assert found["precision"].default == "fp32"


def test_every_function_of_the_reference_has_an_example() -> None:
    page = Path(__file__).parents[1] / "docs" / "reference" / "python.md"
    names = re.findall(r"^### (largebatch[\w.]*)\.(\w+)$", page.read_text("utf-8"), re.MULTILINE)
    places = [it for it in names if not it[0].startswith("largebatch.integrations")]
    functions = [getattr(import_module(module), name) for module, name in places]
    functions = [it for it in functions if isfunction(it)]
    assert len(functions) > 12
    for function in functions:
        assert ">>>" in (function.__doc__ or ""), function.__name__


def test_a_package_that_is_a_function_stays_a_package() -> None:
    import largebatch.polish as package
    from largebatch.polish import Drift, polish

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    batches = [torch.randn(4, 3, 8, 8)]
    called: Any = package
    assert called is largebatch.polish
    assert "every BatchNorm layer" in pydoc.render_doc(called)
    assert isinstance(called(model, batches), Drift)
    assert [it.mean_shift for it in polish(model, batches)] == pytest.approx([0], abs=1e-6)


@pytest.mark.parametrize("name", ["LARS", "LAMB", "Muon"])
def test_an_optimizer_trains_in_a_loop_of_ones_own(name: str) -> None:
    from largebatch.models import build, hidden_matrices, param_groups

    torch.manual_seed(0)
    model = build("lenet5", num_classes=10)
    make: Any = getattr(largebatch, name)
    if name == "Muon":
        matrices = hidden_matrices(model)
        others = [it for it in model.parameters() if it not in set(matrices)]
        optimizer = make(matrices, torch.optim.SGD(others, lr=0.01), lr=0.01)
    else:
        optimizer = make(param_groups(model, weight_decay=1e-4), lr=0.01)
    images, labels = torch.randn(20, 3, 28, 28), torch.arange(20) % 10
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


def test_results_are_tables_in_a_terminal_and_a_notebook(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm2d(4))
    drift: Any = largebatch.polish(model, [torch.randn(4, 3, 8, 8)], skip=["2"])
    assert [line.split()[0] for line in str(drift).splitlines()] == ["polished", "layer", "1", "2"]
    assert drift._repr_html_().count("<tr>") == 3
    changes = {"duration": {"steps": 4}, "schedule.warmup": {"steps": 1}, "polish": None}
    recipe: Any = largebatch.load_recipe("digits_96", {**changes, "name": "a"})
    assert "duration.steps 4" in re.sub(" +", " ", str(recipe))
    assert "<td>lars</td>" in recipe._repr_html_()
    summary = largebatch.run(recipe, out=tmp_path / "<run>")
    assert summary.folder == tmp_path / "<run>"
    assert str(summary).splitlines()[-1].startswith("train ")
    (summary.folder / "report.html").touch()
    assert str(tmp_path / "<run>" / "report.html") in str(summary)
    assert "&lt;run&gt;/report.html" in summary._repr_html_()
    assert "folder" not in (tmp_path / "<run>" / "summary.json").read_text("utf-8")
    assert "folder" not in (tmp_path / "<run>" / "log.jsonl").read_text("utf-8")
