"""Optional packages. Each is imported by one function, whose error names the install command."""

import importlib
import importlib.util
import sys
from functools import cache, partial
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
INSTALL_HEIF = "pip install pillow-heif"
INSTALL_HOROVOD = f"{files('largebatch') / 'launch' / 'install_horovod.sh'} {sys.executable}"


def _import(module: str, purpose: str, *, package: str = "", install: str = "") -> ModuleType:
    """Import a module, or raise MissingPackageError if its package is not installed.

    ModuleNotFoundError is raised if the package is installed and a dependency of it is missing.
    """
    package = package or module
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise MissingPackageError(
            package, purpose=purpose, install=install or f"pip install {package}"
        ) from None


def require_torchvision() -> ModuleType:
    """Import torchvision, even if its compiled operators do not match the installed torch.

    Call this before importing anything that needs it, such as timm. torchvision built against a
    CUDA torch fails with a CPU-only torch over two detection operators that nothing here calls.
    Declaring their schemas makes the Python part work.
    """
    try:
        return _import("torchvision", "reading images and building timm's models")
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):
            raise
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        del sys.modules[name]  # half imported
    _declare_operators()
    return importlib.import_module("torchvision")


def torchvision_lacks_operators() -> bool:
    """Return True if torchvision was imported without its compiled operators."""
    return _declare_operators.cache_info().currsize > 0


def require_timm() -> ModuleType:
    """Import timm without W&B, which takes a tenth of a worker's start and is not used."""
    require_torchvision()
    absent = cast("ModuleType", None)  # makes `import wandb` raise ImportError
    hides = sys.modules.setdefault("wandb", absent) is None
    try:
        return _import("timm", "models of other libraries", install="pip install 'timm>=1,<2'")
    finally:
        if hides:
            del sys.modules["wandb"]


def has_heif() -> bool:
    """Return True if the package that reads HEIC, the photographs of phones, is installed."""
    return importlib.util.find_spec("pillow_heif") is not None


@cache
def require_heif() -> ModuleType:
    """Import pillow_heif and let Pillow read HEIC with it."""
    heif = _import(
        "pillow_heif", "reading HEIC images", package="pillow-heif", install=INSTALL_HEIF
    )
    heif.register_heif_opener()
    return heif


def require_mlperf(module: str, purpose: str) -> ModuleType:
    """Import a module of mlperf_logging, such as mllog.mllog."""
    return _import(f"mlperf_logging.{module}", purpose, package="mlperf-logging")


def require_onnx() -> None:
    """Import onnx, and onnxscript, with which PyTorch exports."""
    for module in ("onnx", "onnxscript"):
        _import(module, "export --onnx", install="pip install 'largebatch[onnx]'")


_STUDIES = "pip install 'largebatch[studies]'"

require_dali = partial(
    _import,
    "nvidia.dali",
    "--decoder dali (--decoder torchvision works without it)",
    package="NVIDIA DALI",
    install="pip install nvidia-dali-cuda120",
)
require_parquet = partial(_import, "pyarrow.parquet", "data import parquet", package="pyarrow")
require_matplotlib = partial(_import, "matplotlib", "a report")
require_wandb = partial(_import, "wandb", "tracking: [wandb]")
require_tensorboard = partial(_import, "tensorboard", "tracking: [tensorboard]")
require_mlflow = partial(
    _import, "mlflow", "tracking: [mlflow]", install="pip install 'largebatch[mlflow]'"
)
require_obstore = partial(
    _import, "obstore", "an address such as s3://", install="pip install 'largebatch[storage]'"
)
require_psutil = partial(_import, "psutil", "monitor: system")
require_shampoo = partial(
    _import,
    "pytorch_optimizer",
    "optimizer.kind: shampoo",
    package="pytorch-optimizer",
    install="pip install 'pytorch-optimizer>=4,<5'",
)
require_schedulefree = partial(_import, "schedulefree", "optimizer.kind: schedule-free")
require_optuna = partial(_import, "optuna", "a study", install=_STUDIES)


def require_scipy(module: str) -> ModuleType:
    """Import a module of SciPy, such as scipy.stats."""
    return _import(module, "this fit", package="scipy", install=_STUDIES)


require_simpy = partial(_import, "simpy", "a simulation", install=_STUDIES)
require_horovod = partial(
    _import, "horovod.torch", "the horovod backend", package="horovod", install=INSTALL_HOROVOD
)
require_apex = partial(
    _import, "amp_C", "execution.kernels: apex", package="NVIDIA's apex", install=INSTALL_APEX
)
"""Each imports a module; apex's is amp_C, its kernels."""


def require_muon() -> ModuleType:
    """Import timm's Muon, which timm has from 1.0.22."""
    require_timm()
    return _import(
        "timm.optim.muon",
        "optimizer.kind: muon",
        package="timm 1.0.22",
        install="pip install 'timm>=1.0.22,<2'",
    )


@cache
def _declare_operators() -> "Library":
    """Declare torchvision's operators, as long as the returned object lives, in the cache."""
    from torch.library import Library

    library = Library("torchvision", "FRAGMENT")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library
