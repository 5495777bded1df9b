"""Write benchmarks/README.md: one table of the newest result of each benchmark.

    python benchmarks/table.py

A cell holds the median of the paired ratio, its 95 % interval and n. "not measured" means that
benchmarks/results/ has no file of this benchmark for this kind of machine; "stale" means that the
code that the figure measures has changed since.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import RESULTS
from sources import is_stale

PAGE = Path(__file__).parent / "README.md"
MACHINES = ("CPU", "GPU")


@dataclass(frozen=True, slots=True)
class Row:
    """One ratio: where it lies in the results of a benchmark, and what it should be."""

    what: str
    target: str
    benchmark: str
    path: tuple[str, ...]


ROWS = (
    Row("LARS on ResNet-50 / timm `Lars`", "<= 0.6", "lars", ("ratios", "ours / timm")),
    Row("LARS on ResNet-50 / `SGD(fused=True)`", "<= 1.4", "lars", ("ratios", "ours / sgd")),
    Row(
        "ResNet-50, BatchNorm span 32 in a batch of 64 / `nn.BatchNorm2d`",
        "<= 1.10",
        "norm",
        ("span 32", "to nn.BatchNorm2d"),
    ),
    Row(
        "step of two workers, over torch / `DistributedDataParallel(broadcast_buffers=False)`",
        "1.0 in the interval",
        "reduction",
        ("two workers", "ratios", "ours, torch / DDP"),
    ),
    Row(
        "step of two workers, over torch / `hvd.DistributedOptimizer`",
        "<= 0.9",
        "reduction",
        ("two workers, Horovod loaded", "ratios", "ours, torch / Horovod's optimizer"),
    ),
    Row(
        "step of two workers, over Horovod / `hvd.DistributedOptimizer`",
        "<= 0.9",
        "reduction",
        ("two workers, Horovod loaded", "ratios", "ours, Horovod / Horovod's optimizer"),
    ),
    Row(
        "`train()` / bare loop (CPU: ResNet-18, GPU: ResNet-50)",
        "<= 1.02",
        "loop",
        ("large", "ratio"),
    ),
    Row(
        "statistics pass, ResNet-18 at 96 pixels / plain forward in training mode",
        "<= 1.03",
        "polish",
        ("NCHW", "ratios", "ours / forward"),
    ),
    Row(
        "statistics pass, ResNet-18 at 96 pixels / `swa_utils.update_bn`",
        "<= 1.03",
        "polish",
        ("NCHW", "ratios", "ours / update_bn"),
    ),
    Row(
        "statistics pass, ResNet-18 at 96 pixels / fvcore `update_bn_stats`",
        "<= 1.03",
        "polish",
        ("NCHW", "ratios", "ours / fvcore"),
    ),
    Row(
        "statistics pass, the same with BatchNorm span 32 / plain forward without",
        "<= 1.03",
        "polish",
        ("NCHW", "ratios", "ours, span 32 / forward"),
    ),
    Row(
        "statistics pass, channels last, ResNet-18 at 96 pixels / plain forward in training mode",
        "<= 1.03",
        "polish",
        ("channels last", "ratios", "ours / forward"),
    ),
    Row(
        "input of ImageNet's size in the thread that trains / 3 microseconds an image",
        "<= 1.0",
        "input_host",
        ("ratios", "ours / target"),
    ),
    Row(
        "full-size JPEGs decoded by DALI / DALI's own reader",
        "<= 1.0",
        "input_pipeline",
        ("full-size JPEGs", "ratios", "ours on DALI / DALI's reader"),
    ),
    Row(
        "full-size JPEGs decoded by DALI / torchvision's `DataLoader`, 2 workers",
        "<= 0.77",
        "input_pipeline",
        ("full-size JPEGs", "ratios", "ours on DALI / DataLoader"),
    ),
    Row(
        "CIFAR-10 from `cache: memory` / decoded each time by torchvision",
        "<= 0.33",
        "input_pipeline",
        ("CIFAR-10", "ratios", "cache / decoded by torchvision"),
    ),
    Row(
        "CIFAR-10 from `cache: memory` / decoded each time by DALI",
        "<= 0.33",
        "input_pipeline",
        ("CIFAR-10", "ratios", "cache / decoded by DALI"),
    ),
    Row(
        "images of 32 pixels from `cache: device`, batches of 4,096 / 200,000 images a second",
        "<= 1.0",
        "input_gpu",
        ("small images, batches of 4096", "ratios", "device / target"),
    ),
    Row(
        "images of 32 pixels from `cache: device` / `cache: memory` and copied, batches of 4,096",
        "<= 1.0",
        "input_gpu",
        ("small images, batches of 4096", "ratios", "device / memory"),
    ),
    Row(
        "full-size JPEGs decoded by DALI on the GPU / DALI's own reader there",
        "<= 1.0",
        "input_gpu",
        ("full-size JPEGs", "ratios", "ours / DALI's reader"),
    ),
    Row(
        "ResNet-50 at 224 pixels in bf16, `train()` with LARS / timm's loop with its `Lars`",
        "<= 1.0",
        "resnet50",
        ("ratios", "ours / timm"),
    ),
    Row(
        "ResNet-50 at 224 pixels in bf16, `train()` with LARS / plain loop with SGD",
        "<= 1.05",
        "resnet50",
        ("ratios", "ours / plain"),
    ),
    Row(
        "the same, both compiled: `train()` / timm's loop",
        "<= 0.85",
        "resnet50",
        ("ratios", "ours, compiled: default / timm, compiled: default"),
    ),
    Row(
        "the same, `train()` compiled / not compiled",
        "< 1.0",
        "resnet50",
        ("ratios", "ours, compiled: default / ours"),
    ),
    Row(
        "the same, `train()` with `reduce-overhead` / timm's loop compiled",
        "<= 1.0",
        "resnet50",
        ("ratios", "ours, compiled: reduce-overhead / timm, compiled: default"),
    ),
    Row(
        "the same, peak memory of `train()` / of timm's loop",
        "<= 1.0",
        "resnet50",
        ("ratios of peak memory", "ours / timm"),
    ),
    Row(
        "the same, share of the peak of a matrix product, `train()` compiled",
        "the larger the better",
        "resnet50",
        ("share of the peak", "ours, compiled: default"),
    ),
    Row(
        "the same, not compiled, time of the device in an update: `train()` / plain loop",
        "<= 0.68",
        "resnet50",
        ("ratios of device time", "ours / plain"),
    ),
    Row(
        "the same with 28 images, `train()` compiled / timm's loop compiled",
        "<= 0.85",
        "resnet50_28",
        ("ratios", "ours, compiled: default / timm, compiled: default"),
    ),
    Row(
        "LARS on ResNet-50, time of the device as a share of the bandwidth of a copy",
        ">= 0.8",
        "lars",
        ("share of the bandwidth", "ours"),
    ),
    *(
        Row(
            f"256 images of 256 x 56 x 56 in bf16, BatchNorm {kind}{what}", target, "roofline", path
        )
        for kind in ("+ ReLU", "+ sum + ReLU")
        for what, target, path in (
            (" / PyTorch's", "<= 0.45", (f"256x256x56 {kind}", "ratios", "ours / PyTorch")),
            (
                ", spans of 8 / one",
                "<= 1.1",
                (f"256x256x56 {kind}", "ratios", "ours, span 8 / ours"),
            ),
            (
                ", share of the bandwidth of a copy",
                ">= 0.85",
                (f"256x256x56 {kind}", "share of the bandwidth", "ours"),
            ),
        )
    ),
)

HEAD = """# Measurements

Written by `python benchmarks/table.py` from the files in `results/`, which hold the command, the
machine, versions, commit, n, spread and the source files that were measured. Ratios are of times,
ours first; shares are of rates. Both are paired round by round: median (95 % bootstrap interval,
n). "stale" means that the measured source files have changed since in more than comments;
`make bench` measures these again. What Final Polishing does to accuracy is in
[docs/final-polishing.md](../docs/final-polishing.md#when-it-helps-and-when-not), from
`make study`; what recipes reach when they are trained to their end, in
[docs/recipes/pairs.md](../docs/recipes/pairs.md), from `make measure`.

"""


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)


def page() -> str:
    """Return the table, then the command of every benchmark that has results."""
    newest = {kind: _newest(kind) for kind in MACHINES}
    lines = ["| what | target | CPU | GPU |", "|---|---|---|---|"]
    for row in ROWS:
        cells = [_cell(newest[kind].get(row.benchmark), row) for kind in MACHINES]
        lines.append(f"| {row.what} | {row.target} | {' | '.join(cells)} |")
    lines.append("")
    for kind in MACHINES:
        for name, result in sorted(newest[kind].items()):
            about = result if "command" in result else next(iter(result.values()))
            lines.append(f"- {name}, {kind}: {about['machine']}, {about['date']}, ")
            lines[-1] += f"torch {about['versions']['torch']}: `{about['command']}`"
            lines[-1] += _mark(name, result)
        if not newest[kind]:
            lines.append(f"- {kind}: not measured")
    return HEAD + "\n".join(lines) + "\n"


def _newest(kind: str) -> dict[str, Any]:
    """Return the newest result of each benchmark on one kind of machine.

    One that is measured piece by piece says of each piece by what command, where and when.
    """
    found: dict[str, Any] = {}
    for path in sorted(RESULTS.glob("*.json"), key=lambda path: path.stem.rpartition("_")[2]):
        name, hardware, _ = path.stem.rsplit("_", 2)
        if hardware.startswith("cpu") == (kind == "CPU"):
            found[name] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _cell(result: Any, row: Row) -> str:  # noqa: ANN401 -- JSON
    figure = result
    for key in row.path:
        if figure is None:
            return "not measured"
        figure = figure.get(key)
    if figure is None:
        return "not measured"
    return "{median:.3f} ({low:.3f} to {high:.3f}, {n})".format(**figure) + _mark(
        row.benchmark, result
    )


def _mark(name: str, result: dict[str, Any]) -> str:
    """Return what follows a figure: that it is stale, or nothing."""
    return ", stale" if is_stale(name, result) else ""


if __name__ == "__main__":
    main()
