"""Labels, batches, inputs and outputs in the forms that data loaders and models have them."""

import contextlib
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from planted_parts import linear, perceptron, random_data, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from largebatch.audit import Findings, audit
from largebatch.audit.findings import Check

IMAGES, LABELS = random_data(64).tensors


def found(loader: Any, model: nn.Module | None = None, **words: Any) -> Findings:  # noqa: ANN401
    model = model or linear()
    arguments: dict[str, Any] = {"model": model, "loss_fn": cross_entropy, "optimizer": sgd(model)}
    with contextlib.redirect_stdout(io.StringIO()):
        return audit(loader=loader, **arguments | words)


def batches(labels: Tensor, count: int = 4) -> list[Any]:
    return list(zip(IMAGES.split(64 // count), labels.split(64 // count), strict=True))


def mappings() -> list[Any]:
    """Return batches as DALI's iterator for PyTorch has them."""
    labels = LABELS.int().unsqueeze(1)
    return [[{"data": images, "label": of_images}] for images, of_images in batches(labels)]


class Two(nn.Module):
    """A model of two inputs, that returns a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = perceptron()

    def forward(self, left: Tensor, *, right: Tensor) -> dict[str, Tensor]:
        return {"scores": self.layers(torch.cat([left, right], 1)), "inputs": left}


def of_two(model: Callable[..., Any], batch: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    images = batch["left"], batch["right"]
    return model(images[0], right=images[1])["scores"], batch["target"]


def two_inputs() -> list[dict[str, Tensor]]:
    return [
        {"left": images[:, :3], "right": images[:, 3:], "target": labels}
        for images, labels in batches(LABELS)
    ]


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        pytest.param(batches(LABELS.int()), {}, id="int32"),
        pytest.param(batches(LABELS.short().unsqueeze(1)), {}, id="int16, N x 1"),
        pytest.param(batches(LABELS.byte()), {}, id="uint8"),
        pytest.param(batches(LABELS.where(LABELS > 0, -100).int()), {}, id="ignored"),
        pytest.param(mappings(), {}, id="DALI"),
        pytest.param(batches(LABELS), {"model": linear().double()}, id="a model in float64"),
        pytest.param(
            batches(LABELS.unsqueeze(1)),
            {"loss_fn": lambda logits, labels: cross_entropy(logits, labels[:, 0])},
            id="a loss that takes N x 1",
        ),
        pytest.param(two_inputs(), {"model": Two(), "forward": of_two}, id="two inputs"),
    ],
)
def test_updates_are_compared(loader: Any, words: dict[str, Any]) -> None:  # noqa: ANN401
    findings = found(loader, **words)
    assert findings.ok, findings.table()
    assert not [it for it in findings if it.level == "unknown" and "gradient" in it.check]


def test_ignored_labels_of_any_type_do_not_count() -> None:
    labels = LABELS.where(LABELS > 0, -100).int()
    model = linear()
    optimizer = sgd(model)

    def step(
        batch: tuple[Tensor, Tensor],
    ) -> None:  # a mean of two means
        optimizer.zero_grad()
        for images, of_images in zip(*(it.split(16) for it in batch), strict=True):
            (cross_entropy(model(images), of_images.long()) / 2).backward()
        optimizer.step()

    counts = [int((it != -100).sum()) for it in labels.split(16)]
    assert len(set(counts[:2])) == 2
    findings = found(
        batches(labels, 2),
        model,
        optimizer=optimizer,
        step=step,
        loss_fn=lambda logits, labels: cross_entropy(logits, labels.long()),
        steps=1,
    )
    (direction,) = findings.named("gradient direction")
    other = linear()
    losses = cross_entropy(other(IMAGES[:32]), labels[:32].long(), reduction="none").split(16)
    means_of_losses = [it.sum() / count for it, count in zip(losses, counts, strict=False)]
    sums = torch.cat(losses).sum(), torch.stack(means_of_losses).sum()
    of_both = (torch.autograd.grad(it, other.weight, retain_graph=True)[0] for it in sums)
    exact, means = (it.flatten().double() for it in of_both)
    cosine = float(exact @ means / exact.norm() / means.norm())
    assert direction.figure == pytest.approx(cosine, rel=1e-5), findings.table()


@pytest.mark.parametrize(
    ("loader", "words", "check", "text"),
    [
        pytest.param(batches(LABELS + 1), {}, "gradient scale", "4 is out of bounds", id="labels"),
        pytest.param(
            two_inputs(), {}, "gradient scale", "keys left, right, target", id="two inputs"
        ),
        pytest.param(
            batches(LABELS),
            {"model": Two(), "forward": lambda model, it: model(it[0][:, :3], right=it[0][:, 3:])},
            "gradient scale",
            "dict",
            id="a mapping",
        ),
    ],
)
def test_what_cannot_be_compared_is_reported(
    loader: Any,  # noqa: ANN401
    words: dict[str, Any],
    check: Check,
    text: str,
) -> None:
    findings = found(loader, **words)
    unknown = [it for it in findings if it.level == "unknown" and it.check == check]
    assert not findings.faults
    assert [it for it in unknown if text in it.text], findings.table()
