"""An iterable data set yields all samples on every worker."""

from collections.abc import Callable, Iterator

from planted_parts import perceptron, random_data, sgd
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from largebatch.audit import Findings

ISSUE = "https://github.com/huggingface/datasets/issues/5360"
EXPECTED = "samples"
FIGURE = 2.0


class Stream(IterableDataset[object]):
    def __iter__(self) -> Iterator[object]:
        return iter(random_data(64, seed=1))


def script(audit: Callable[..., Findings]) -> Findings:
    model = DistributedDataParallel(perceptron())
    return audit(model, DataLoader(Stream(), 8), cross_entropy, sgd(model, lr=0.01))
