"""timm's training script, unchanged, whose averages are polished before they are evaluated.

    python -m largebatch.integrations.timm pytorch-image-models/train.py --model-ema ...

What follows the script's path is its own. To audit it: `largebatch audit train.py --no-prefetcher`.
"""

import copy
import runpy
import sys
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from largebatch.errors import DataError
from largebatch.optional import require_timm
from largebatch.polish import polish

require_timm()  # also where torchvision was built for another torch

from timm import data  # noqa: E402
from timm.utils.model_ema import ModelEmaV3  # noqa: E402


def polish_averages() -> None:
    """Make timm polish an average (ModelEmaV3) in its first forward pass after an update.

    Clean images are those of the newest training loader of timm's `create_loader`, transformed and
    divided among workers as for its validation loader, which repeats a few where the number of
    workers does not divide them. The pass raises DataError if a script has made only one loader.

    >>> polish_averages()  # then run timm's script in this process  # doctest: +SKIP
    """
    own_loader = data.create_loader
    own_update = ModelEmaV3.update
    loaders: dict[bool, tuple[Dataset[Any], dict[str, Any]]] = {}

    def create_loader(dataset: Dataset[Any], **words: Any) -> Any:
        # A copy: timm's loader sets the transform of the data set that it is given.
        loaders[words.get("is_training", False)] = copy.copy(dataset), words
        return own_loader(dataset, **words)

    def clean_loader() -> Any:
        if len(loaders) < 2:
            raise DataError("polishing an average needs timm's loaders of training and validation")
        return own_loader(loaders[True][0], **loaders[False][1])

    def update(ema: Any, *args: Any, **words: Any) -> None:
        own_update(ema, *args, **words)

        def before(module: nn.Module, _: object) -> None:
            if not ema.is_polished and not module.training:
                ema.is_polished = True
                polish(module, clean_loader())

        # On the first update only: each hook would polish again.
        if not hasattr(ema, "is_polished"):
            for module in ema.module.modules():  # timm calls a part of what is averaged
                module.register_forward_pre_hook(before)
        ema.is_polished = False

    data.create_loader = create_loader
    ModelEmaV3.update = update


if __name__ == "__main__":
    polish_averages()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
