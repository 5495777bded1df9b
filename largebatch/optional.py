"""torchvision, also where its compiled operators do not fit the installed torch.

The index's torchvision is built against its CUDA torch. Beside a CPU-only torch its extension does
not load, and `import torchvision` then fails over two detection operators that nobody here calls.
With their schemas declared first, everything that is written in Python (transforms, models, and
timm on top of them) works as usual.
"""

import functools
import importlib
import sys
from types import ModuleType

import torch

from largebatch.errors import MissingPackageError


def require_torchvision() -> ModuleType:
    """Import torchvision; call this before importing anything that needs it, such as timm.

    Nothing is declared where torchvision imports by itself.
    """
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
        raise MissingPackageError(
            "torchvision",
            purpose="reading pictures and building timm's models",
            install="pip install torchvision",
        ) from None
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]  # half imported
    _declare_operators()
    return importlib.import_module("torchvision")


@functools.cache
def _declare_operators() -> torch.library.Library:
    """Declare the operators that torchvision extends on import without asking if they exist.

    The declarations last as long as the object returned, which the cache keeps.
    """
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
