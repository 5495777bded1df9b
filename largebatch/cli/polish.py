"""The command `polish`: the statistics pass on a run or on pretrained weights. It prints."""

import argparse
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from largebatch.cli.arguments import (
    Command,
    add_execution,
    add_machine,
    add_set,
    add_workers,
    count,
    options_of,
)
from largebatch.distributed.environment import own_rank
from largebatch.errors import CheckpointError, LargebatchError, printable
from largebatch.formatting import aligned
from largebatch.recipe.section import LARGEST, MAX_EPOCHS
from largebatch.tracking.events import LOG, REPORT, Drift, Evaluation, LayerDrift, write_json

if TYPE_CHECKING:
    from largebatch.runs.checkpoints import Comparison
    from largebatch.runs.pretrained import Pretrained

_EPOCHS = 1.0
"""Default epochs of a comparison's updates."""

_HEAD = ("method    ", "  top-1", "  top-5", "  loss", "seconds", "")
"""Headers of the comparison, as wide as its columns: its rows are printed one at a time."""


def add_commands(command: Command) -> None:
    """Add the command `polish`."""
    text = "recompute BatchNorm statistics of a run or of pretrained weights"
    polish = command("polish", _polish, text)
    polish.add_argument("checkpoint", type=Path, nargs="?", help="a checkpoint, or a run folder")
    polish.add_argument("--model", metavar="NAME", help="timm's or torchvision's, with --weights")
    polish.add_argument("--weights", type=Path, metavar="FILE", help="a .pth or .safetensors file")
    polish.add_argument(
        "--ema",
        action="store_true",
        help="use the moving average of the weights, in --weights or in an unfinished run",
    )
    polish.add_argument(
        "--out", type=Path, help="new run folder; new file of weights; JSON of --compare"
    )
    polish.add_argument("--samples", type=count, metavar="N", help="images to measure (all)")
    polish.add_argument(
        "--compare", action="store_true", help="try every method on copies and print a table"
    )
    polish.add_argument(
        "--epochs", type=float, help=f"epochs of updates that --compare makes ({_EPOCHS:g})"
    )
    polish.add_argument(
        "--lr",
        type=float,
        help="first learning rate of --compare (0.001 for a global batch of 256, in proportion)",
    )
    add_set(polish)
    add_execution(polish)
    add_workers(polish)
    add_machine(polish)


def _polish(args: argparse.Namespace) -> int:
    _check(args)
    if args.compare:
        return _compare(args)
    options = options_of(args, out=args.out)
    if args.weights is not None:
        from largebatch.runs.pretrained import polish_weights

        result = polish_weights(_pretrained(args), options, samples=args.samples)
        before, after = asdict(result.before), asdict(result.after)
        layers, samples = tuple(result.drift), result.after.samples
        done = "\n".join([*filter(None, [result.note]), f"polished weights: {args.out}"])
    else:
        from largebatch.runs.checkpoints import polish_checkpoint

        summary = polish_checkpoint(args.checkpoint, options, samples=args.samples, ema=args.ema)
        before, after = map(asdict, summary.stages)
        layers, samples = _logged(args.out / LOG)
        undone = "" if after["kept"] else " (rolled back: no better on the images held out)"
        done = f"report: {args.out / REPORT}{undone}"
    if own_rank() == 0:
        top1 = f"top-1 {before['top1']:.2%} -> {after['top1']:.2%} on {samples:,} validation images"
        print(printable(f"{_describe(layers)}; {top1}"))
        for name, key, form in (("top-5", "top5", ".2%"), ("loss", "loss", ".4f")):
            print(f"{name:>5}: {before[key]:{form}} -> {after[key]:{form}}")
        print(printable(done))
    return 0


def _logged(log: Path) -> tuple[tuple[LayerDrift, ...], int]:
    """Return the drift of each layer and the number of validation images from a run's log."""
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
    """Format how far the statistics of the worst layers were off."""
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


def _check(args: argparse.Namespace) -> None:
    """Raise LargebatchError for options that exclude each other."""
    if (args.model is None) != (args.weights is None):
        raise LargebatchError("--model and --weights go together: a name, and a file for it")
    if (args.checkpoint is None) == (args.weights is None):
        raise LargebatchError(
            "nothing to polish: pass a checkpoint of ours, or --model NAME --weights FILE"
        )
    if not args.compare and (args.epochs is not None or args.lr is not None):
        raise LargebatchError(
            "--epochs and --lr are for --compare, which makes updates; the statistics pass makes "
            "none: add --compare or leave them out"
        )
    if any(number is not None and not number > 0 for number in (args.epochs, args.lr)):
        raise LargebatchError("--epochs and --lr must be above 0")
    if (args.epochs or 0) > MAX_EPOCHS or (args.lr or 0) > LARGEST:
        raise LargebatchError(f"expected --epochs up to {MAX_EPOCHS:,} and --lr up to {LARGEST:g}")
    _check_out(args)


def _check_out(args: argparse.Namespace) -> None:
    """Raise LargebatchError unless --out is a new place, where one is needed."""
    if args.out is None and not args.compare:
        raise LargebatchError("pass --out for the result; nothing is overwritten")
    if args.compare and args.out is not None and args.out.exists():
        raise CheckpointError(f"{args.out}: exists already; choose another --out")
    if args.compare and args.out is not None and not args.out.parent.is_dir():
        raise CheckpointError(f"{args.out}: there is no folder {args.out.parent}; make it first")


def _compare(args: argparse.Namespace) -> int:
    first = own_rank() == 0
    rows: list[dict[str, Any]] = []
    with _comparison(args) as result:
        for row in result.rows:
            if first:
                accuracies = (f"{row.top1:.2%}", f"{row.top5:.2%}", f"{row.loss:.4f}")
                cells = (row.mode, *accuracies, f"{row.seconds:.1f}", row.note or "")
                lines = aligned([_HEAD, cells], right=range(1, 5)).splitlines()
                print("\n".join(lines[bool(rows) :]), flush=True)
            rows.append(asdict(row))
    if first and args.out is not None:
        what = {
            "of": str(args.checkpoint or args.weights),
            **{key: getattr(args, key) for key in ("model", "samples", "lr")},
            "epochs": args.epochs or _EPOCHS,
            **{key: getattr(result, key) for key in ("commit", "versions", "data")},
            "rows": rows,
        }
        write_json(args.out, what)
    return 0


def _comparison(args: argparse.Namespace) -> AbstractContextManager["Comparison"]:
    how = {"samples": args.samples, "epochs": args.epochs or _EPOCHS, "lr": args.lr}
    options = options_of(args, out=args.out)
    if args.weights is not None:
        from largebatch.runs.pretrained import compare_weights

        return compare_weights(_pretrained(args), options, **how)
    from largebatch.runs.checkpoints import compare_checkpoint

    return compare_checkpoint(args.checkpoint, options, **how, ema=args.ema)


def _pretrained(args: argparse.Namespace) -> "Pretrained":
    from largebatch.runs.pretrained import Pretrained

    return Pretrained(model=args.model, weights=args.weights, ema=args.ema)
