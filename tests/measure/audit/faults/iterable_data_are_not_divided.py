"""An iterable data set yields all samples on every worker."""

from collections.abc import Callable, Iterator

from small_training import network, optimizer_of, samples
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, IterableDataset

from largebatch.measure.audit import Findings

ISSUE = "https://github.com/huggingface/datasets/issues/5360"
EXPECTED = "samples"
FIGURE = 2.0


class Stream(IterableDataset[object]):
    def __iter__(self) -> Iterator[object]:
        return iter(samples())


def script(audit: Callable[..., Findings]) -> Findings:
    model = network()
    return audit(model, DataLoader(Stream(), 8), cross_entropy, optimizer_of(model))
