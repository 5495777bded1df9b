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

PACKAGE = Path(__file__).parents[1] / "largebatch"

_BATCHNORM = ("models/batchnorm.py", "models/batchnorm_functional.py")
_KERNELS = ("models/fusion.py", "models/kernels")
_LARS = ("optim/kernels", "optim/lars.py")
_UPDATE = ("distributed/reducer.py", *_BATCHNORM, "training/loop.py", "training/loss.py")
_INPUT = ("data/augment.py", "data/batches.py", "data/decoders", "data/pipeline.py")
_TRAINING = (*_UPDATE, *_LARS, "data/augment.py", "data/order.py", "schedules/functions.py")
_POLICIES = (*_TRAINING, "schedules/cycles.py", "lab/studies/metrics.py")
_OPTIMIZERS = (*_TRAINING, "optim", "polish", "tracking/noise_scale.py", "training/stages.py")
_PLANNER = ("lab/planner/calibration.py", "lab/planner/model.py", "lab/planner/prediction.py")
_LATE = tuple(
    f"lab/protocols/{name}.py" for name in ("arrivals", "exchange", "learner", "rule", "stage")
)
_CHECKPOINT = ("training/checkpoint.py", "training/state.py")
_DIAGNOSIS = tuple(f"report/{name}.py" for name in ("diagnosis", "pair", "record"))

MEASURED = {
    "accuracy_fell": tuple(f"audit/{it}.py" for it in ("gradient", "rates", "samples")),
    "airbench": (
        *_TRAINING,
        "models/airbench.py",
        "models/views.py",
        "optim/muon.py",
        "optim/sgd.py",
    ),
    "audit_cost": ("audit",),
    "audit_faults": ("audit",),
    "audit_published": ("audit",),
    "averaged_weights": ("models/cifar_resnet9.py", "polish"),
    "batch_throughput": ("training/loop.py", "models/lenet5.py"),
    "batch_advice": (
        "lab/measure/batch.py",
        "lab/measure/critical_batch.py",
        "tracking/noise_scale.py",
    ),
    "checkpoint": _CHECKPOINT,
    "checkpoint_busy": _CHECKPOINT,
    "configurations": (
        *_TRAINING,
        "lab/studies/queue/usage.py",
        "lab/studies/settings/correlations.py",
    ),
    "critical_batch": ("lab/measure/critical_batch.py", "tracking/noise_scale.py"),
    "critical_batch_fashion_mnist": ("lab/measure/critical_batch.py", "tracking/noise_scale.py"),
    "decoder_pixels": ("data/augment.py", "data/decoders"),
    "diagnosis": _DIAGNOSIS,
    "defaults": (
        *_TRAINING,
        "lab/studies/settings/settings.py",
        "lab/studies/settings/transfer.py",
    ),
    "false_alarms": ("lab/studies/metrics.py",),
    "frameworks": _TRAINING,
    "gradient_times": ("models/lenet5.py", "models/lstm.py", "training/loss.py", *_BATCHNORM),
    "index": ("data/index",),
    "input_gpu": _INPUT,
    "input_host": (*_INPUT, "data/index/file.py", "data/order.py"),
    "input_pipeline": _INPUT,
    "lars": _LARS,
    "learning_rates": _POLICIES,
    "learning_rates_best_trial": _POLICIES,
    "learning_rates_half_trials": _POLICIES,
    "learning_rates_shapes": (
        *_POLICIES,
        "lab/measure/lr_range.py",
        "lab/measure/lr_range.py",
    ),
    "local_steps": (*_LATE, "training/loss.py", "lab/protocols/gradients.py"),
    "loop": _UPDATE,
    "noise_cost": ("distributed/reducer.py", "training/loop.py"),
    "norm": _BATCHNORM,
    "optimizers": _OPTIMIZERS,
    "optimizers_together": _OPTIMIZERS,
    "planner": (*_PLANNER, "lab/planner/published.py"),
    "momentum_by_tau": (*_LATE, "training/loss.py"),
    "momentum_quadratic": ("lab/protocols/rule.py",),
    "planner_logs": ("lab/planner/published.py",),
    "planner_here": (*_PLANNER, "lab/measure/calibrate.py"),
    "polish": (*_BATCHNORM, "polish"),
    "polish_error": (*_BATCHNORM, "polish"),
    "polishing_optimizers": (*_TRAINING, "optim", "polish", "training/stages.py"),
    "polishing_study": (*_TRAINING, "polish", "training/stages.py"),
    "quickstart": (*_TRAINING, "polish", "training/stages.py"),
    "range_test": (*_TRAINING, "lab/measure/lr_range.py", "lab/measure/lr_range.py"),
    "rate_drops": (
        "distributed/torch_distributed.py",
        "schedules/functions.py",
        "training/loop.py",
    ),
    "recipes": (*_TRAINING, "polish", "training/stages.py"),
    "reduction": (
        "distributed/horovod.py",
        "distributed/reducer.py",
        "distributed/torch_distributed.py",
    ),
    "resnet50": (*_UPDATE, *_LARS, *_KERNELS),
    "resnet50_28": (*_UPDATE, *_LARS, *_KERNELS),
    "roofline": (*_BATCHNORM, *_KERNELS),
    "scaling": (*_LATE, "lab/studies/scaling/rows.py"),
    "servers": ("lab/studies/servers/rows.py", "lab/protocols/service.py"),
    "servers_digits": ("lab/studies/servers/rows.py", "lab/protocols/service.py"),
    "servers_simulated": (
        "lab/studies/servers/simulated.py",
        "lab/protocols/fair_links.py",
        "lab/protocols/simulator.py",
    ),
    "simulator": ("lab/protocols/simulator.py",),
    "soak": (*_CHECKPOINT, "runs/interrupts.py", "runs/launch.py", "training/loop.py"),
    "speed_up": tuple(f"lab/protocols/{name}.py" for name in ("rule", "server", "simulator")),
    "staleness": (*_LATE, "training/loss.py"),
    "staleness_rudra_imagenette": (*_LATE, "training/loss.py"),
    "staleness_rudra_small": (*_LATE, "training/loss.py"),
    "staleness_times": ("lab/protocols/simulator.py",),
    "sweep": _KERNELS,
    "warmup_by_tau": (*_LATE, "training/loss.py"),
}
"""Files and folders of the package whose speed or accuracy each benchmark measures."""


def measured_files(name: str) -> list[Path]:
    """Return the source files that a benchmark measures, in order."""
    paths = [PACKAGE / path for path in MEASURED[name]]
    files = {file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))}
    return sorted(files)


def sources(name: str) -> dict[str, str]:
    """Return the files that a benchmark measures, each with a digest of its code."""
    return {
        str(file.relative_to(PACKAGE)): digest(file.read_text(encoding="utf-8"))
        for file in measured_files(name)
    }


def is_stale(name: str, result: dict[str, Any]) -> bool:
    """Return True if the code that a result measured differs from today's."""
    today = sorted(sources(name).values())
    parts = [result] if "command" in result else result.values()  # measured piece by piece
    return any(sorted(part.get("sources", {}).values()) != today for part in parts)


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
