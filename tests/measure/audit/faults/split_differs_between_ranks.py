"""random_split draws the training set with a generator that each worker seeds differently."""

from collections.abc import Callable

from small_training import by_rank, divided, network, optimizer_of, samples
from torch.nn.functional import cross_entropy
from torch.utils.data import random_split

from largebatch.measure.audit import Findings

ISSUE = "https://github.com/Lightning-AI/pytorch-lightning/issues/7728"
EXPECTED = "samples"
FIGURE = 0.3
TOLERANCE = 0.2


def script(audit: Callable[..., Findings]) -> Findings:
    by_rank(0)
    train, _ = random_split(samples(200), [160, 40])
    loader = divided(train)
    model = network()
    set_epoch = loader.sampler.set_epoch
    return audit(model, loader, cross_entropy, optimizer_of(model), set_epoch=set_epoch)
