"""Draw the figure of the study of averaged weights, and print its tables.

    python -m benchmarks.studies.averaged_weights.tables

Reads the newest averaged_weights_<machine>_<date>.json, writes averaged_weights.svg beside it and
prints the tables of docs/final-polishing.md, which leaves out `update_bn` on one worker.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any

from benchmarks.speed.measuring import RESULTS, frozen
from benchmarks.studies.figures import save_svg
from largebatch.report.seeds import Interval, interval
from largebatch.report.style import COLOURS, INK, MUTED, RULE

if TYPE_CHECKING:
    from largebatch.report.style import Axes, Figure

NAME = "averaged_weights"
SHARED = (
    "EMA 0.999, peak",
    "SWA, peak",
    "Schedule-Free SGD, end",
    "Schedule-Free AdamW, end",
    "soup of 3, end",
)
"""Averages that several workers, and augmented images, were measured with."""

TITLES = {"fashion_mnist": "Fashion-MNIST", "cifar10": "CIFAR-10"}
ROWS = {
    "SWA, peak": "SWA",
    "EMA 0.99, peak": "EMA 0.99",
    "EMA 0.999, peak": "EMA 0.999",
    "LAWA, peak": "LAWA",
    "Schedule-Free SGD, end": "Schedule-Free SGD",
    "Schedule-Free AdamW, end": "Schedule-Free AdamW",
    "soup of 3, end": "soup of 3",
    "EMA 0.99, end": "EMA 0.99",
    "EMA 0.999, end": "EMA 0.999",
    "LAWA, end": "LAWA",
}
"""Averages in the order of the figure, with their labels."""

PASSES = {
    "as left": "as left",
    "averaged": "buffers averaged too",
    "own": "`update_bn`, clean images",
    "polish": "`polish`, clean images",
    "augmented": "`update_bn`, images as in training",
    "polish augmented": "`polish`, images as in training",
}
"""Passes on one worker, and the images that they measure."""

ON_WORKERS = {
    "own": "`update_bn` on every worker",
    "mean": "`update_bn`, then the mean over the workers",
    "polish": "`polish`",
}
"""Passes on several workers; `ddp` is `own`, since DistributedDataParallel sends no buffers."""

Study = dict[str, Any]


def values(study: Study, data: str, weights: str, kind: str, workers: int = 1) -> list[Any]:
    """Return what each seed found in a pass, seed by seed."""
    return [
        found[kind]
        for seed in sorted(study["seeds"].values(), key=lambda seed: seed["seed"])
        if seed["data"] == data
        and (found := seed["weights"].get(weights, {}).get(str(workers), {}))
        and kind in found
    ]


def top1(study: Study, data: str, weights: str, kind: str) -> list[float]:
    """Return top-1 of every seed on one worker, in percent."""
    return [100 * found["top1"][0] for found in values(study, data, weights, kind)]


def draw(figure: "Figure", *, study: Study) -> None:
    """Draw top-1 of the averages of SHARED as left, polished on clean images and as in training."""
    seeds = sorted({seed["seed"] for seed in study["seeds"].values()})
    count = f"mean of {len(seeds)} seeds, faint: each" if len(seeds) > 1 else "one seed"
    figure.suptitle(
        "Top-1 of averaged weights: as the library leaves them,\nand after one polish() call",
        x=0.01, ha="left", size=13.5, weight="bold", color=INK,
    )  # fmt: skip
    figure.supxlabel(
        "Squares: running statistics averaged too. Hollow diamonds: polished on clean\n"
        "images, not on images augmented as in training. EMA and SWA at the peak rate;\n"
        f"ResNet-9, width 16, batches of 128; {count}.",
        x=0.01, ha="left", size=9, color=MUTED,
    )  # fmt: skip
    measured = [data for data in TITLES if values(study, data, "SWA, peak", "polish")]
    panels = figure.subplots(len(measured), 1, squeeze=False)[:, 0]
    for axes, data in zip(panels, measured, strict=True):
        for height, weights in enumerate(SHARED):
            _draw_row(axes, height, study, data, weights)
        axes.set_title(TITLES[data], color=INK, weight="bold", size=12.5)
        low, high = axes.get_xlim()
        low, high = low - 0.12 * (high - low), high + 0.3 * (high - low)  # room for figures
        axes.set_xticks([tick for tick in axes.get_xticks() if low <= tick <= min(high, 100)])
        axes.set_xlim(low, high)
        axes.set_ylim(len(SHARED) - 0.5, -0.6)
        axes.grid(visible=False, axis="y")
        axes.grid(visible=True, axis="x", color=RULE)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("Top-1 on the test images, % →", loc="right")
        axes.set_yticks(range(len(SHARED)), [ROWS[weights] for weights in SHARED])


def _draw_row(axes: "Axes", height: int, study: Study, data: str, weights: str) -> None:
    left, clean, polished = (
        top1(study, data, weights, kind) for kind in ("as left", "polish", "polish augmented")
    )
    if not left:
        return
    before, after = interval(left).mean, interval(polished).mean
    averaged = top1(study, data, weights, "averaged")
    colour = COLOURS["statistics"]
    axes.plot([before, after], [height] * 2, color=colour, alpha=0.35, lw=4, solid_capstyle="butt")
    for found, ink in ((left, MUTED), (polished, colour)):
        axes.plot(found, [height] * len(found), color=ink, alpha=0.35, marker="o", ms=4, lw=0)
    axes.plot([before], [height], color=MUTED, marker="o", ms=7)
    if averaged:
        mean = interval(averaged).mean
        axes.plot([mean], [height], color=MUTED, marker="s", ms=6, mfc="none", mec=MUTED)
    axes.plot(
        [interval(clean).mean], [height], color=colour, marker="D", ms=6, mfc="none", mec=colour
    )
    axes.plot([after], [height], color=colour, marker="D", ms=7)
    axes.annotate(f"{before:.1f}", (before, height), (0, 7), color=MUTED, size=10,
                  textcoords="offset points", ha="center", va="bottom")  # fmt: skip
    gain = f"{after - before:+.1f}".replace("-", "\N{MINUS SIGN}")
    axes.annotate(f"{after:.1f}  {gain}", (max(before, after), height), (8, 0), color=colour,
                  size=10.5, textcoords="offset points", ha="left", va="center",
                  weight="bold")  # fmt: skip


def tables(study: Study) -> Iterator[str]:
    """Yield the lines of the tables in Markdown: gains, passes on one worker, and on several."""
    titles = dict(reversed(TITLES.items()))
    others = ("as left", "averaged")
    heads = (f"{title}, over {PASSES[over]}" for title in titles.values() for over in others)
    yield f"| `polish` gains, points | {' | '.join(heads)} |"
    yield "|---" * (len(titles) * len(others) + 1) + "|"
    for weights in SHARED:
        by_data = (gains(study, data, weights, over) for data in titles for over in others)
        yield _row(weights, by_data, lambda gain: gain.with_ends("+.1f"))
    yield ""
    yield f"| top-1, % | {' | '.join(PASSES.values())} |"
    yield "|---" * (len(PASSES) + 1) + "|"
    for data, title in titles.items():
        yield f"| **{title}** |" + " |" * len(PASSES)
        for weights in ["last weights, peak", *ROWS, "last weights, end"]:
            cells = [top1(study, data, weights, kind) for kind in PASSES]
            if any(cells):
                yield _row(weights, cells, _with_reach)
    yield ""
    yield (
        "| CIFAR-10, pass | workers | top-1 differs by, points | images classified differently, % "
        "| ln(variance) off by |"
    )
    yield "|---" * 5 + "|"
    for kind, workers in product(ON_WORKERS, (2, 4)):
        found = [one for name in SHARED for one in values(study, "cifar10", name, kind, workers)]
        if found:
            yield _on_workers(ON_WORKERS[kind], workers, found)


def gains(study: Study, data: str, weights: str, over: str = "as left") -> list[float]:
    """Return what `polish` on images as in training gains over another pass, seed by seed.

    Empty without such a pass.
    """
    other = top1(study, data, weights, over)
    polished = top1(study, data, weights, "polish augmented") if other else []
    return [ours - theirs for ours, theirs in zip(polished, other, strict=True)]


def _with_reach(top1: Interval) -> str:
    return f"{top1.mean:.1f}" + ("" if top1.reach is None else f" ± {top1.reach:.1f}")


def _row(name: str, cells: Iterable[list[float]], words: Callable[[Interval], str]) -> str:
    texts = (words(interval(found)) if found else "" for found in cells)
    return f"| {name} | {' | '.join(texts)} |"


def _on_workers(name: str, workers: int, found: list[Any]) -> str:
    """Return the row of a pass on several workers: the worst of averages and seeds."""
    difference = max(100 * (max(one["top1"]) - min(one["top1"])) for one in found)
    differ = 100 * max(one["differ"] for one in found)
    off = max(one["log_variance"] for one in found)
    return f"| {name} | {workers} | {difference:.2f} | {differ:.2f} | {off:.3f} |"


def main() -> None:
    study = frozen(NAME)
    drawn = partial(draw, study=study)
    save_svg(RESULTS / f"{NAME}.svg", drawn, size=(480, 640))
    print("\n".join(tables(study)))


if __name__ == "__main__":
    main()
