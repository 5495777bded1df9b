"""The command `polish`: the statistics pass on a run or on pretrained weights. It prints."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from largebatch.distributed.environment import own_rank
from largebatch.errors import CheckpointError, LargebatchError, printable
from largebatch.formatting import aligned
from largebatch.recipe.section import LARGEST, MAX_EPOCHS
from largebatch.runs.options import NEW_FOLDER, Count, Given, Machine, Number, Options
from largebatch.tracking.events import LOG, REPORT, Drift, Evaluation, LayerDrift, write_json

if TYPE_CHECKING:
    from largebatch.runs.checkpoints import Comparison
    from largebatch.runs.pretrained import Pretrained

_EPOCHS = 1.0
"""Default epochs of a comparison's updates."""

_HEAD = ("method    ", "  top-1", "  top-5", "  loss", "seconds", "")
"""Headers of the comparison, as wide as its columns: its rows are printed one at a time."""


def polish(  # noqa: PLR0913 -- its options
    checkpoint: Path | None = None,
    /,
    *,
    model: str | None = None,
    weights: Path | None = None,
    ema: bool = False,
    out: Path | None = None,
    samples: Count | None = None,
    compare: bool = False,
    epochs: Number | None = None,
    lr: Number | None = None,
    options: Annotated[Machine, Given] = Machine(),
) -> None:
    """Recompute BatchNorm statistics of a run or of pretrained weights.

    Args:
        checkpoint: A checkpoint, or a run folder.
        model: Network of timm or torchvision, with --weights.
        weights: A .pth or .safetensors file.
        ema: Use the moving average of the weights, in --weights or in an unfinished run.
        out: New run folder; new file of weights; JSON of --compare.
        samples: Number of images to measure (all).
        compare: Try every method on copies and print a table.
        epochs: Epochs of updates that --compare makes (1).
        lr: First learning rate of --compare (0.001 for a global batch of 256, in proportion).
    """
    if (model is None) != (weights is None):
        raise LargebatchError("--model and --weights go together: a name, and a file for it")
    if (checkpoint is None) == (weights is None):
        raise LargebatchError(
            "nothing to polish: pass a checkpoint of ours, or --model NAME --weights FILE"
        )
    if not compare and (epochs is not None or lr is not None):
        raise LargebatchError(
            "--epochs and --lr are for --compare, which makes updates; the statistics pass makes "
            "none: add --compare or leave them out"
        )
    if (epochs or 0) > MAX_EPOCHS or (lr or 0) > LARGEST:
        raise LargebatchError(f"expected --epochs up to {MAX_EPOCHS:,} and --lr up to {LARGEST:g}")
    if out is None and not compare:
        raise LargebatchError("pass --out for the result; nothing is overwritten")
    if compare and out is not None:
        if out.exists():
            raise CheckpointError(f"{out}: exists already; choose another --out")
        if not out.parent.is_dir():
            raise CheckpointError(f"{out}: there is no folder {out.parent}; make it first")
    from largebatch.runs.checkpoints import compare_checkpoint
    from largebatch.runs.pretrained import Pretrained, compare_weights

    run_options = options.options(out=out or NEW_FOLDER)
    source: Path | Pretrained
    if weights is not None:
        assert model is not None
        source = Pretrained(model=model, weights=weights, ema=ema)
    else:
        assert checkpoint is not None
        source = checkpoint
    if not compare:
        _polish(source, run_options, samples=samples, ema=ema)
        return
    how: dict[str, Any] = {"samples": samples, "epochs": epochs or _EPOCHS, "lr": lr}
    comparison = (
        compare_checkpoint(source, run_options, **how, ema=ema)
        if isinstance(source, Path)
        else compare_weights(source, run_options, **how)
    )
    _compare(comparison, out, {"of": str(checkpoint or weights), "model": model, **how})


def _polish(
    source: "Path | Pretrained", options: Options, *, samples: int | None, ema: bool
) -> None:
    if isinstance(source, Path):
        from largebatch.runs.checkpoints import polish_checkpoint

        summary = polish_checkpoint(source, options, samples=samples, ema=ema)
        before, after = map(asdict, summary.stages)
        layers, measured = _logged(options.out / LOG)
        undone = "" if after["kept"] else " (rolled back: no better on the images held out)"
        done = f"report: {options.out / REPORT}{undone}"
    else:
        from largebatch.runs.pretrained import polish_weights

        result = polish_weights(source, options, samples=samples)
        before, after = asdict(result.before), asdict(result.after)
        layers, measured = tuple(result.drift), result.after.samples
        done = f"polished weights: {options.out}"
    if own_rank() == 0:
        top1 = f"top-1 {before['top1']:.2%} -> {after['top1']:.2%}"
        print(printable(f"{_describe(layers)}; {top1} on {measured:,} validation images"))
        for name, key, form in (("top-5", "top5", ".2%"), ("loss", "loss", ".4f")):
            print(f"{name:>5}: {before[key]:{form}} -> {after[key]:{form}}")
        print(printable(done))


def _logged(log: Path) -> tuple[tuple[LayerDrift, ...], int]:
    from largebatch.tracking.scalars import logged

    layers: tuple[LayerDrift, ...] = ()
    samples = 0
    for event in logged(log):
        if isinstance(event, Drift):
            layers = event.layers
        elif isinstance(event, Evaluation):
            samples = event.samples
    return layers, samples


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


def _compare(
    comparison: AbstractContextManager["Comparison"], out: Path | None, given: dict[str, Any]
) -> None:
    first = own_rank() == 0
    rows: list[dict[str, Any]] = []
    with comparison as result:
        for row in result.rows:
            if first:
                accuracies = (f"{row.top1:.2%}", f"{row.top5:.2%}", f"{row.loss:.4f}")
                cells = (row.mode, *accuracies, f"{row.seconds:.1f}", row.note or "")
                lines = aligned([_HEAD, cells], right=range(1, 5)).splitlines()
                print("\n".join(lines[bool(rows) :]), flush=True)
            rows.append(asdict(row))
    if first and out is not None:
        circumstances = {key: getattr(result, key) for key in ("commit", "versions", "data")}
        write_json(out, {**given, **circumstances, "rows": rows})
