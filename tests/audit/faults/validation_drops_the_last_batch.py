"""drop_last of the training loader is used for validation too."""

from collections.abc import Callable

from planted_parts import divided, perceptron, random_data, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from largebatch.audit import Findings

ISSUE = "https://github.com/areal-project/AReaL/pull/1096"
EXPECTED = "evaluation samples"
FIGURE = 16.0


def script(audit: Callable[..., Findings]) -> Findings:
    data = random_data(80, seed=1)
    sampler: DistributedSampler[object] = DistributedSampler(data, shuffle=False)
    validation = DataLoader(data, 32, sampler=sampler, drop_last=True)

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
