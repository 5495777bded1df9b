"""What a script does wrong itself is reported in one line, on all workers, and it goes on."""

import contextlib
import gc
import io
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from on_forked_workers import on_forked_workers
from planted_parts import Divided, apart, divided, linear, perceptron, random_data, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings, audit
from largebatch.audit.findings import Check, Level
from largebatch.audit.ranks import Ranks
from largebatch.errors import PeerLostError

Result = list[tuple[Check, Level, str]]


def on_two(makes: list[Callable[[], dict[str, Any]]]) -> list[Result]:
    """Audit scripts one after another; return the findings of each, equal on both workers."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    results = []
    for make in makes:
        findings = findings_of(make)
        everyone: list[Any] = [None, None]
        dist.all_gather_object(everyone, findings)  # the script goes on
        assert everyone[0] == everyone[1]
        assert all(it.remedy for it in findings if it.level == "unknown")
        results.append([(it.check, it.level, it.text) for it in findings])
    gc.collect()
    dist.destroy_process_group()
    return results


def findings_of(make: Callable[[], dict[str, Any]]) -> Findings:
    """Audit a script, whose model is freed before its process group ends."""
    torch.manual_seed(0)
    with contextlib.redirect_stdout(io.StringIO()):
        return audit(**make())


def batches() -> Divided:
    return divided(random_data(), 16, shuffle=False)


def script(**changes: Any) -> dict[str, Any]:  # noqa: ANN401 -- arguments of `audit`
    model = changes.pop("model", None) or DistributedDataParallel(perceptron())
    optimizer = sgd(model) if list(model.parameters()) else None
    words = {"model": model, "loader": batches(), "loss_fn": cross_entropy, "optimizer": optimizer}
    return words | changes


def loader_that_fails_on_worker_1() -> dict[str, Any]:
    class Loader:
        def __iter__(self) -> Iterator[list[Tensor]]:
            yield from list(batches())[:1]
            if dist.get_rank() == 1:
                raise OSError("truncated file")
            yield from batches()

    return script(loader=Loader())


def an_iterator() -> dict[str, Any]:
    return script(loader=iter(batches()))


def sharded_inside() -> dict[str, Any]:
    return script(model=nn.Sequential(DistributedDataParallel(perceptron())))


def another_loss_in_the_step() -> dict[str, Any]:
    model = DistributedDataParallel(perceptron())
    optimizer = sgd(model)

    def step(batch: list[Tensor]) -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), (batch[1] + 1) % 4).backward()
        optimizer.step()

    return script(model=model, optimizer=optimizer, step=step)


def weights_in_the_loss() -> dict[str, Any]:
    model = DistributedDataParallel(perceptron())
    optimizer = sgd(model)

    def step(batch: list[Tensor]) -> None:
        optimizer.zero_grad()
        decay = sum(it.square().sum() for it in model.parameters())
        (cross_entropy(model(batch[0]), batch[1]) + 0.01 * decay).backward()
        optimizer.step()

    return script(model=model, optimizer=optimizer, step=step)


def clipping_that_is_not_seen() -> dict[str, Any]:
    model = DistributedDataParallel(perceptron())
    optimizer = sgd(model)

    def step(batch: list[Tensor]) -> None:
        optimizer.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        gradients = [it.grad for it in model.parameters() if it.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        torch._foreach_mul_(gradients, 0.1 / norm)
        optimizer.step()

    return script(model=model, optimizer=optimizer, step=step)


def model_in_evaluation_mode() -> dict[str, Any]:
    return script(model=DistributedDataParallel(perceptron()).eval())


def no_update() -> dict[str, Any]:
    return script(step=lambda _: None)


def step_that_fails_on_worker_1_before_its_update() -> dict[str, Any]:
    model = DistributedDataParallel(perceptron())
    optimizer = sgd(model)

    def step(batch: list[Tensor]) -> None:
        cross_entropy(model(batch[0]), batch[1]).backward()
        if dist.get_rank() == 1:
            raise RuntimeError("disk is full")
        optimizer.step()

    return script(model=model, optimizer=optimizer, step=step)


def update_with_a_closure() -> dict[str, Any]:
    model = DistributedDataParallel(perceptron())
    optimizer = sgd(model)

    def step(batch: list[Tensor]) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            loss = cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            return float(loss)

        optimizer.step(closure)

    return script(model=model, optimizer=optimizer, step=step)


def master_weights() -> dict[str, Any]:
    model = DistributedDataParallel(perceptron())
    weights = list(model.parameters())
    masters = [it.detach().clone().requires_grad_() for it in weights]
    optimizer = torch.optim.SGD(masters, lr=0.1)

    def step(batch: list[Tensor]) -> None:
        model.zero_grad()
        cross_entropy(model(batch[0]), batch[1]).backward()
        for weight, master in zip(weights, masters, strict=True):
            master.grad = weight.grad
        optimizer.step()
        for weight, master in zip(weights, masters, strict=True):
            weight.data.copy_(master)

    return script(model=model, optimizer=optimizer, step=step)


def no_steps() -> dict[str, Any]:
    return script(steps=0)


UNKNOWN = {
    loader_that_fails_on_worker_1: "the loader failed on worker 1: OSError: truncated file",
    an_iterator: "the loader is an iterator, whose batches would be lost",
    sharded_inside: "layer 0 is a DistributedDataParallel, whose forward pass waits",
    another_loss_in_the_step: "the step's loss is not loss_fn (cosine ",
    weights_in_the_loss: "equal on all workers, most in ",
    clipping_that_is_not_seen: ": a factor 0.3",
    model_in_evaluation_mode: "no forward pass of the model in training mode was seen",
    no_update: "no update in 192 calls of step",
    step_that_fails_on_worker_1_before_its_update: "step failed on worker 1: RuntimeError: disk is",
    update_with_a_closure: "no forward pass of the model in training mode was seen",
    master_weights: "0 of 4 tensors of the model: what it changes is copied into the model",
    no_steps: "steps is 0; expected a whole number of updates",
}
"""Scripts that cannot be checked, or in part, and words of the finding that says so."""


@pytest.fixture(scope="module")
def unknown() -> dict[Callable[[], dict[str, Any]], Result]:
    return dict(zip(UNKNOWN, on_forked_workers(on_two, list(UNKNOWN), workers=2), strict=True))


@pytest.mark.parametrize("make", UNKNOWN)
def test_what_cannot_be_checked_is_said_in_one_line(
    make: Callable[[], dict[str, Any]], unknown: dict[Callable[[], dict[str, Any]], Result]
) -> None:
    texts = [text for _, level, text in unknown[make] if level == "unknown"]
    assert [text for text in texts if UNKNOWN[make] in text] == texts[:1]
    assert "\n" not in "".join(texts)
    assert not [text for _, level, text in unknown[make] if level == "fault"]


def loader_without_a_length() -> dict[str, Any]:
    class Loader:
        def __iter__(self) -> Iterator[list[Tensor]]:
            yield from batches()

    return script(loader=Loader(), optimizer=None)


def optimizer_within_the_step() -> dict[str, Any]:
    model = DistributedDataParallel(linear())
    optimizer = sgd(model)

    def step(batch: list[Tensor]) -> None:
        for images, labels in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return script(model=model, loader=apart(dist.get_rank()), optimizer=None, step=step)


def loss_of_the_page() -> dict[str, Any]:
    """Return a script whose step has the weights in its loss, and the loss of the page for it."""
    model = DistributedDataParallel(perceptron())
    optimizer = sgd(model)
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
    code = page.split("```python\ndef loss_fn")[1].split("```")[0]
    names: dict[str, Any] = {"model": model, "cross_entropy": cross_entropy}
    exec(f"def loss_fn{code}", names)

    def step(batch: list[Tensor]) -> None:
        optimizer.zero_grad()
        smoothed = cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)
        (smoothed + 1e-4 * sum(it.square().sum() for it in model.parameters())).backward()
        optimizer.step()

    return script(model=model, optimizer=optimizer, step=step, loss_fn=names["loss_fn"])


def test_a_loss_with_more_terms_is_checked_as_its_page_shows() -> None:
    (found,) = on_forked_workers(on_two, [loss_of_the_page], workers=2)
    assert {("gradient scale", "fine"), ("gradient direction", "fine")} < {it[:2] for it in found}
    assert not [it for it in found if it[1] in {"fault", "unknown"}]


def test_workers_that_lose_each_other_end_an_audit_with_the_error_of_this_worker(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def gather(ranks: Ranks, own: object) -> list[object]:
        if isinstance(own, str) and "bad file" in own:  # others wait in a sum of their step
            raise PeerLostError("worker 0 lost contact with another worker")
        return [own]

    def step(batch: list[Tensor]) -> None:
        with torch.no_grad():
            model.weight += 1
        raise RuntimeError("bad file")

    model = linear()
    monkeypatch.setattr(Ranks, "gather", gather)
    findings = audit(model, apart(0), cross_entropy, sgd(model), step)
    (lost,) = [it for it in findings if it.level == "unknown"]
    assert lost.text.startswith("the step failed: RuntimeError: bad file; the workers lost")
    assert lost.remedy
    assert findings.table() in capsys.readouterr().out
    assert not model.weight.any()


def test_a_loader_needs_no_length_and_the_optimizer_may_be_left_out() -> None:
    makes = [loader_without_a_length, optimizer_within_the_step]
    plain, split = on_forked_workers(on_two, makes, workers=2)
    assert ("gradient scale", "fine") in {it[:2] for it in plain}
    assert not [it for it in plain if it[1] in {"fault", "unknown"}]
    (text,) = [text for _, level, text in split if level == "fault"]
    assert text.startswith("2 times that of one process with all 16 samples")
    assert text.endswith("the losses of 2 micro-batches are added, not averaged")
