"""The command that polishes what is saved: our runs, and weights from elsewhere. It prints."""

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from largebatch.cli_recipe import Call, add_set, count
from largebatch.errors import CheckpointError, LargebatchError
from largebatch.workers import launched_rank

if TYPE_CHECKING:
    from largebatch.compare import Row
    from largebatch.foreign import Foreign
    from largebatch.runner import Options

_HEAD = f"{'':>12}{'top-1':>9}{'top-5':>9}{'loss':>9}{'seconds':>10}"


def add_commands(
    command: Callable[[str, Call, str], argparse.ArgumentParser],
    add_machine: Callable[[argparse.ArgumentParser], None],
) -> None:
    """Add the command; `add_machine` adds what the machine decides."""
    text = "do the statistics pass on a checkpoint of any run, or on weights from elsewhere"
    polish = command("polish", _polish, text)
    polish.add_argument("checkpoint", type=Path, nargs="?", help="of ours, or a run folder")
    polish.add_argument("--model", metavar="NAME", help="timm's or torchvision's, with --weights")
    polish.add_argument("--weights", type=Path, metavar="FILE", help="a .pth or .safetensors file")
    polish.add_argument("--ema", action="store_true", help="the moving average in --weights")
    polish.add_argument(
        "--out", type=Path, help="new run folder; new file of weights; JSON of --compare"
    )
    polish.add_argument("--samples", type=count, metavar="N", help="pictures to measure (all)")
    polish.add_argument(
        "--compare", action="store_true", help="try every way on copies and print a table"
    )
    polish.add_argument(
        "--epochs", type=float, default=1.0, help="of the updates that --compare makes (1)"
    )
    polish.add_argument(
        "--lr", type=float, help="of their first (0.001 for a global batch of 256, in proportion)"
    )
    add_set(polish)
    add_machine(polish)


def _polish(args: argparse.Namespace) -> int:
    _check(args)
    if args.compare:
        return _compare(args)
    if args.weights is not None:
        from largebatch.foreign import polish_weights

        found = polish_weights(_foreign(args), _options(args), samples=args.samples)
        before, after = map(asdict, found)
        done = f"polished weights: {args.out}"
    else:
        from largebatch.saved import polish_checkpoint

        summary = polish_checkpoint(args.checkpoint, _options(args), samples=args.samples)
        before, after = summary.stages
        discarded = "" if after["kept"] else " (discarded: no better on the pictures held out)"
        done = f"report: {args.out / 'report.html'}{discarded}"
    if (launched_rank() or 0) == 0:
        for key in ("top1", "top5", "loss"):
            print(f"{key:>5}: {before[key]:.4f} -> {after[key]:.4f}")
        print(done)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise LargebatchError for words that do not go together."""
    if (args.model is None) != (args.weights is None):
        raise LargebatchError("--model and --weights go together: a name, and a file for it")
    if (args.checkpoint is None) == (args.weights is None):
        raise LargebatchError(
            "say what to polish: a checkpoint of ours, or --model NAME --weights FILE"
        )
    if args.weights is None and (args.ema or args.set):
        raise LargebatchError("--ema and --set are for --weights; a checkpoint has its own recipe")
    if args.out is None and not args.compare:
        raise LargebatchError("say where the result goes with --out; nothing is overwritten")
    if args.compare and args.out is not None and args.out.exists():
        raise CheckpointError(f"{args.out}: is there already; choose another --out")
    if args.compare and args.out is not None and not args.out.parent.is_dir():
        raise CheckpointError(f"{args.out}: there is no folder {args.out.parent}; make it first")
    if not args.epochs > 0 or (args.lr is not None and not args.lr > 0):
        raise LargebatchError("--epochs and --lr must be above 0")


def _compare(args: argparse.Namespace) -> int:
    first = (launched_rank() or 0) == 0
    rows: list[dict[str, Any]] = []
    for row in _rows(args):
        if first and not rows:
            print(_HEAD)
        rows.append(asdict(row))
        if first:
            print(
                f"{row.mode:>12}{row.top1:>9.2%}{row.top5:>9.2%}{row.loss:>9.4f}"
                f"{row.seconds:>10.1f}",
                flush=True,
            )
    if first and args.out is not None:
        said = {key: getattr(args, key) for key in ("model", "samples", "epochs", "lr")}
        what = {"of": str(args.checkpoint or args.weights), **said, "rows": rows}
        args.out.write_text(json.dumps(what, indent=2) + "\n", encoding="utf-8")
    return 0


def _rows(args: argparse.Namespace) -> Iterator["Row"]:
    how = {"samples": args.samples, "epochs": args.epochs, "lr": args.lr}
    if args.weights is not None:
        from largebatch.foreign import compare_weights

        return compare_weights(_foreign(args), _options(args), **how)
    from largebatch.saved import compare_checkpoint

    return compare_checkpoint(args.checkpoint, _options(args), **how)


def _foreign(args: argparse.Namespace) -> "Foreign":
    from largebatch.foreign import Foreign

    return Foreign(
        model=args.model, weights=args.weights, averaged=args.ema, overrides=tuple(args.set)
    )


def _options(args: argparse.Namespace) -> "Options":
    from largebatch.runner import Options

    return Options(
        out=args.out or Path(),
        data=args.data,
        backend=args.backend,
        device_batch=args.device_batch,
        decoder=args.decoder,
    )
