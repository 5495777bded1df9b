"""The source files that each benchmark measures, and whether a result is older than they are.

A result file holds, for each file, its name and a digest of its code. Comments, docstrings, and
the places that names are imported from do not count, nor does the file's own place: a figure
stays valid where code only moves. It is stale as soon as any code that it measured changes.
"""

import ast
import hashlib
import io
import tokenize
from functools import cache
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "largebatch"

_BATCHNORM = ("models/batchnorm.py", "models/batchnorm_functional.py")
_KERNELS = ("models/fusion.py", "models/kernels")
_LARS = ("optim/kernels", "optim/lars.py")
_UPDATE = ("distributed/reducer.py", *_BATCHNORM, "training/loop.py")
_INPUT = ("data/augment.py", "data/decoders", "data/decoding.py", "data/pipeline.py")

MEASURED = {
    "audit_cost": ("audit",),
    "checkpoint": ("training/checkpoint.py", "training/state.py"),
    "decoder_pixels": tuple(
        f"data/decoders/{name}.py" for name in ("crops", "dali", "torchvision")
    ),
    "index": ("data/index",),
    "input_augmented": (*_INPUT, "data/mixing.py", "data/operations"),
    "input_gpu": _INPUT,
    "input_host": (*_INPUT, "data/index/index.py", "data/order.py"),
    "input_pipeline": _INPUT,
    "lars": _LARS,
    "loop": _UPDATE,
    "norm": (*_BATCHNORM, *_KERNELS),
    "polish": (*_BATCHNORM, *_KERNELS, "polish"),
    "polish_error": (*_BATCHNORM, *_KERNELS, "polish"),
    "quickstart": (
        *_UPDATE,
        *_LARS,
        "data/augment.py",
        "data/order.py",
        "polish",
        "runs/launch.py",
    ),
    "reduction": (
        "distributed/horovod.py",
        "distributed/reducer.py",
        "distributed/torch_distributed.py",
    ),
    **dict.fromkeys(
        ["resnet50", "resnet50_28", "resnet50_40", "resnet50_64"], (*_UPDATE, *_LARS, *_KERNELS)
    ),
    **dict.fromkeys(
        ["run_airbench", "run_resnet9_cifar10", "run_resnet9_fashion_mnist"],
        (*_UPDATE, *_LARS, *_KERNELS, *_INPUT, "polish"),
    ),
    "roofline": (*_BATCHNORM, *_KERNELS),
    "storage": (
        *_INPUT,
        "bucket.py",
        "data/order.py",
        "runs/mirror.py",
    ),
    "sweep": _KERNELS,
}
"""Files and folders of the package that each benchmark measures; studies are frozen."""


def measured_files(name: str) -> list[Path]:
    """Return the source files that a benchmark measures, in order."""
    paths = [PACKAGE / path for path in MEASURED[name]]
    files = {file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))}
    return sorted(files)


def sources(name: str) -> dict[str, str]:
    """Return the files that a benchmark measures, each with a digest; {} for a study."""
    files = measured_files(name) if name in MEASURED else []
    return {
        str(file.relative_to(PACKAGE)): digest(file.read_text(encoding="utf-8")) for file in files
    }


def is_stale(name: str, result: dict[str, Any]) -> bool:
    """Return True if the code that a result measured differs from today's."""
    return sorted(result.get("sources", {}).values()) != sorted(sources(name).values())


@cache
def digest(source: str) -> str:
    """Return a digest of a module's code, the same on every version of Python."""
    lines: list[str] = source.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(ast.Constant(str()), lineno=first, end_lineno=int(last)):  # a docstring
                lines[first - 1 : last] = [""] * (last - first + 1)
            case ast.ImportFrom(str(module), names, lineno=first, end_lineno=int(last)):
                if module.partition(".")[0] == "largebatch":
                    imported = sorted(f"{each.name} {each.asname or ''}" for each in names)
                    blank = [""] * (last - first)
                    lines[first - 1 : last] = [f"import {imported}", *blank]
    code = "\n".join(line.rstrip() for line in lines if line.strip())
    return hashlib.sha256(code.encode()).hexdigest()[:16]
