"""Draw the figures of docs/staleness.md, docs/learning-rates.md and docs/scaling.md.

    python -m benchmarks.studies.pages [RUN]

They are drawn from frozen results, whose files name the commits that made them. Those of
docs/reading-a-report.md are drawn from the folder of a run of the quickstart, with
`--set 'monitor=[noise_scale]'`.
"""

import re
import statistics
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.speed.measuring import RESULTS, ROOT, frozen
from benchmarks.studies.figures import save_svg
from largebatch.report.charts import draw_accuracy, draw_loss, draw_noise
from largebatch.report.run import read_run
from largebatch.report.seeds import Interval, interval
from largebatch.report.style import COLOURS, INK, MUTED, RULE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from largebatch.report.style import Figure

Found = dict[str, Any]

PROTOCOLS = {
    "hardsync": COLOURS["train"],
    "1-softsync": COLOURS["clean"],
    "asynchronous": COLOURS["statistics"],
}


class Cell(NamedTuple):
    """A cell of the study of staleness: n, images of a gradient, and learners."""

    sigma: int
    mini_batch: int
    learners: int

    @classmethod
    def of(cls, name: str) -> "Cell":
        """Read it from its name, such as "sgd-usual-sigma1-mu4-lambda30-n"."""
        numbers = re.search(r"sigma(\d+)-mu(\d+)-lambda(\d+)", name)
        assert numbers is not None, name
        return cls(*map(int, numbers.groups()))

    def protocols(self) -> list[str]:
        """Return the protocols that it belongs to; with one learner two of them are the same."""
        if self.sigma == 0:
            return ["hardsync"]
        if self.learners == 1:
            return ["1-softsync", "asynchronous"]
        return ["1-softsync" if self.sigma == 1 else "asynchronous"]


def main() -> None:
    """Draw every figure."""
    for name, (draw, size) in figures().items():
        save_svg(RESULTS / f"{name}.svg", draw, size=size)
    for folder in sys.argv[1:]:
        run = read_run(Path(folder))
        for name, draw_run in (
            ("loss", draw_loss), ("accuracy", draw_accuracy), ("noise", draw_noise)
        ):  # fmt: skip
            path = ROOT / "docs" / "report" / f"{name}.svg"
            save_svg(path, partial(draw_run, run=run), size=(480, 300))


def figures() -> "dict[str, tuple[Callable[[Figure], None], tuple[int, int]]]":
    """Return what draws each figure, and its size in points."""
    staleness = frozen("staleness")["cells"]["products"]
    return {
        "staleness-trade-off": (partial(draw_trade_off, cells=staleness), (480, 460)),
        "staleness-tau": (partial(draw_tau, cells=staleness), (480, 400)),
        "staleness-speed-up": (
            partial(draw_speed_up, found=frozen("speed_up")["studies"]["rudra"]["speed-up"]),
            (480, 520),
        ),
        "learning-rate-scales": (
            partial(draw_scales, found=frozen("learning_rates_shapes")),
            (480, 640),
        ),
        "learning-rate-range": (partial(draw_range, found=frozen("range_digits")), (480, 320)),
        "rate_drops": (partial(draw_drops, cells=frozen("rate_drops")["cells"]), (480, 520)),
        "servers_simulated": (
            partial(draw_servers, rows=frozen("servers_simulated")["simulated"]["workers"]),
            (480, 600),
        ),
    }


def _titles(figure: "Figure", title: str, note: str) -> None:
    figure.suptitle(f"{title}\n", x=0.01, ha="left", size=13.5, weight="bold", color=INK)
    figure.supxlabel(note, x=0.01, ha="left", size=9, color=MUTED)


def _name(axes: "Axes", title: str, x: str = "", y: str = "") -> None:
    axes.set_title(title, color=INK, weight="bold", size=11)
    axes.set_xlabel(x, loc="right")
    axes.set_ylabel(y)


def _error_bars(axes: "Axes", x: Iterable[float], of: Iterable[Interval], **look: Any) -> None:  # noqa: ANN401 -- of matplotlib
    found = list(of)
    below, above = [it.mean - it.low for it in found], [it.high - it.mean for it in found]
    axes.errorbar(list(x), [it.mean for it in found], yerr=[below, above], ms=5, **look)


def draw_trade_off(figure: "Figure", *, cells: Found) -> None:
    """Draw error over simulated seconds; a line joins cells of a protocol and a product."""
    _titles(
        figure,
        "Error over simulated seconds",
        "Images of a gradient x learners beside each point. A line joins equal products. A fifth\n"
        "of CIFAR-10, 12 epochs, three seeds, 95 % intervals.",
    )
    axes = figure.subplots()
    lines: dict[tuple[str, int], dict[float, Interval]] = {}
    for name, found in cells.items():
        cell = Cell.of(name)
        seconds = statistics.fmean(it["simulated_seconds"] for it in found["by seed"].values())
        error = interval(100 - 100 * it["top1"] for it in found["by seed"].values())
        for protocol in cell.protocols():
            line = lines.setdefault((protocol, cell.mini_batch * cell.learners), {})
            line[seconds] = error
        up = cell.sigma == 1 and cell.learners > 1
        axes.annotate(
            f"{cell.mini_batch} x {cell.learners}", (seconds, error.mean), (5, 4 if up else -11),
            textcoords="offset points", size=8.5, color=MUTED,
        )  # fmt: skip
    for (protocol, _), line in lines.items():
        points = sorted(line)
        label = protocol if protocol not in axes.get_legend_handles_labels()[1] else None
        _error_bars(
            axes, points, (line[it] for it in points), color=PROTOCOLS[protocol], marker="o",
            lw=1.4, label=label,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.set_xticks([5, 10, 20, 50, 100], ["5", "10", "20", "50", "100"])
    axes.set_xlim(3, 190)
    _name(axes, "", "Simulated seconds \N{RIGHTWARDS ARROW}", "Error, %")
    axes.legend(frameon=False, loc="upper right", fontsize=9)


def draw_tau(figure: "Figure", *, cells: Found) -> None:
    """Draw how late gradients are, of four cells."""
    _titles(
        figure,
        "How many updates a gradient is late",
        "Shares of gradients, all seeds; the line is at 2 sigma. The other six cells are alike.",
    )
    shown = {
        "1-softsync, 30 learners": "sgd-usual-sigma1-mu4-lambda30-n",
        "1-softsync, 4 learners": "sgd-usual-sigma1-mu30-lambda4-n",
        "Asynchronous, 4 learners": "sgd-usual-sigma4-mu4-lambda4-n",
        "Asynchronous, 30 learners": "sgd-usual-sigma30-mu4-lambda30-n",
    }
    for axes, (title, name) in zip(figure.subplots(2, 2).flatten(), shown.items(), strict=True):
        counts = [it["tau"] for it in cells[name]["by seed"].values()]
        longest = max(map(len, counts))
        late = [sum(it[tau] for it in counts if tau < len(it)) for tau in range(longest)]
        axes.bar(range(longest), [100 * it / sum(late) for it in late], width=0.9,
                 color=COLOURS["train"])  # fmt: skip
        axes.axvline(2 * Cell.of(name).sigma, color=INK, lw=1)
        _name(axes, title, "Updates late \N{RIGHTWARDS ARROW}", "Gradients, %")


def draw_speed_up(figure: "Figure", *, found: Found) -> None:
    """Draw samples per second over those of one learner."""
    _titles(
        figure,
        "Speed-up of 1 to 30 learners, simulated",
        "Dotted: as many times as learners. Stragglers: 1 gradient of 50 takes 10 times as long.",
    )
    panels = figure.subplots(2, 2, sharex=True, sharey=True).flatten()
    for axes, (name, protocols) in zip(panels, found.items(), strict=True):
        times, mini_batch = name.split(", mu ")
        axes.plot([1, 30], [1, 30], color=MUTED, lw=0.8, ls=":")
        for protocol, by_learners in protocols.items():
            values = [it["mean"] for it in by_learners.values()]
            axes.plot([*map(int, by_learners)], values, color=PROTOCOLS[protocol], lw=1.6,
                      marker="o", ms=4, label=protocol)  # fmt: skip
        times = {"usual": "Even times"}.get(times, times.capitalize())
        _name(axes, f"{times}, gradients of {mini_batch}", "Learners \N{RIGHTWARDS ARROW}")
        axes.set_xticks([1, 4, 10, 18, 30])
    panels[0].legend(frameon=False, fontsize=9)


def draw_scales(figure: "Figure", *, found: Found) -> None:
    """Draw top-1 of policies at multiples of the rates that were found for them."""
    _titles(
        figure,
        "Top-1 at multiples of the rate found by the search",
        "Five seeds, 95 % intervals. Crosses: one or more seeds failed. LeNet-5, large batch, SGD.",
    )
    data = {"digits, large, sgd": "Digits", "fashion_mnist, large, sgd": "Fashion-MNIST"}
    panels = figure.subplots(len(data), 1, sharex=True)
    for axes, (key, title) in zip(panels, data.items(), strict=True):
        runs: dict[str, dict[float, list[Found]]] = {}
        for run in found[key]["runs"]:
            if run["group"] == "scales":
                runs.setdefault(run["policy"], {}).setdefault(float(run["what"]), []).append(run)
        colours = COLOURS.values()
        for place, ((policy, scales), colour) in enumerate(zip(runs.items(), colours, strict=True)):
            whole = {it: of for it, of in scales.items() if not any(run["diverged"] for run in of)}
            values = [interval(100 * run["top1"] for run in whole[it]) for it in sorted(whole)]
            _error_bars(axes, sorted(whole), values, color=colour, marker="o", lw=1.4, label=policy)
            failed = [it * 1.03**place for it in scales if it not in whole]
            axes.plot(
                failed, [0.03] * len(failed), color=colour, mec=colour, marker="x", ms=6, lw=0,
                transform=axes.get_xaxis_transform(),
            )  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        axes.set_xticks([0.25, 0.5, 1, 1.4, 2, 4], ["0.25", "0.5", "1", "1.4", "2", "4"])
        _name(axes, title, "Times the rate found \N{RIGHTWARDS ARROW}", "Top-1, %")
    panels[0].legend(frameon=False, fontsize=9, loc="lower center")


def draw_range(figure: "Figure", *, found: Found) -> None:
    """Draw the losses of a range test by rate, smoothed and as they were, and its bounds."""
    axes = figure.subplots()
    for curve in found["curves"]:
        axes.plot(curve["rates"], curve["losses"], color=COLOURS["train"], lw=0.8, alpha=0.3)
        axes.plot(curve["rates"], curve["smooth"], color=COLOURS["train"])
    axes.axvspan(found["lower"]["value"], found["upper"]["value"], color=COLOURS["statistics"],
                 alpha=0.12, lw=0)  # fmt: skip
    axes.axvline(found["peak_lr"], color=INK, lw=0.8, ls="--")
    axes.set_xscale("log")
    axes.minorticks_off()
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(1.2, 2.7)
    _titles(
        figure,
        "A range test of digits_96 at 16 pixels",
        "Three seeds, smoothed. Green: between the bounds. Dashed: the recipe's peak.",
    )
    _name(axes, "", "Learning rate \N{RIGHTWARDS ARROW}", "Training loss")


def draw_drops(figure: "Figure", *, cells: Found) -> None:
    """Draw accuracy and loss over the epochs; equal curves cover one another."""
    _titles(
        figure,
        "The rate falls to a tenth twice: one host and two",
        "Equal curves cover one another: two hosts, over torch and Horovod, are the wide line.\n"
        "Late: one worker has the old rate for an epoch. Carried: the momentum has it.",
    )
    looks = {"one host": RULE, "late": COLOURS["clean"], "carried": COLOURS["statistics"]}
    panels = figure.subplots(2, 1, sharex=True)
    parts = {"top1": ("Top-1, %", 100.0), "loss": ("Validation loss", 1.0)}
    for axes, (part, (title, factor)) in zip(panels, parts.items(), strict=True):
        for name, colour in looks.items():
            curve = cells[name]["curve"]
            wide = name == "one host"
            axes.plot(
                [it["epoch"] for it in curve], [factor * it[part] for it in curve], color=colour,
                lw=6 if wide else 1.6, label="one host, two hosts" if wide else name,
            )  # fmt: skip
        two = cells["two hosts"]["curve"]
        axes.plot([it["epoch"] for it in two], [factor * it[part] for it in two], color=MUTED, lw=1)
        for drop in (10, 60):
            axes.axvline(drop, color=MUTED, lw=0.8, ls=":")
        _name(axes, "", "Epochs \N{RIGHTWARDS ARROW}", title)
    panels[1].set_ylim(0, 2.5)
    panels[0].legend(frameon=False, loc="lower right", fontsize=9)


def draw_servers(figure: "Figure", *, rows: list[Found]) -> None:
    """Draw the speed-up of layouts of servers by workers, of each model."""
    _titles(
        figure,
        "Speed-up of layouts of servers, simulated at 500 Mbit/s",
        "Beside: a server on each worker. Split: each server has a part of every tensor.\n"
        "The times of computing and of updates are measured.",
    )
    layouts = {
        "ring": ("ring", COLOURS["statistics"], "-"),
        "beside-split": ("beside, split", COLOURS["affine"], "-"),
        "beside": ("beside", COLOURS["swa"], "-"),
        "central-4-split": ("four central, split", COLOURS["clean"], "-."),
        "central-4": ("four central", COLOURS["ema"], ":"),
        "central-2": ("two central", COLOURS["clean"], "--"),
        "central": ("one central", COLOURS["train"], "-"),
    }
    models = {"lenet5-lecun": "LeNet-5, 1998", "lenet5": "LeNet-5, Caffe", "lstm": "LSTM",
              "resnet50": "ResNet-50"}  # fmt: skip
    panels = figure.subplots(2, 2, sharex=True, sharey=True).flatten()
    for axes, (model, title) in zip(panels, models.items(), strict=True):
        axes.axhline(1, color=MUTED, lw=0.8)
        for layout, (label, colour, style) in layouts.items():
            line = _by_workers(rows, model, layout)
            axes.plot([*line], [*line.values()], color=colour, ls=style, lw=1.5, label=label)
        _name(axes, title, "Workers \N{RIGHTWARDS ARROW}")
    panels[1].legend(*panels[0].get_legend_handles_labels(), frameon=False, fontsize=9)


def _by_workers(rows: list[Found], model: str, layout: str) -> dict[int, float]:
    """Return the speed-up of a layout over one worker alone, which is the ring of one."""
    alone = f"{model}-alone-1" if layout == "ring" else ""
    return {
        row["workers"]: row["speed_up"]["mean"] for row in rows
        if row["cell"] in {f"{model}-{layout}-{row['workers']}", alone}
    }  # fmt: skip


if __name__ == "__main__":
    main()
