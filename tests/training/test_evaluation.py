import pytest
import torch
import torch.nn.functional as F
from confidence import assert_confident
from on_forked_workers import on_forked_workers
from torch import Tensor, nn

from largebatch.distributed.serial import Serial
from largebatch.training.evaluation import Metrics, evaluate

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
    assert metrics.samples == SAMPLES
    assert metrics.loss == pytest.approx(F.cross_entropy(logits.double(), labels).item(), rel=1e-14)


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
    assert_confident(metrics, *data())


def test_the_model_is_evaluated_in_evaluation_mode_and_put_back() -> None:
    logits, labels = data()
    model = nn.Sequential(nn.Dropout(0.9), nn.Dropout(0.9).eval())
    assert_same(evaluate(model, [(logits, labels)], CPU))
    assert [module.training for module in model.modules()] == [True, True, False]


def test_fewer_than_five_classes_make_top5_certain() -> None:
    metrics = evaluate(nn.Identity(), [(torch.eye(3), torch.tensor([0, 2, 1]))], CPU)
    assert metrics.top1 == pytest.approx(1 / 3)
    assert metrics.top5 == 1.0


def test_a_sample_too_many_or_none_at_all_is_noticed() -> None:
    logits, labels = data()
    with pytest.raises(ValueError, match="23 samples were counted on 1 workers, expected 24"):
        evaluate(nn.Identity(), [(logits, labels)], CPU, expected=24)
    with pytest.raises(ValueError, match="nothing to evaluate"):
        evaluate(nn.Identity(), [], CPU)
