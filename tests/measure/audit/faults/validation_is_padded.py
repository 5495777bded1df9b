"""DistributedSampler repeats the first sample of the validation set."""

from collections.abc import Callable

from small_training import divided, network, optimizer_of, samples
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from largebatch.measure.audit import Findings

ISSUE = "https://github.com/pytorch/pytorch/issues/25162"
EXPECTED = "evaluation samples"
FIGURE = 1.0
LEVEL = "note"


def script(audit: Callable[..., Findings]) -> Findings:
    data = samples(33)
    validation = DataLoader(data, 8, sampler=DistributedSampler(data, shuffle=False))

    loader = divided(samples())
    model = network()
    return audit(
        model,
        loader,
        cross_entropy,
        optimizer_of(model),
        set_epoch=loader.sampler.set_epoch,
        val_loader=validation,
    )
