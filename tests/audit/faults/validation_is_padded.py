"""DistributedSampler repeats the first sample of the validation set."""

from collections.abc import Callable

from planted_parts import divided, perceptron, random_data, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from largebatch.audit import Findings

ISSUE = "https://github.com/pytorch/pytorch/issues/25162"
EXPECTED = "evaluation samples"
FIGURE = 1.0
LEVEL = "note"


def script(audit: Callable[..., Findings]) -> Findings:
    data = random_data(33, seed=1)
    validation = DataLoader(data, 8, sampler=DistributedSampler(data, shuffle=False))

    loader = divided(random_data(64, seed=1), 8, shuffle=True)
    model = DistributedDataParallel(perceptron())
    return audit(
        model,
        loader,
        cross_entropy,
        sgd(model, lr=0.01),
        set_epoch=loader.sampler.set_epoch,
        val_loader=validation,
    )
