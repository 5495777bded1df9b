"""The loader shuffles on every worker, without a DistributedSampler."""

from collections.abc import Callable

from small_training import by_rank, network, optimizer_of, samples
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from largebatch.measure.audit import Findings

ISSUE = "https://github.com/PatrickHua/SimSiam/issues/16"
EXPECTED = "samples"
FIGURE = 2.0


def script(audit: Callable[..., Findings]) -> Findings:
    by_rank(0)
    loader = DataLoader(samples(), 8, shuffle=True)
    model = network()
    return audit(model, loader, cross_entropy, optimizer_of(model))
