"""What a script does wrong itself is reported in one line, on all workers, and it goes on."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from planted_audit import findings_of, not_known
from planted_parts import (
    Arguments,
    Loop,
    apart,
    cleared,
    divided,
    linear,
    loop,
    parallel,
    random_data,
    sgd,
    stepped,
)
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings, audit
from largebatch.audit.ranks import Ranks
from largebatch.errors import PeerLostError


class Unsized:
    """A loader without a length, that may fail after its first batch."""

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(divided(random_data(), 16, shuffle=False)):
            if self.fails and number == 1:
                raise OSError("truncated file")
            yield batch


def loader_that_fails_on_worker_1() -> Arguments:
    return loop(parallel(), loader=Unsized(fails=dist.get_rank() == 1))


def an_iterator() -> Arguments:
    return loop(parallel(), loader=iter(Unsized()))


def sharded_inside() -> Arguments:
    return loop(nn.Sequential(parallel()))


def another_loss_in_the_step() -> Arguments:
    model = parallel()
    return cleared(model, lambda batch: cross_entropy(model(batch[0]), (batch[1] + 1) % 4))


def weights_in_the_loss() -> Arguments:
    model = parallel()

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        decay = sum(it.square().sum() for it in model.parameters())
        return cross_entropy(model(batch[0]), batch[1]) + 0.01 * decay

    return cleared(model, loss)


def clipping_that_is_not_seen() -> Arguments:
    model = parallel()

    def clip() -> None:
        gradients = [it.grad for it in model.parameters() if it.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        torch._foreach_mul_(gradients, 0.1 / norm)

    return stepped(model, change=clip)


def model_in_evaluation_mode() -> Arguments:
    return loop(parallel().eval())


def no_update() -> Arguments:
    return loop(parallel(), step=lambda _: None)


def step_that_fails_on_worker_1_before_its_update() -> Arguments:
    def fail() -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("disk is full")

    return stepped(parallel(), change=fail)


def update_with_a_closure() -> Arguments:
    model = parallel()
    optimizer = sgd(model)

    def step(batch: list[Tensor]) -> None:
        def closure() -> float:
            optimizer.zero_grad()
            loss = cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            return float(loss)

        optimizer.step(closure)

    return loop(model, optimizer=optimizer, step=step)


def master_weights() -> Arguments:
    model = parallel()
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

    return loop(model, optimizer=optimizer, step=step)


def no_steps() -> Arguments:
    return loop(parallel(), steps=0)


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
def unknown() -> dict[str, Findings | str]:
    return findings_of(list(UNKNOWN))


@pytest.mark.parametrize("make", UNKNOWN)
def test_what_cannot_be_checked_is_said_in_one_line(
    make: Loop, unknown: dict[str, Findings | str]
) -> None:
    findings = unknown[make.__name__]
    assert isinstance(findings, Findings), findings
    unable = not_known(findings)
    texts = [it.text for it in unable]
    assert [text for text in texts if UNKNOWN[make] in text] == texts[:1]
    assert "\n" not in "".join(texts)
    assert all(it.remedy for it in unable)
    assert not findings.faults


def loader_without_a_length() -> Arguments:
    return loop(parallel(), loader=Unsized(), optimizer=None)


def optimizer_within_the_step() -> Arguments:
    model = DistributedDataParallel(linear())
    optimizer = sgd(model)

    def step(batch: list[Tensor]) -> None:
        for images, labels in zip(batch[0].chunk(2), batch[1].chunk(2), strict=True):
            cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return loop(model, loader=apart(dist.get_rank()), optimizer=None, step=step)


def loss_of_the_page() -> Arguments:
    """Return a script whose step has the weights in its loss, and the loss of the page for it."""
    model = parallel()
    page = (Path(__file__).parents[2] / "docs" / "audit.md").read_text(encoding="utf-8")
    code = page.split("```python\ndef loss_fn")[1].split("```")[0]
    names: dict[str, Any] = {"model": model, "cross_entropy": cross_entropy}
    exec(f"def loss_fn{code}", names)

    def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
        smoothed = cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)
        return smoothed + 1e-4 * sum(it.square().sum() for it in model.parameters())

    return cleared(model, loss, loss_fn=names["loss_fn"])


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
    (lost,) = not_known(findings)
    assert lost.text.startswith("the step failed: RuntimeError: bad file; the workers lost")
    assert lost.remedy
    assert findings.table() in capsys.readouterr().out
    assert not model.weight.any()


def test_a_loader_needs_no_length_and_a_loss_may_have_more_terms_as_its_page_shows() -> None:
    makes = [loader_without_a_length, loss_of_the_page, optimizer_within_the_step]
    *compared, split = findings_of(makes).values()
    for findings in compared:
        assert isinstance(findings, Findings), findings
        fine = {it.check for it in findings if it.level == "fine"}
        assert {"gradient scale", "gradient direction"} <= fine
        assert not findings.faults
        assert not not_known(findings)
    assert isinstance(split, Findings), split
    (fault,) = split.faults  # found without an optimizer that was given
    assert fault.text.startswith("2 times that of one process with all 16 samples")
    assert fault.text.endswith("the losses of 2 micro-batches are added, not averaged")
