"""Measure what usual faults of scaling out do to a loop, and draw their curves.

    python -m benchmarks.studies.audit.accuracy_fell           trains, writes results and the figure
    python -m benchmarks.studies.audit.accuracy_fell --draw    draws the newest results again

A small network learns scikit-learn's digits: on one process in batches of 32, and on eight workers
in batches of 256, in a plain DistributedDataParallel loop that is correct or has one fault. Before
each training on eight workers the loop is audited; the findings are in the results.
"""

import argparse
import contextlib
import io
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from benchmarks.speed.measuring import RESULTS, newest, on_two_workers, write
from benchmarks.studies.figures import save_svg
from largebatch.audit import audit
from largebatch.audit.findings import Check
from largebatch.report.style import COLOURS, INK, MUTED
from largebatch.runs.launch import start_workers

if TYPE_CHECKING:
    from largebatch.report.style import Axes, Figure

NAME = "accuracy_fell"
WORKERS, BATCH, EPOCHS, WARM_UP = 8, 32, 20, 5
"""Number of workers, batch of each, epochs, and epochs of warm-up."""

RATE = 0.05
"""Learning rate of one process; eight workers have eight times as much, by the linear rule."""

SEEDS = (1, 2, 3)

LOWEST = 60
"""Top-1 in percent at which the axis of the figure begins."""


@dataclass(frozen=True, slots=True)
class Loop:
    """A training loop on eight workers: a correct one, or one with a fault."""

    title: str
    check: Check | None = None
    """Check of the audit that finds the fault."""

    reduces: bool = True
    sets_epoch: bool = True
    times: float = WORKERS
    """Peak rate over that of one process."""

    warm_up: int = WARM_UP


LOOPS = {
    "correct": Loop("correct loop"),
    "not reduced": Loop("gradients not reduced", "gradient direction", reduces=False),
    "set_epoch": Loop("set_epoch not called", "epoch order", sets_epoch=False),
    "not scaled": Loop("rate not scaled", "rate for the batch", times=1, warm_up=0),
    "scaled twice": Loop("rate scaled twice", "rate for the batch", times=WORKERS**2, warm_up=0),
}

Curves = dict[str, list[float]]


def data() -> tuple[TensorDataset, Tensor, Tensor]:
    """Return the training set, and images and labels for testing: every fifth one."""
    digits = load_digits()
    images = torch.tensor(digits.data / 16, dtype=torch.float32)
    labels = torch.tensor(digits.target)
    tests = torch.arange(len(labels)) % 5 == 0
    return TensorDataset(images[~tests], labels[~tests]), images[tests], labels[tests]


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


class Training:
    """One training, on one process or as one of the workers."""

    def __init__(self, loop: Loop, seed: int, workers: int) -> None:
        training, self.images, self.labels = data()
        self.sampler: DistributedSampler[Any] = DistributedSampler(
            training, workers, dist.get_rank() if workers > 1 else 0, seed=seed
        )
        self.loader = DataLoader(training, BATCH, sampler=self.sampler, drop_last=True)
        self.set_epoch = self.sampler.set_epoch if loop.sets_epoch else _keep_epoch
        self.network = network(seed)
        shared = workers > 1 and loop.reduces
        self.model = DistributedDataParallel(self.network) if shared else self.network
        an_epoch = len(self.loader)
        self.rate = schedule(RATE * loop.times, loop.warm_up * an_epoch, EPOCHS * an_epoch)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE, momentum=0.9)
        self.updates = 0

    def step(self, batch: list[Tensor]) -> float:
        """Make one update and return the loss of this worker."""
        self.optimizer.param_groups[0]["lr"] = self.rate(self.updates)
        self.updates += 1
        loss = cross_entropy(self.model(batch[0]), batch[1])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def audited(self, check: Check | None) -> list[str]:
        """Return all faults that the audit finds, and its notes of a check."""
        with contextlib.redirect_stdout(io.StringIO()):
            findings = audit(
                self.model,
                self.loader,
                cross_entropy,
                self.optimizer,
                self.step,
                set_epoch=self.set_epoch,
                base=(BATCH, RATE),
                rate=self.rate,
                epochs=EPOCHS,
            )
        notes = [it for it in findings.named(check) if it.level == "note"] if check else []
        return [it.text for it in (*findings.faults, *notes)]

    def run(self) -> Curves:
        """Train, and return loss and top-1 of each epoch."""
        curves: Curves = {"loss": [], "top1": []}
        for epoch in range(EPOCHS):
            self.set_epoch(epoch)
            curves["loss"].append(statistics.mean(map(self.step, self.loader)))
            with torch.no_grad():
                hits = self.network(self.images).argmax(1) == self.labels
            curves["top1"].append(hits.float().mean().item())
        return curves


def _keep_epoch(epoch: int) -> None:
    """Change nothing, as in a loop that forgets `set_epoch`."""


def schedule(peak: float, warm_up: int, updates: int) -> Callable[[int], float]:
    """Return a rate that rises linearly over `warm_up` updates and falls linearly to 0."""

    def rate(update: int) -> float:
        if update < warm_up:
            return peak * (update + 1) / warm_up
        return peak * (updates - update) / (updates - warm_up)

    return rate


def measure() -> dict[str, Any]:
    """Train every loop with every seed, as one of the workers; return curves and findings."""
    results: dict[str, Any] = {}
    for name, loop in LOOPS.items():
        first = Training(loop, SEEDS[0], WORKERS)
        results[name] = {"audit": first.audited(loop.check), "seeds": {}}
        for seed in SEEDS:
            results[name]["seeds"][str(seed)] = Training(loop, seed, WORKERS).run()
    one = Loop("one process", times=1, warm_up=0)
    seeds = {str(seed): Training(one, seed, workers=1).run() for seed in SEEDS}
    return {"one process": {"audit": ["not audited"], "seeds": seeds}, **results}


def work(path: Path) -> None:
    """Run as one of the workers; the first one writes the results."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    results = measure()
    if dist.get_rank() == 0:
        path.write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


def top1(loop: dict[str, Any]) -> list[float]:
    """Return top-1 after the last epoch, by seed, in percent."""
    return [100 * seed["top1"][-1] for seed in loop["seeds"].values()]


def draw(figure: "Figure", *, loops: dict[str, Any]) -> None:
    """Draw loss and top-1 by epoch: one panel a fault, with the correct loop behind it."""
    faults = list(LOOPS)[1:]
    panels = figure.subplots(4, 2, sharex=True, sharey="row")
    figure.suptitle(
        "Eight workers in batches of 256:\na correct loop in grey, and four faults",
        x=0.01, ha="left", size=13.5, weight="bold", color=INK,
    )  # fmt: skip
    figure.supxlabel(
        "Digits, 1,437 images; loss of worker 0 in training, top-1 on 360 images;\n"
        f"each of {len(SEEDS)} seeds. Dotted: one process in batches of 32.",
        x=0.01, ha="left", size=9, color=MUTED,
    )  # fmt: skip
    for column, name in enumerate(faults):
        upper, lower = panels[column // 2 * 2 : column // 2 * 2 + 2, column % 2]
        for axes, kind in ((upper, "loss"), (lower, "top1")):
            _curves(axes, loops["one process"], kind, color=MUTED, ls=":")
            _curves(axes, loops["correct"], kind, color=MUTED)
            _curves(axes, loops[name], kind, color=COLOURS["clean"], lw=1.8)
        upper.set_title(LOOPS[name].title, color=INK, weight="bold", size=11.5)
        upper.set_yscale("log")
        upper.set_yticks([0.1, 1, 10], ["0.1", "1", "10"])
        upper.minorticks_off()
        lower.set_ylim(LOWEST, 100)
        best = max(100 * max(seed["top1"]) for seed in loops[name]["seeds"].values())
        ends = f"always below {LOWEST} %; at the end\n" * (best < LOWEST)
        ends += ", ".join(f"{value:.1f}" for value in top1(loops[name])) + " %"
        lower.annotate(ends, (EPOCHS, LOWEST + 1), color=COLOURS["clean"], size=10, ha="right")
        lower.set_xlabel("Epoch →", loc="right")
    panels[0, 0].set_ylabel("Loss")
    panels[1, 0].set_ylabel("Top-1, %")


def _curves(axes: "Axes", loop: dict[str, Any], kind: str, **style: Any) -> None:  # noqa: ANN401 -- of matplotlib
    for seed in loop["seeds"].values():
        values = [100 * value for value in seed[kind]] if kind == "top1" else seed[kind]
        axes.plot(range(1, EPOCHS + 1), values, **{"lw": 1.1, **style})


def table(loops: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a table in Markdown: top-1 and the first finding of the audit."""
    head = (
        "loop, eight workers in batches of 256",
        "top-1 of three seeds, %",
        "the audit's first line",
    )
    yield f"| {' | '.join(head)} |"
    yield "|---|---|---|"
    for name, loop in loops.items():
        title = LOOPS[name].title if name in LOOPS else "one process, batches of 32"
        figures = ", ".join(f"{value:.1f}" for value in top1(loop))
        yield f"| {title} | {figures} | {loop['audit'][0] if loop['audit'] else 'no fault'} |"


def draw_newest() -> None:
    """Draw the newest results and print their table."""
    path = newest(NAME, RESULTS, machine="*")
    if path is None:
        raise SystemExit("there are no results: python -m benchmarks.studies.audit.accuracy_fell")
    loops = json.loads(path.read_text(encoding="utf-8"))["loops"]
    save_svg(path.parent / f"{NAME}.svg", partial(draw, loops=loops), size=(520, 700))
    print("\n".join(table(loops)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="draw the newest results again")
    parser.add_argument("--worker", nargs=2, metavar=("TASK", "FILE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(Path(arguments.worker[1]))
        return
    if not arguments.draw:
        loops = on_two_workers("all", partial(start_workers, workers=WORKERS))
        write(NAME, {"loops": loops})
    draw_newest()


if __name__ == "__main__":
    main()
