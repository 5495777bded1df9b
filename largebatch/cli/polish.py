"""The command `polish`: the statistics pass on a run or on weights. It prints."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from largebatch.distributed.environment import own_rank
from largebatch.errors import LargebatchError, printable
from largebatch.runs.options import Count, Given, Machine
from largebatch.tracking.events import REPORT, LayerDrift


def polish(  # noqa: PLR0913 -- its options
    checkpoint: Path | None = None,
    /,
    *,
    out: Path,
    model: str | None = None,
    weights: Path | None = None,
    ema: bool = False,
    samples: Count | None = None,
    options: Annotated[Machine, Given] = Machine(),
) -> None:
    """Recompute BatchNorm statistics of a run, or of weights of another program.

    Args:
        checkpoint: A checkpoint, or a run folder.
        out: New run folder; a new .safetensors file for --weights.
        model: Network of timm, or torchvision/NAME, with --weights.
        weights: A .pth or .safetensors file, in place of a checkpoint.
        ema: Use the moving average in --weights.
        samples: Number of images to measure (all).
    """
    if (checkpoint is None) == (weights is None) or (model is None) != (weights is None):
        raise LargebatchError("polish: pass a checkpoint, or --model NAME --weights FILE")
    run_options = options.options(out=out)
    if checkpoint is not None:
        from largebatch.runs.checkpoints import polish_checkpoint

        summary = polish_checkpoint(checkpoint, run_options, samples=samples)
        if own_rank() > 0:  # has no log
            return
        from largebatch.report.run import read_run

        before, after = map(asdict, summary.stages)
        run = read_run(out)
        assert run.drift is not None
        assert run.result is not None
        layers, measured = run.drift.layers, run.result.samples
        undone = "" if after["kept"] else " (rolled back: no better on the images held out)"
        done = f"report: {out / REPORT}{undone}"
    else:
        assert model is not None
        assert weights is not None
        from largebatch.runs.pretrained import polish_weights

        found = polish_weights(model, weights, run_options, ema=ema, samples=samples)
        before, after = asdict(found.before), asdict(found.after)
        layers, measured = tuple(found.drift), found.after.samples
        done = f"polished weights: {out}"
    if own_rank() == 0:
        top1 = f"top-1 {before['top1']:.2%} -> {after['top1']:.2%}"
        print(printable(f"{_describe(layers)}; {top1} on {measured:,} validation images"))
        for name, key, form in (("top-5", "top5", ".2%"), ("loss", "loss", ".4f")):
            print(f"{name:>5}: {before[key]:{form}} -> {after[key]:{form}}")
        print(printable(done))


def _describe(layers: Sequence[LayerDrift]) -> str:
    lost = [layer for layer in layers if not math.isfinite(layer.mean_shift)]
    if lost:
        return f"statistics were not finite (layer {lost[0].name})"
    shift = max(layers, key=lambda layer: layer.mean_shift)
    ratio = max(layers, key=lambda layer: layer.log_variance_ratio)
    return (
        f"statistics were off by up to {shift.mean_shift:.2g} standard deviations "
        f"(layer {shift.name}) and a factor of {math.exp(ratio.log_variance_ratio):.2g} in "
        f"variance (layer {ratio.name})"
    )
