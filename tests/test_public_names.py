"""The names of `largebatch`: what they are, how light they are, what their signatures show."""

import inspect
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import largebatch
from largebatch.recipe.section import Section


def test_the_package_is_imported_without_its_libraries_and_shows_its_names() -> None:
    program = (
        "import sys, largebatch; names = dir(largebatch); "
        "assert not {'torch', 'numpy', 'pydantic'} & sys.modules.keys(); "
        "from largebatch import polish; polish([], [])"
    )
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "TypeError: polish takes a model first" in done.stderr
    assert set(largebatch.__all__) <= set(dir(largebatch))


@pytest.mark.parametrize("name", sorted({*largebatch.__all__} - {"LargebatchError", "__version__"}))
def test_a_name_is_a_function_or_class_whose_signature_has_plain_types(name: str) -> None:
    value = getattr(largebatch, name)
    assert callable(value)
    assert pickle.loads(pickle.dumps(value)) is value
    shown = str(inspect.signature(value))
    assert "Annotated" not in shown
    assert "pydantic" not in shown.lower()


def test_sections_of_a_recipe_have_plain_types_and_their_defaults() -> None:
    kinds = [Section]
    for kind in kinds:
        kinds += kind.__subclasses__()
        shown = str(inspect.signature(kind))
        assert "Annotated" not in shown
    found = inspect.signature(largebatch.Recipe).parameters
    assert found["seed"].annotation is int
    assert found["seed"].default is inspect.Parameter.empty
    assert found["precision"].default == "fp32"


def test_a_package_that_is_a_function_stays_a_package() -> None:
    import largebatch.polish as package
    from largebatch.polish import Drift, polish

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    batches = [torch.randn(4, 3, 8, 8)]
    called: Any = package
    assert called is largebatch.polish
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
