"""The average of the weights moves after each of four micro-batches, not once an update."""

from collections.abc import Callable

from planted_parts import divided, linear, random_data, sgd
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from largebatch.audit import Findings

ISSUE = "https://github.com/SWivid/F5-TTS/issues/631"
EXPECTED = "averaged weights"
FIGURE = 4.0


def script(audit: Callable[..., Findings]) -> Findings:
    loader = divided(random_data(128, seed=1), 8, shuffle=True)
    model = DistributedDataParallel(linear())
    optimizer = sgd(model)
    average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    calls = 0

    def step(batch: tuple[Tensor, Tensor]) -> None:
        nonlocal calls
        calls += 1
        (cross_entropy(model(batch[0]), batch[1]) / 4).backward()
        if calls % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        average.update_parameters(model.module)

    words = {"set_epoch": loader.sampler.set_epoch, "averaged": average}
    return audit(model, loader, cross_entropy, optimizer, step, **words)
