"""Train the recipes that fit two cores to their end: three seeds, small batch and large.

    python benchmarks/measure.py [--only WORDS ...] [--draw]

Needs LARGEBATCH_DATA, the folder of Fashion-MNIST and CIFAR-10, and optuna. Writes
benchmarks/results/recipes_<machine>_<date>.json after every run. Started again it goes on where it
was stopped: every run continues from its last checkpoint, and what the newest such file has, trials
of the search too, is not done again, not even on another machine. Each of a few processes has one
thread.

Arms of a set, all with its model, images, BatchNorm span and number of epochs:
- small: SGD with Nesterov momentum at the small batch;
- large: LARS at the large batch;
- large, Nesterov: SGD with Nesterov momentum at the large batch, all else as for LARS; and on
  Fashion-MNIST the same with a straight decay, as the small batch has it;
- large, 1.25 times as long: LARS without polishing, to see how many epochs polishing saves.

First the peak rate of each arm is searched: five trials for every arm, the schedule shortened to
SEARCH_PART of its epochs, judged on 5,000 training images that these runs do not train on, with a
seed that no result has. They have FACTORS of the arm's `start`; older searches in the file of
results have three of them, a random draw and one of a Gaussian process. The longer arm takes the
rate of large.

Then every arm is trained with each seed. Runs of a seed that end in different ways share the
updates that they have in common: `control` is the whole schedule; `statistics`, the exact
statistics pass after it; `clean`, its last epochs on clean images instead, and `clean +
statistics`; `ema`, the moving average of the control's weights over the last 1.3 epochs or so, and
`ema + statistics`.

Intervals are Student's over the seeds; differences are paired by seed. The test images choose no
rate. The network, crops and epochs for CIFAR-10 were changed once, after a run at the small batch
had ended at 87.4 % on them.
"""

import argparse
import contextlib
import json
import sys
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import optuna
from measuring import RESULTS, circumstances, few_processes, hardware, newest, today
from optuna.storages.journal import JournalFileBackend
from polishing_cells import part
from polishing_data import prepare

from largebatch import load_recipe, run
from largebatch.errors import DivergedError
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.polish import Polish, Statistics
from largebatch.recipe.recipe import Recipe
from largebatch.report.run import read_run
from largebatch.tracking.events import RECIPE, StageResult, Summary

NAME = "recipes"
FACTORS = (1.0, 0.4, 2.5, 0.16, 6.25)
TRIALS = len(FACTORS)
WIDEST = 100.0
"""Limits of any rate, as factors of `start` in both directions."""

SEARCH_PART = 0.3
SEARCH_SEED = 100
TUNING_IMAGES = 5_000
SEEDS = 3
REACH_EPOCHS = 1.3
"""Window of the moving average."""

NESTEROV = "optimizer={kind: sgd, momentum: 0.9, weight_decay: 5e-4, nesterov: true}"
NESTEROV_RATE = 0.5
"""First rate of the search at the large batch, by about the square-root rule from the small one."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train on a data set."""

    data: str
    name: str
    recipe: str
    start: float
    """First rate of its search."""

    changes: tuple[str, ...] = ()
    longer: float = 1.0
    rate_of: str | None = None
    """Arm whose rate it uses; None if it is searched."""

    @property
    def key(self) -> str:
        """Unique name."""
        return f"{self.data}, {self.name}"


def arms_of(data: str, small: str, large: str, *, lars: float) -> list[Arm]:
    """Return the arms of a data set; `lars` is the first rate of the search for LARS."""
    return [
        Arm(data, "small", small, 0.2),
        Arm(data, "large", large, lars),
        Arm(data, "large, Nesterov", large, NESTEROV_RATE, (NESTEROV,)),
        Arm(data, "large, 1.25 times as long", large, lars, longer=1.25, rate_of="large"),
    ]


STRAIGHT = "schedule.decay.power=1.0"
ARMS = [
    *arms_of("fashion_mnist", "fashion_mnist_resnet9_128", "fashion_mnist_resnet9_1920", lars=4.0),
    Arm(
        "fashion_mnist",
        "large, Nesterov, straight decay",
        "fashion_mnist_resnet9_1920",
        0.8,
        (NESTEROV, STRAIGHT),
    ),
    *arms_of("cifar10", "cifar10_resnet9_128", "cifar10_resnet9_1600", lars=16.0),
]
IMAGES = {"fashion_mnist": 60_000, "cifar10": 50_000}


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job of a process: a run of an arm, or all runs of one seed."""

    arm: Arm
    seed: int
    rate: float
    work: Path
    searching: bool = False

    @property
    def key(self) -> str:
        """Name in the results."""
        return f"{self.arm.key}, {f'rate {self.rate:g}' if self.searching else f'seed {self.seed}'}"

    @property
    def folder(self) -> Path:
        """Folder of its runs."""
        return self.work / self.key.replace(", ", "/").replace(" ", "-")

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe of the arm without its polishing."""
        arm = self.arm
        plain = load_recipe(arm.recipe, [*arm.changes, "polish=null"])
        assert plain.duration.epochs is not None
        length = arm.longer * (SEARCH_PART if self.searching else 1)
        changes = [f"duration.epochs={plain.duration.epochs * length:g}"]
        if plain.schedule.warmup is not None:
            assert plain.schedule.warmup.epochs is not None
            changes.append(f"schedule.warmup.epochs={plain.schedule.warmup.epochs * length:g}")
        if self.searching:
            changes.append(f"data.train_samples={IMAGES[arm.data] - TUNING_IMAGES}")
            changes.append(f"data.val_samples={TUNING_IMAGES}")
            changes.append("evaluation={}")
        changes += [f"seed={self.seed}", f"schedule.peak_lr={self.rate:g}"]
        changes += ["execution.device_batch=64", "execution.checkpoints.every_minutes=3.0"]
        return load_recipe(arm.recipe, [*arm.changes, "polish=null", *changes])

    def data(self) -> Path:
        """Return the folder of images."""
        images, shards = IMAGES[self.arm.data], self.work / "data"
        if self.searching:
            return prepare(shards, self.arm.data, train=images - TUNING_IMAGES, val=TUNING_IMAGES)
        return prepare(shards, self.arm.data, train=images)


def carry_out(job: Job) -> dict[str, Any]:
    """Run a job and return its result; a diverged one has the accuracy of chance."""
    job.folder.mkdir(parents=True, exist_ok=True)
    with (
        (job.folder / "output.log").open("a", encoding="utf-8") as log,
        contextlib.redirect_stdout(log),
    ):
        try:
            if job.searching:
                summary = run(job.recipe, out=job.folder / "run", data=job.data(), resume="auto")
                return {"arms": {"control": _reached(summary.stages[-1])}, **_cost(summary)}
            return train_seed(job)
        except DivergedError:
            return {"arms": {"control": {"top1": 1 / job.recipe.data.classes, "loss": None}}}


def train_seed(job: Job) -> dict[str, Any]:
    """Train one seed of an arm with every way of polishing."""
    recipe, data, trunk = job.recipe, job.data(), job.folder / "trunk"
    statistics = Statistics(samples=recipe.train_samples)
    if job.arm.longer != 1:
        summary = run(recipe, out=trunk, data=data, resume="auto")
        arms = {"control": _reached(summary.stages[-1])}
        return {"arms": arms, **_cost(summary), "curve": _curve(trunk)}
    own = load_recipe(job.arm.recipe).polish
    clean = own.clean if own else load_recipe(_large(job.arm)).polish.clean  # type: ignore[union-attr]  # it has
    plan = make_plan(recipe, workers=1)
    ema = round(1 - 1 / (REACH_EPOCHS * plan.steps_per_epoch), 5)
    whole = _polished(recipe, Polish(ema=ema, statistics=statistics))
    ends = {
        "clean": Polish(clean=clean, statistics=statistics),
        "statistics": Polish(statistics=statistics),
    }
    arms = {}
    for name, polish in ends.items():
        other = _polished(recipe, polish)
        steps = min(make_plan(other, workers=1).train_steps, plan.steps - 1)
        out = job.folder / name
        if not (out / RECIPE).exists():
            run(whole, out=trunk, data=data, resume="auto", max_steps=steps)
            part(trunk, other, out)
        summary = run(other, out=out, data=data, resume="auto")
        for stage in summary.stages[1:]:
            arms[_label(name, stage)] = _reached(stage)
    summary = run(whole, out=trunk, data=data, resume="auto")
    arms["control"] = _reached(summary.stages[0])
    for stage in summary.stages[1:]:
        arms[_label("ema", stage)] = _reached(stage)
    return {"arms": arms, **_cost(summary), "curve": _curve(trunk)}


def _curve(folder: Path) -> list[tuple[float, float]]:
    """Return epoch and top-1 of every evaluation in training."""
    found = read_run(folder).evaluations
    return [(each.epoch, each.top1) for each in found if each.stage == "train"]


def _large(arm: Arm) -> str:
    return next(other.recipe for other in ARMS if other.data == arm.data and other.name == "large")


def _polished(recipe: Recipe, polish: Polish) -> Recipe:
    content = recipe.model_dump() | {"polish": polish.model_dump()}
    return Recipe.model_validate(content)


def _label(name: str, stage: StageResult) -> str:
    if stage.name != "statistics" or name == "statistics":
        return name
    return f"{name} + statistics"


def _reached(stage: StageResult) -> dict[str, float | None]:
    return {"top1": stage.top1, "loss": stage.loss}


def _cost(summary: Summary) -> dict[str, Any]:
    return {"seconds": summary.seconds, "images_per_second": summary.images_per_second}


class Search:
    """Trials of one arm's peak rate, stored by Optuna."""

    def __init__(self, arm: Arm, work: Path, known: dict[str, float] | None = None) -> None:
        """Resume the search in a folder; a new one starts with the known results."""
        self.arm, self.work = arm, work
        self.start = arm.start
        backend = JournalFileBackend(str(work / "search.journal"))
        self.study = optuna.create_study(
            study_name=arm.key,
            storage=optuna.storages.JournalStorage(backend),
            direction="maximize",
            load_if_exists=True,
        )
        for trial in self.study.get_trials(states=[optuna.trial.TrialState.RUNNING]):
            self.study.tell(trial.number, state=optuna.trial.TrialState.FAIL)
            self.study.enqueue_trial(trial.params, skip_if_exists=False)
        if self.study.trials:
            return
        for rate, top1 in (known or {}).items():
            self.study.add_trial(
                optuna.trial.create_trial(
                    params={"rate": float(rate)},
                    distributions={"rate": self.range},
                    value=top1,
                )
            )
        for factor in FACTORS:
            self.study.enqueue_trial({"rate": factor * self.start}, skip_if_exists=True)

    @property
    def range(self) -> optuna.distributions.FloatDistribution:
        """Range of the searched rates."""
        low, high = self.start / WIDEST, self.start * WIDEST
        return optuna.distributions.FloatDistribution(low, high, log=True)

    @property
    def done(self) -> dict[float, float]:
        """Results by rate."""
        complete = self.study.get_trials(states=[optuna.trial.TrialState.COMPLETE])
        return {trial.params["rate"]: trial.values[0] for trial in complete}

    def ask(self) -> tuple[optuna.Trial, Job] | None:
        """Return the next trial to run; None if there is none now."""
        states = optuna.trial.TrialState
        under_way = len(self.study.get_trials(states=[states.RUNNING]))
        if len(self.done) + under_way >= TRIALS:
            return None
        trial = self.study.ask({"rate": self.range})
        rate = trial.params["rate"]
        job = Job(
            arm=self.arm, seed=SEARCH_SEED, rate=float(f"{rate:.4g}"), work=self.work,
            searching=True,
        )  # fmt: skip
        return trial, job

    @property
    def best(self) -> float | None:
        """Best rate; None until the search is done."""
        if len(self.done) < TRIALS:
            return None
        return float(f"{max(self.done, key=lambda rate: self.done[rate]):.4g}")


class Measurement:
    """Remaining jobs, running jobs and results."""

    def __init__(self, path: Path, work: Path, only: list[str]) -> None:
        self.path, self.work = path, work
        self.arms = [arm for arm in ARMS if all(word in arm.key for word in only)]
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.results: dict[str, Any] = found.get("runs", {})
        self.known: dict[str, dict[str, float]] = found.get("search", {})
        self.earlier: dict[str, Any] = found.get("earlier", {})
        """Unused searches and runs, made with other settings than the arms have now."""

        self.circumstances = circumstances(NAME, "python benchmarks/measure.py")
        if "sources" in found:  # those of the oldest run
            self.circumstances["sources"] = found["sources"]
        self.searches = {
            arm.key: Search(arm, work, self.known.get(arm.key))
            for arm in self.arms
            if arm.rate_of is None
        }
        self.started: set[str] = set()

    def next(self) -> tuple[optuna.Trial | None, Job] | None:
        """Return the next job: searches first, then seed by seed, data set by data set."""
        for data in dict.fromkeys(arm.data for arm in self.arms):
            searches = [s for s in self.searches.values() if s.arm.data == data]
            for search in sorted(searches, key=lambda s: len(s.study.trials)):
                if found := search.ask():
                    return found
            for seed in range(1, SEEDS + 1):
                for arm in self.arms:
                    if arm.data == data and (job := self._job(arm, seed)):
                        self.started.add(job.key)
                        return None, job
        return None

    def _job(self, arm: Arm, seed: int) -> Job | None:
        search = self.searches.get(f"{arm.data}, {arm.rate_of or arm.name}")
        if search is None or search.best is None:
            return None
        job = Job(arm=arm, seed=seed, rate=search.best, work=self.work)
        there = self.results.get(job.key)
        if there is not None and there["rate"] != job.rate:
            raise SystemExit(
                f"{self.path}: {job.key} was trained at a rate of {there['rate']:g}, and the "
                f"search has found {job.rate:g}: move what is there to `earlier`"
            )
        return None if job.key in self.started or there is not None else job

    def take(self, trial: optuna.Trial | None, job: Job, result: dict[str, Any]) -> None:
        """Record the result of a job."""
        if trial is not None:
            self.searches[job.arm.key].study.tell(trial, result["arms"]["control"]["top1"])
        else:
            about = {"data": job.arm.data, "arm": job.arm.name, "seed": job.seed, "rate": job.rate}
            now = {"date": today(), "commit": self.circumstances["commit"]}
            self.results[job.key] = {**about, **now, **result}
        self.write()

    def write(self) -> None:
        """Replace the file of results."""
        content = {
            **self.circumstances,
            "search": self.known | {key: search.done for key, search in self.searches.items()},
            "runs": self.results,
            "earlier": self.earlier,
        }
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        partial.replace(self.path)


def measure(measurement: Measurement, *, processes: int) -> None:
    """Run the remaining jobs, several at once."""
    with few_processes(processes) as pool:
        jobs: dict[Future[dict[str, Any]], tuple[optuna.Trial | None, Job]] = {}
        while True:
            while len(jobs) < processes and (found := measurement.next()):
                trial, job = found
                print(f"begins: {job.key}, rate {job.rate:g}", flush=True)
                jobs[pool.submit(carry_out, job)] = trial, job
            if not jobs:
                return
            done, _ = wait(jobs, return_when=FIRST_COMPLETED)
            for each in done:
                trial, job = jobs.pop(each)
                result = each.result()
                measurement.take(trial, job, result)
                reached = ", ".join(f"{k} {v['top1']:.2%}" for k, v in result["arms"].items())
                print(f"{job.key}: {reached}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="train the recipes that fit two cores to their end"
    )
    add = parser.add_argument
    add("--processes", type=int, default=2, metavar="N", help="of one thread each")
    add("--only", nargs="+", default=[], metavar="WORDS", help="arms whose name has all of these")
    add("--work", type=Path, default=Path("runs") / "measure", metavar="DIR", help="for the runs")
    add("--results", type=Path, default=RESULTS, metavar="DIR")
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    args.work.mkdir(parents=True, exist_ok=True)
    path = newest(NAME, args.results) or args.results / f"{NAME}_{hardware()}_{today()}.json"
    for data in dict.fromkeys(arm.data for arm in ARMS):  # once, and not by two processes at a time
        for arm in ARMS:
            if arm.data == data and arm.name == "small" and all(w in arm.key for w in args.only):
                for searching in (True, False):
                    Job(arm=arm, seed=1, rate=1.0, work=args.work, searching=searching).data()
    measure(Measurement(path, args.work, args.only), processes=args.processes)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("stopped; the same command continues from here")
