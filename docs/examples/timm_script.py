"""timm's training script with LARS, BatchNorm spans and averages that are polished.

python docs/examples/timm_script.py pytorch-image-models/train.py --opt larsreference ...

What follows the script's path is its own. `--model with_span --model-kwargs of=resnet18 span=16` is
resnet18 in which every 16 images share BatchNorm statistics.
"""

import runpy
import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

from largebatch import LARS, models
from largebatch.integrations.timm import polish_averages
from largebatch.optional import require_timm

timm = require_timm()  # as `import timm`, also where torchvision was built for another torch

from timm.models import register_model  # noqa: E402
from timm.optim._optim_factory import OptimInfo, default_registry  # noqa: E402


@register_model
def with_span(*, of: str, span: int, **words: Any) -> nn.Module:  # noqa: ANN401 -- of any model
    """Build the model `of`, in which every `span` images share BatchNorm statistics."""
    words.pop("pretrained_cfg", None)
    words.pop("pretrained_cfg_overlay", None)
    return models.with_span(timm.create_model(of, **words), span)


class Lars(LARS):
    """LARS that neither decays nor adapts what timm does not decay: biases and normalisation."""

    def __init__(self, params: Iterable[dict[str, Any]], lr: float, **words: Any) -> None:  # noqa: ANN401
        groups = [{"adapt": group["weight_decay"] > 0, **group} for group in params]
        super().__init__(groups, lr, **words)


if __name__ == "__main__":
    defaults = {"eta": 0.001}
    info = OptimInfo("larsreference", Lars, has_eps=True, has_momentum=True, defaults=defaults)
    default_registry.register(info)
    polish_averages()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
