"""Run folders like those of real runs, without the runs: plausible numbers, written quickly."""

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from largebatch.recipe.loading import load_recipe
from largebatch.recipe.writing import dump_yaml

Metrics = dict[str, float]

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"

SMALL_RESNET = ["bn1", "layer1.0.bn1", "layer1.0.bn2", "layer2.0.bn1", "layer2.0.bn2"]
RESNET50 = [
    "bn1",
    *(
        f"layer{layer}.{block}.{name}"
        for layer, blocks in enumerate((3, 4, 6, 3), start=1)
        for block in range(blocks)
        for name in ("bn1", "bn2", "bn3", *(["downsample.1"] if block == 0 else []))
    ),
]


class FakeRun:
    """Makes a run folder, record by record."""

    def __init__(self, folder: Path, *, name: str = "digits-96", **plan: float) -> None:
        self.folder = folder
        self.name = name
        self.plan: dict[str, Any] = {
            "workers": 2,
            "global_batch": 96,
            "device_batch": 48,
            "accumulation": 1,
            "bn_span": 48,
            "steps": 600,
            "train_samples": 1437,
            "val_samples": 360,
            "warmup_steps": 75,
            "clean_steps": 75,
            "evaluate_after": [],
        } | plan
        self.classes = [str(digit) for digit in range(10)]
        self.records: list[dict[str, Any]] = []
        self.stages: list[dict[str, Any]] = []
        self.random = np.random.default_rng(1)
        self.start(0)

    @property
    def steps_per_epoch(self) -> float:
        return float(self.plan["train_samples"] / self.plan["global_batch"])

    def add(self, event: str, **fields: object) -> None:
        self.records.append({"event": event, **fields})

    def start(self, resume_step: int) -> None:
        time = "2026-11-21T08:00:00Z"
        self.add("start", time=time, resume_step=resume_step, recipe=self.name, plan=self.plan)

    def train(self, begin: int, end: int, *, stage: str = "train", rate: float = 812.0) -> None:
        for step in range(begin, end):
            part = step / self.plan["steps"]
            noise = self.random.normal()
            self.add(
                "step",
                stage=stage,
                step=step,
                epoch=(step + 1) / self.steps_per_epoch,
                loss=0.55 + 1.8 * math.exp(-6 * part) + 0.07 * noise * (1.1 - part),
                lr=min(step / self.plan["warmup_steps"], 1.14 * (1 - part) ** 2),
                images_per_second=rate * (1 + 0.04 * noise) * (0.05 if step == 0 else 1),
                step_seconds=0.12,
            )

    def evaluate(self, stage: str, step: int, top1: float) -> Metrics:
        metrics = {"top1": top1, "top5": min(1, top1 + 0.04), "loss": 2.2 - 2 * top1}
        epoch = step / self.steps_per_epoch
        self.add(
            "evaluation", stage=stage, step=step, epoch=epoch, **metrics, samples=360, seconds=0.2
        )
        return metrics

    def curve(self, until: int, *, best: float) -> None:
        """Train, and evaluate nine times on the way."""
        for tenth in range(1, 11):
            self.train(until * (tenth - 1) // 10, until * tenth // 10)
            if tenth < 10:
                self.evaluate("train", until * tenth // 10, best * (1 - 0.9 ** (4 * tenth)))

    def end(
        self, stage: str, steps: int, top1: float, *, wrong: Collection[int] | None = None
    ) -> None:
        """Evaluate after `steps` steps of this stage; record which images are `wrong`, if given."""
        before = {k: self.stages[-1][k] for k in ("top1", "top5", "loss")} if self.stages else None
        done = sum(found["steps"] for found in self.stages) + steps
        after = self.evaluate(stage, done, top1)
        if wrong is not None:
            self.mistakes(stage, done, sorted(wrong))
        self.stages.append(
            {"name": stage, "steps": steps, "seconds": 3.2, **after, "before": before}
        )

    def mistakes(self, stage: str, step: int, wrong: list[int]) -> None:
        """Classify these images one class too high."""
        names = self.classes
        labels = [sample % len(names) for sample in wrong]
        self.add(
            "mistakes",
            stage=stage,
            step=step,
            classes=names,
            sizes=np.bincount(np.arange(360) % len(names)).tolist(),
            samples=wrong,
            labels=labels,
            predicted=[(label + 1) % len(names) for label in labels],
        )

    def decide(self, stage: str, *, before: float, after: float) -> None:
        """Judge a stage that has just ended."""
        step = sum(found["steps"] for found in self.stages)
        kept = after > before
        self.stages[-1] |= {"held_out": after, "kept": kept}
        self.add(
            "decision", stage=stage, step=step, samples=200, before=before, after=after, kept=kept
        )

    def drift(self, names: list[str], *, stage: str = "statistics") -> None:
        layers = []
        for depth, name in enumerate(names):
            sizes = np.array([[0.03], [0.08 + 0.1 * depth / len(names)]])
            changes = sizes * (self.random.normal(size=(2, 64)) + self.random.normal(size=(2, 1)))
            shift, ratio = np.sqrt(np.mean(changes**2, axis=1)).tolist()
            layers.append(
                {
                    "name": name,
                    "channels": 64,
                    "mean_shift": shift,
                    "log_variance_ratio": ratio,
                }
            )
        self.add(
            "drift",
            stage=stage,
            step=self.plan["steps"],
            samples=1437,
            layers=layers,
        )

    def write(self, **summary: object) -> Path:
        """Write the folder; arguments replace or extend the summary."""
        self.folder.mkdir(parents=True)
        lines = [json.dumps(record) + "\n" for record in self.records]
        (self.folder / "log.jsonl").write_text("".join(lines), encoding="utf-8")
        recipe = f"name: {self.name}\nseed: 1\noptimizer:\n  kind: lars\n  eta: 0.02\n"
        (self.folder / "recipe.yaml").write_text(recipe, encoding="utf-8")
        steps = max((r["step"] + 1 for r in self.records if r["event"] == "step"), default=0)
        last = self.stages[-1] if self.stages else {}
        plan = {
            k: self.plan[k] for k in ("workers", "global_batch", "device_batch", "accumulation")
        }
        content = {
            "recipe": self.name,
            "commit": "4f2a9c1d5e6b7a8091827364554637281900abcd+",
            "versions": {"python": "3.11.2", "torch": "2.13.0"},
            "backend": "torch",
            **plan,
            "steps": steps,
            "skipped_steps": 0,
            "samples": steps * self.plan["global_batch"],
            "seconds": 74.7,
            "images_per_second": 806.3 if steps else None,
            "peak_memory_bytes": 3 * 2**28,
            **{key: last.get(key) for key in ("top1", "top5", "loss")},
            "stages": self.stages,
            "status": "finished",
        }
        (self.folder / "summary.json").write_text(json.dumps(content | summary), encoding="utf-8")
        return self.folder


def give_recipe(folder: Path, *overrides: str) -> Path:
    """Replace the recipe of a run with a real one with these settings."""
    text = dump_yaml(load_recipe(RECIPE, overrides))
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    return folder


def trained(
    folder: Path,
    top1: float,
    *,
    best: float | None = None,
    wrong: Collection[int] | None = None,
) -> FakeRun:
    """Return a run after its 600 updates; with evaluations on the way, if their `best` is given."""
    run = FakeRun(folder, clean_steps=0)
    if best is None:
        run.train(0, 600)
    else:
        run.curve(600, best=best)
    run.end("train", 600, top1, wrong=wrong)
    return run


def polished(run: FakeRun, layers: list[str], top1: tuple[float, float, float]) -> FakeRun:
    """Return a run after all its updates, the last 75 of them clean, and its statistics."""
    steps = run.plan["steps"] - 75
    run.curve(steps, best=top1[0] + 0.0067)
    run.end("train", steps, top1[0])
    run.train(steps, steps + 75, stage="clean", rate=905.0)
    run.end("clean", 75, top1[1])
    run.drift(layers)
    run.end("statistics", 0, top1[2])
    return run


def full_run(folder: Path) -> Path:
    return polished(FakeRun(folder), SMALL_RESNET, (0.9583, 0.9722, 0.9861)).write()


def train_only(folder: Path) -> Path:
    return trained(folder, 0.9667, best=0.97).write(peak_memory_bytes=None, commit=None)


def statistics_that_hurt(folder: Path) -> Path:
    run = trained(folder, 0.9639, best=0.97)
    run.drift([f"blocks.{block}.bn" for block in range(12)])
    run.end("statistics", 0, 0.9472)
    return run.write()


def like_resnet50(folder: Path) -> Path:
    run = FakeRun(
        folder,
        name="resnet50-86016-fujitsu",
        workers=2048,
        global_batch=86_016,
        device_batch=21,
        accumulation=2,
        steps=1350,
        train_samples=1_281_167,
        warmup_steps=500,
    )
    run = polished(run, RESNET50, (0.7512, 0.7591, 0.7608))
    return run.write(images_per_second=1_624_000.0)


def resumed(folder: Path) -> Path:
    """Killed after 350 updates, gone on from the checkpoint after 300."""
    run = FakeRun(folder, clean_steps=0)
    run.train(0, 300)
    run.evaluate("train", 300, 0.91)
    run.train(300, 350, rate=99_999.0)
    run.evaluate("train", 350, 0.123)
    run.start(300)
    run.train(300, 600)
    run.end("train", 600, 0.95)
    return run.write()


def interrupted_after_one_step(folder: Path) -> Path:
    run = FakeRun(folder)
    run.train(0, 1)
    return run.write(status="interrupted", images_per_second=None)


def interrupted_while_clean(folder: Path) -> Path:
    run = FakeRun(folder)
    run.train(0, 525)
    run.end("train", 525, 0.9583)
    run.train(525, 560, stage="clean")
    return run.write(status="interrupted")


def diverged(folder: Path) -> Path:
    run = FakeRun(folder)
    run.train(0, 40)
    for power, record in enumerate(run.records[-8:]):
        record["loss"] = 2.3 * 4.0**power
    run.records[-1]["loss"] = math.nan
    return run.write(status="failed")


def interrupted_after_a_skipped_step(folder: Path) -> Path:
    """The last update overflowed in fp16: normal while the loss scale is sought."""
    run = FakeRun(folder)
    run.train(0, 40)
    run.records[-1] |= {"loss": None, "skipped": True}
    return run.write(status="interrupted", skipped_steps=1)


def paused(folder: Path) -> Path:
    run = FakeRun(folder)
    run.train(0, 40)
    return run.write(status="paused")


def ended_below_its_best(folder: Path) -> Path:
    run = trained(folder, 0.9639, best=0.9)
    run.end("statistics", 0, 0.8)
    return run.write()


def learned_nothing(folder: Path) -> Path:
    return trained(folder, 0.11, wrong=range(40, 360)).write()


def failed_at_once(folder: Path) -> Path:
    return FakeRun(folder).write(status="failed")


def killed(folder: Path) -> Path:
    full_run(folder)
    (folder / "summary.json").unlink()
    return folder


def decided(folder: Path) -> Path:
    """Every stage there is; images held out have undone two of them."""
    run = FakeRun(folder, affine_steps=60)
    run.curve(525, best=0.9583)
    run.end("train", 525, 0.9583)
    run.train(525, 600, stage="clean")
    run.end("clean", 75, 0.9722)
    run.decide("clean", before=0.95, after=0.97)
    run.end("ema", 0, 0.9611)
    run.decide("ema", before=0.97, after=0.96)
    run.train(600, 660, stage="affine")
    run.end("affine", 60, 0.9806)
    run.decide("affine", before=0.97, after=0.98)
    run.drift(SMALL_RESNET)
    run.end("statistics", 0, 0.9639)
    run.decide("statistics", before=0.98, after=0.97)
    return run.write()


def all_discarded(folder: Path) -> Path:
    run = trained(folder, 0.9639, best=0.97)
    run.drift(SMALL_RESNET)
    run.end("statistics", 0, 0.9472)
    run.decide("statistics", before=0.98, after=0.97)
    return run.write()


def polished_checkpoint(folder: Path) -> Path:
    """What `largebatch polish` leaves: evaluations, and no updates."""
    run = FakeRun(folder)
    run.end("clean", 600, 0.95)
    run.drift(["bn1", "bn2"])
    run.end("statistics", 0, 0.96)
    return run.write(steps=600)
