"""timm's training script, unchanged, with polished averages, LARS and BatchNorm spans.

    python -m largebatch.integrations.timm pytorch-image-models/train.py --model-ema ...

What follows the script's path is its own. Averages of --model-ema are polished before they are
evaluated and saved. `--opt larsreference` is LARS; `--model with_span --model-kwargs of=resnet18
span=16` is resnet18 in which every 16 images share BatchNorm statistics. To audit the script:
`largebatch audit train.py --no-prefetcher ...`.
"""

import copy
import runpy
import sys
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, Subset

from largebatch import models
from largebatch.errors import DataError
from largebatch.optim import LARS
from largebatch.optional import require_timm
from largebatch.polish import polish

timm = require_timm()  # as `import timm`, also where torchvision was built for another torch

from timm import data  # noqa: E402
from timm.models import register_model  # noqa: E402
from timm.optim._optim_factory import OptimInfo, default_registry  # noqa: E402
from timm.utils.model_ema import ModelEmaV3  # noqa: E402


class _Share(Subset[Any]):
    """A worker's share of a data set, which gets the `transform` that timm sets."""

    def __setattr__(self, name: str, value: object) -> None:
        owner = self.dataset if name == "transform" else self
        object.__setattr__(owner, name, value)


def polish_averages() -> None:
    """Make timm polish an average (ModelEmaV3) in its first forward pass after an update.

    Clean images are those of the newest training loader of timm's `create_loader`, transformed as
    for its validation loader. The pass raises DataError if a script has made only one of them.
    """
    own_loader, own_init, own_update = (
        data.create_loader,
        ModelEmaV3.__init__,
        ModelEmaV3.update,
    )
    loaders: dict[bool, tuple[Dataset[Any], dict[str, Any]]] = {}

    def create_loader(dataset: Dataset[Any], **words: Any) -> Any:  # noqa: ANN401 -- timm's
        loaders[words.get("is_training", False)] = copy.copy(dataset), words
        return own_loader(dataset, **words)

    def clean_loader() -> Any:  # noqa: ANN401 -- timm's
        if len(loaders) < 2:
            raise DataError("polishing an average needs timm's loaders of training and validation")
        dataset, words = loaders[True][0], loaders[False][1]
        rank, workers = (
            (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        )
        share = _Share(dataset, range(rank, len(dataset), workers))  # type: ignore[arg-type]
        return own_loader(share, **words | {"distributed": False})

    def init(ema: Any, *args: Any, **words: Any) -> None:  # noqa: ANN401 -- a ModelEmaV3
        own_init(ema, *args, **words)
        ema.is_polished = False

        def before(module: nn.Module, _: object) -> None:
            if not ema.is_polished and not module.training:
                ema.is_polished = True
                polish(module, clean_loader())

        for module in ema.module.modules():  # timm calls a part of what is averaged
            module.register_forward_pre_hook(before)

    def update(ema: Any, *args: Any, **words: Any) -> None:  # noqa: ANN401 -- as above
        own_update(ema, *args, **words)
        ema.is_polished = False

    data.create_loader = create_loader
    ModelEmaV3.__init__, ModelEmaV3.update = init, update


@register_model  # type: ignore[untyped-decorator]  # timm's types are not read
def with_span(*, of: str, span: int, **words: Any) -> nn.Module:  # noqa: ANN401 -- of any model
    """Build the model `of`, in which every `span` images share BatchNorm statistics."""
    words.pop("pretrained_cfg", None)
    words.pop("pretrained_cfg_overlay", None)
    model: nn.Module = timm.create_model(of, **words)
    return models.with_span(model, span)


class Lars(LARS):
    """LARS that neither decays nor adapts what timm does not decay: biases and normalisation."""

    def __init__(self, params: Iterable[dict[str, Any]], lr: float, **words: Any) -> None:  # noqa: ANN401
        groups = [{"adapt": group["weight_decay"] > 0, **group} for group in params]
        super().__init__(groups, lr, **words)


default_registry.register(
    OptimInfo("larsreference", Lars, has_eps=True, has_momentum=True, defaults={"eta": 0.001})
)

if __name__ == "__main__":
    polish_averages()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
