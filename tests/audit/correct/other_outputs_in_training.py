"""A network with a head that is used in training only, which normalises its images in place."""

from collections.abc import Callable

from planted_parts import divided, perceptron, random_data, sgd
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from largebatch.audit import Findings


class Network(nn.Module):
    """Logits in evaluation, and in training logits and those of a second head."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.second = perceptron(nn.BatchNorm1d(16), nn.ReLU()), perceptron()

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        images = images.sub_(0.5).div_(0.25)
        return (self.main(images), self.second(images)) if self.training else self.main(images)


def both(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    return cross_entropy(outputs[0], labels) + 0.4 * cross_entropy(outputs[1], labels)


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(), 16, shuffle=False)
    model = DistributedDataParallel(Network())
    optimizer = sgd(model)

    def step(batch: list[Tensor]) -> None:
        optimizer.zero_grad()
        both(model(batch[0].clone()), batch[1]).backward()
        optimizer.step()

    return audit(model, loader, both, optimizer, step)
