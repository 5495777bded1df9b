import math
from collections import UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from on_forked_workers import on_forked_workers
from threads import Thread, on_threads
from torch import Tensor, nn

from largebatch.distributed.serial import Serial
from largebatch.training.evaluation import Answers, Metrics, evaluate

CPU = Serial(torch.device("cpu"))
SAMPLES, CLASSES = 23, 7


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, CLASSES, generator=generator), torch.arange(SAMPLES) % CLASSES


def assert_same(metrics: Metrics) -> None:
    """Count one sample at a time."""
    logits, labels = data()
    ranks = [
        sorted(row.tolist(), reverse=True).index(row[label].item())
        for row, label in zip(logits, labels, strict=True)
    ]
    assert metrics.top1 == sum(rank < 1 for rank in ranks) / SAMPLES
    assert metrics.top5 == sum(rank < 5 for rank in ranks) / SAMPLES
    of_classes = [
        np.mean([rank < 1 for rank, label in zip(ranks, labels, strict=True) if label == number])
        for number in range(CLASSES)
    ]
    assert metrics.balanced_top1 == pytest.approx(np.mean(of_classes), rel=1e-14)
    assert metrics.samples == SAMPLES
    assert metrics.loss == pytest.approx(F.cross_entropy(logits.double(), labels).item(), rel=1e-14)
    assert confidences_of(metrics) == pytest.approx(confidences(logits, labels), rel=1e-9)


def confidences_of(metrics: Metrics) -> tuple[float, float, float]:
    return (
        metrics.average_confidence,
        metrics.confidence_deviation,
        metrics.class_confidence_deviation,
    )


def confidences(logits: Tensor, labels: Tensor) -> tuple[float, float, float]:
    """Return AC, CD and CDAC as the paper defines them, by NumPy."""
    scores, truth = logits.double().numpy(), labels.numpy()
    confidence = 1 / np.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1)
    correct = scores.argmax(axis=1) == truth
    of_classes = [confidence[correct & (truth == label)].mean() for label in {*truth[correct]}]
    chosen = confidence[correct]
    return float(chosen.mean()), float(chosen.std()), float(np.std(of_classes))


@pytest.mark.parametrize("batch", [1, 4, 10, 23, 100])
def test_every_sample_counts_once_whatever_the_batch(batch: int) -> None:
    logits, labels = data()
    batches = zip(logits.split(batch), labels.split(batch), strict=True)
    assert_same(evaluate(nn.Identity(), batches, CPU, expected=SAMPLES))


def share() -> Metrics:
    """Evaluate a share on this worker; with three workers the middle one has none."""
    from largebatch.distributed.torch_distributed import TorchDistributed

    backend = TorchDistributed()
    mine = [slice(0, 20), slice(0, 0), slice(20, SAMPLES)][backend.rank]
    logits, labels = (part[mine] for part in data())
    batches = [(logits, labels)] if len(labels) else []
    metrics = evaluate(nn.Identity(), batches, backend, expected=SAMPLES)
    backend.close()
    return metrics


def test_workers_with_unequal_shares_and_none_count_together() -> None:
    metrics = on_forked_workers(share, workers=3)
    assert_same(metrics)


def test_the_model_is_evaluated_in_evaluation_mode_and_put_back() -> None:
    logits, labels = data()
    model = nn.Sequential(nn.Dropout(0.9), nn.Dropout(0.9).eval())
    assert_same(evaluate(model, [(logits, labels)], CPU))
    assert [module.training for module in model.modules()] == [True, True, False]


@pytest.mark.parametrize("bad", [[0, 1, 2], [1]], ids=["all scores", "one score"])
def test_a_sample_with_a_score_that_is_nan_is_wrong(bad: list[int]) -> None:
    """The other two are right: 2 of 4, whatever the labels of the bad ones."""
    scores, labels = torch.eye(3)[[0, 1, 2, 0]], torch.tensor([0, 1, 2, 0])
    scores[:2, bad] = torch.nan
    found = evaluate(nn.Identity(), [(scores, labels)], CPU)
    assert (found.top1, found.top5) == (0.5, 0.5)
    assert math.isnan(found.loss)
    answers = Answers()
    answers.add(scores, labels)
    answer = answers.gather(np.arange(4), np.arange(4), CPU)
    assert answer.predicted.tolist() == [-1, -1, 2, 0]


def test_fewer_than_five_classes_make_top5_certain() -> None:
    metrics = evaluate(nn.Identity(), [(torch.eye(3), torch.tensor([0, 2, 1]))], CPU)
    assert metrics.top1 == pytest.approx(1 / 3)
    assert metrics.top5 == 1.0


class Returns(nn.Module):
    """A float64 model of two inputs, whose output has a form of its own."""

    def __init__(self, form: Callable[[Tensor], Any] = lambda scores: scores) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(CLASSES, CLASSES, bias=False).double(), form
        nn.init.eye_(self.linear.weight)

    def forward(self, scores: Tensor, shift: Tensor | None = None) -> Any:  # noqa: ANN401
        return self.form(self.linear(scores) if shift is None else scores + shift)


KINDS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.uint16, torch.int64]


@pytest.mark.parametrize("as_batch", [
    *(pytest.param(lambda x, y, kind=kind: (x, y.to(kind)), id=str(kind)) for kind in KINDS),
    pytest.param(lambda x, y: [{"data": x, "label": y.int()[:, None]}], id="DALI's form"),
    pytest.param(lambda x, y: UserDict(pixel_values=x, labels=y), id="Hugging Face's form"),
    pytest.param(lambda x, y: (x, y, torch.arange(len(y))), id="three entries"),
])  # fmt: skip
def test_labels_of_any_integer_type_and_form_count_alike(
    as_batch: Callable[[Tensor, Tensor], Any],
) -> None:
    logits, labels = data()
    batches = [as_batch(*part) for part in zip(logits.split(5), labels.split(5), strict=True)]
    assert_same(evaluate(Returns(), batches, CPU))


@pytest.mark.parametrize("form", [
    pytest.param(lambda scores: {"loss": scores.sum(), "logits": scores}, id="mapping"),
    pytest.param(lambda scores: SimpleNamespace(logits=scores), id="attribute"),
    pytest.param(lambda scores: (scores,), id="tuple of one"),
])  # fmt: skip
def test_scores_may_be_in_an_object_mapping_or_tuple(form: Callable[[Tensor], Any]) -> None:
    assert_same(evaluate(Returns(form), [data()], CPU))


def test_a_forward_takes_any_inputs_and_outputs() -> None:
    logits, labels = data()
    logits, shift = logits.double(), torch.ones(SAMPLES, 1)
    batch = {"a": logits - shift, "b": shift, "target": labels.int()}
    model = Returns(lambda scores: (scores.sum(), scores))
    assert_same(
        evaluate(model, [batch], CPU, forward=lambda m, it: (m(it["a"], it["b"])[1], it["target"]))
    )
    pair = (logits - shift, labels, shift)
    assert_same(evaluate(model, [pair], CPU, forward=lambda m, it: m(it[0], it[2])[1]))


@pytest.mark.parametrize(("form", "change", "message"), [
    pytest.param(lambda x: (x, x), lambda y: y, r"a tuple of \(Tensor, Tensor\)", id="two outputs"),
    pytest.param(lambda x: {"out": x}, lambda y: y, "the keys out", id="other mapping"),
    pytest.param(lambda x: x, F.one_hot, "labels.* 23 x 7 ", id="one-hot"),
    pytest.param(lambda x: x, lambda y: y.float(), "got float32", id="floating"),
    pytest.param(lambda x: x, lambda y: y[:-1], " 22 .* 23 x 7", id="fewer"),
    pytest.param(lambda x: x.sum(), lambda y: y, "23 .*a number", id="the loss"),
    pytest.param(lambda x: x[:, :1], lambda y: y * 0, " 23 x 1", id="one score"),
    pytest.param(lambda x: x, lambda y: y.where(y > 1, -100), r"\b8 labels.*-100.*7", id="ignored"),
    pytest.param(lambda x: x, lambda y: y + 1, r"\b3 labels.* 7,", id="from 1"),
    pytest.param(lambda x: x, lambda y: (y + 255).byte(), r"\b4 labels.* 255,", id="255 in bytes"),
])  # fmt: skip
def test_labels_and_outputs_that_cannot_be_counted_are_one_line(
    form: Callable[[Tensor], Any], change: Callable[[Tensor], Tensor], message: str
) -> None:
    logits, labels = data()
    with pytest.raises(ValueError, match=message) as caught:
        evaluate(Returns(form), [(logits, change(labels))], CPU)
    assert "\n" not in str(caught.value)


def label_of_one_worker() -> str:
    from largebatch.distributed.torch_distributed import TorchDistributed

    backend = TorchDistributed()
    logits, labels = (part[:1] for part in data())
    with pytest.raises(ValueError, match=r"\b1 labels.* -100") as caught:
        evaluate(nn.Identity(), [(logits, labels - 100 * backend.rank)], backend)
    backend.close()
    return str(caught.value)


def test_a_label_that_is_not_a_class_ends_every_worker() -> None:
    on_forked_workers(label_of_one_worker, workers=2)


def test_a_sample_too_many_or_none_at_all_is_noticed() -> None:
    logits, labels = data()
    with pytest.raises(ValueError, match="23 .* 24"):
        evaluate(nn.Identity(), [(logits, labels)], CPU, expected=24)
    with pytest.raises(ValueError, match="nothing to evaluate"):
        evaluate(nn.Identity(), [], CPU)


def test_scores_that_are_no_numbers_make_the_loss_none_and_leave_other_samples_alone() -> None:
    logits, labels = data()
    logits[0, 3] = torch.nan  # of class 0, taken for class 3
    right = logits[1:].argmax(1) == labels[1:]
    metrics = evaluate(nn.Identity(), [(logits, labels)], CPU)
    assert metrics.loss != metrics.loss
    assert metrics.top1 == right.sum().item() / SAMPLES


def test_workers_with_other_classes_are_an_error_on_all_of_them() -> None:
    def work(worker: Thread) -> str:
        backend: Any = worker
        batch = torch.eye(3 + worker.rank), torch.arange(3 + worker.rank)
        with pytest.raises(ValueError, match="other classes") as found:
            evaluate(nn.Identity(), [batch], backend)
        return str(found.value)

    assert on_threads(work, workers=2) == ["workers have scores for other classes: [3, 4]"] * 2


@pytest.mark.parametrize("batch", [1, 64, 211])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_confidence_is_that_of_numpy(batch: int, dtype: torch.dtype) -> None:
    """One class has no sample, one no correct sample, and one comes only at the end."""
    classes, absent, never, late = 11, 4, 7, 10
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, late, (211,), generator=generator)
    labels[labels == absent] = 0
    labels[-3:] = late
    logits = torch.randn(211, classes, generator=generator)
    logits[torch.arange(211), labels] += 2.0
    logits[:, never] -= 100.0
    logits = logits.to(dtype)
    batches = zip(logits.split(batch), labels.split(batch), strict=True)
    found = evaluate(nn.Identity(), batches)
    right = labels[logits.argmax(1) == labels]
    assert {*range(classes)} - {*right.tolist()} == {absent, never}
    assert confidences_of(found) == pytest.approx(confidences(logits, labels), rel=1e-9)


def test_without_a_correct_sample_there_is_no_confidence() -> None:
    found = evaluate(nn.Identity(), [(-torch.eye(3), torch.arange(3))])
    assert found.top1 == 0
    assert math.isnan(found.average_confidence)
    assert math.isnan(found.class_confidence_deviation)
