"""Packages that may be missing, each imported by one function that names the install command."""

import functools
import importlib
import sys
from importlib.resources import files
from types import ModuleType
from typing import TYPE_CHECKING, cast

from largebatch.errors import MissingPackageError

if TYPE_CHECKING:
    from torch.library import Library

INSTALL_APEX = (
    "git clone https://github.com/NVIDIA/apex && cd apex && APEX_CPP_EXT=1 APEX_CUDA_EXT=1 "
    "pip install -v --no-build-isolation . (the package `apex` on PyPI is something else)"
)
INSTALL_HOROVOD = f"{files('largebatch') / 'launch' / 'install_horovod.sh'} {sys.executable}"


def require_torchvision() -> ModuleType:
    """Import torchvision, also where its compiled operators do not fit the installed torch.

    Call this before importing anything that needs it, such as timm. torchvision built against a
    CUDA torch does not load its extension beside a CPU-only torch, and `import torchvision` then
    fails over two detection operators that nothing here calls. With their schemas declared, all
    that is written in Python works as usual; where torchvision imports, nothing is declared.
    """
    try:
        return _import("torchvision", "torchvision", "reading images and building timm's models")
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]  # half imported
    _declare_operators()
    return importlib.import_module("torchvision")


def torchvision_lacks_operators() -> bool:
    """Return whether torchvision was imported without its compiled operators."""
    return _declare_operators.cache_info().currsize > 0


def require_timm() -> ModuleType:
    """Import timm.

    It would import W&B for a log that nothing here writes, a tenth of what a worker takes to start.
    """
    require_torchvision()
    absent = cast("ModuleType", None)  # Python's own way to make an import fail
    hides = sys.modules.setdefault("wandb", absent) is None
    try:
        return _import(
            "timm", "timm", "models of other libraries", install="pip install 'timm>=1,<2'"
        )
    finally:
        if hides:
            del sys.modules["wandb"]


def require_dali() -> ModuleType:
    """Import nvidia.dali."""
    return _import(
        "nvidia.dali",
        "NVIDIA DALI",
        "--decoder dali (--decoder torchvision works without it)",
        install="pip install nvidia-dali-cuda120",
    )


def require_digits() -> ModuleType:
    """Import sklearn.datasets, which holds the handwritten digits."""
    return _import("sklearn.datasets", "scikit-learn", "data.source: digits")


def require_parquet() -> ModuleType:
    """Import pyarrow.parquet."""
    return _import("pyarrow.parquet", "pyarrow", "data import parquet")


def require_matplotlib() -> ModuleType:
    """Import matplotlib."""
    return _import("matplotlib", "matplotlib", "a report")


def require_bokeh() -> ModuleType:
    """Import bokeh."""
    return _import(
        "bokeh", "bokeh", "a page that compares runs", install="pip install 'bokeh>=3.8'"
    )


def require_wandb() -> ModuleType:
    """Import wandb."""
    return _import("wandb", "wandb", "tracking: [wandb]")


def require_mlperf(module: str, purpose: str) -> ModuleType:
    """Import a module of mlperf_logging, such as mllog.mllog."""
    return _import(f"mlperf_logging.{module}", "mlperf-logging", purpose)


def require_tensorboard() -> ModuleType:
    """Import tensorboard."""
    return _import("tensorboard", "tensorboard", "tracking: [tensorboard]")


def require_mlflow() -> ModuleType:
    """Import mlflow, of the package of this name or of mlflow-skinny."""
    install = "pip install 'largebatch[mlflow]'"
    return _import("mlflow", "mlflow", "tracking: [mlflow]", install=install)


def require_psutil() -> ModuleType:
    """Import psutil."""
    return _import("psutil", "psutil", "monitor: system")


def require_onnx() -> ModuleType:
    """Import onnx, and what PyTorch writes it with."""
    purpose, install = "export --onnx", "pip install 'largebatch[onnx]'"
    _import("onnxscript", "onnxscript", purpose, install=install)
    return _import("onnx", "onnx", purpose, install=install)


def require_shampoo() -> ModuleType:
    """Import pytorch_optimizer."""
    return _import(
        "pytorch_optimizer",
        "pytorch-optimizer",
        "optimizer.kind: shampoo",
        install="pip install 'pytorch-optimizer>=4,<5'",
    )


def require_schedulefree() -> ModuleType:
    """Import schedulefree."""
    return _import("schedulefree", "schedulefree", "optimizer.kind: schedule-free")


def require_optuna() -> ModuleType:
    """Import optuna."""
    return _import("optuna", "optuna", "a study", install="pip install 'largebatch[studies]'")


def require_simpy() -> ModuleType:
    """Import simpy."""
    return _import("simpy", "simpy", "a simulation", install="pip install 'largebatch[studies]'")


def require_horovod() -> ModuleType:
    """Import horovod.torch."""
    return _import("horovod.torch", "horovod", "the horovod backend", install=INSTALL_HOROVOD)


def require_apex() -> ModuleType:
    """Import the kernels of NVIDIA's apex, amp_C."""
    return _import("amp_C", "NVIDIA's apex", "execution.kernels: apex", install=INSTALL_APEX)


def _import(module: str, package: str, purpose: str, *, install: str = "") -> ModuleType:
    """Import a module, or raise MissingPackageError if its package is not installed.

    Where the package is there and something that it needs is not, ModuleNotFoundError stays.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise MissingPackageError(
            package, purpose=purpose, install=install or f"pip install {package}"
        ) from None


@functools.cache
def _declare_operators() -> "Library":
    """Declare the operators that torchvision extends on import without asking if they exist.

    The declarations last as long as the object returned, which the cache holds.
    """
    from torch.library import Library

    library = Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
