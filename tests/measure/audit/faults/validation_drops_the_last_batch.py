"""drop_last of the training loader is used for validation too."""

from collections.abc import Callable

from small_training import divided, network, optimizer_of, samples
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler

from largebatch.measure.audit import Findings

ISSUE = "https://github.com/areal-project/AReaL/pull/1096"
EXPECTED = "evaluation samples"
FIGURE = 16.0


def script(audit: Callable[..., Findings]) -> Findings:
    data = samples(80)
    sampler: DistributedSampler[object] = DistributedSampler(data, shuffle=False)
    validation = DataLoader(data, 32, sampler=sampler, drop_last=True)

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
