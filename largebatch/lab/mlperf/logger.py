"""mlperf.log: the log of a run by the rules of MLPerf Training, written by the package
mlperf-logging.

The clock of the log starts when all else is set up, before any image is read (the index exists
already: see data.index.index.require_stored). It stops at the first evaluation that reaches the
target, or at the end of a run that does not; what follows the target is not logged. A resumed
run continues the same log with the clock running, because the rules allow no pause; an
unfinished run has no run_stop. Only the first start writes hyper-parameters. Facts about the
submission that a run cannot know are read from the environment.
"""

import json
import logging
import math
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from largebatch.errors import CheckpointError, LargebatchError
from largebatch.lab.mlperf import rules
from largebatch.optional import require_mlperf
from largebatch.recipe.arithmetic.plan import Plan
from largebatch.recipe.optimizers import LARS, SGD
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.schedule import Polynomial
from largebatch.tracking.events import EvaluationEvent, Event, Finish, Start, StepEvent
from largebatch.tracking.followed import FollowedRun
from largebatch.tracking.log import Clock, drop_unfinished_line

MLPERF_LOG = "mlperf.log"
TOKEN = ":::MLLOG "  # noqa: S105 -- no password
"""Prefix of a line in the log."""

UNNAMED = "unnamed"
"""Prefix of the submission's names if the environment sets none."""

_SUBMISSION = {
    "division": ("closed", "open"),
    "status": ("onprem", "cloud", "preview", "research"),
}
"""Values that the rules allow in MLPERF_SUBMISSION_DIVISION and the like."""


class MLPerf(Clock):
    """A Tracker that writes mlperf.log into the run folder.

    `began` is the start of the worker's set-up, in seconds since 1970. Raises
    MissingPackageError without mlperf-logging, LargebatchError for an unknown division or
    status.
    """

    def __init__(self, folder: Path, recipe: Recipe, *, began: float) -> None:
        self._package = require_mlperf("mllog.mllog", "tracking: [mlperf]")
        self._path = folder / MLPERF_LOG
        self._recipe = recipe
        self._began = began
        self._submission = _submission(closed=not rules.broken_rules(recipe))
        self._file = _File(self._path, encoding="utf-8", delay=True)
        self._log: Any = None
        self._plan: Plan | None = None
        self._block: float | None = None
        """First epoch of the current block of updates."""

        self._since = 0
        """Start of the next block, in milliseconds since 1970."""

        self._over = False

    @classmethod
    def follow(cls, run: FollowedRun) -> Self:
        """Return the tracker of a run."""
        return cls(run.folder, run.recipe, began=run.began)

    def record(self, event: Event) -> None:
        """Log an event by the rules.

        Raises CheckpointError if earlier parts of the log are missing.
        """
        match event:
            case Start():
                self._start(event)
            case StepEvent() if not self._over:
                self._begin_block(event.step)
            case EvaluationEvent() if not self._over:
                self._evaluate(event)
            case Finish():
                if event.summary.status == "finished" and not self._over:
                    self._stop("aborted", at=_now())
                self._file.close()

    def _start(self, start: Start) -> None:
        """Start or continue the log: a run has one run_start and one run_stop."""
        before = _records(self._path)
        keys = [record["key"] for record in before]
        if start.resume_step and "run_start" not in keys:
            raise CheckpointError(
                f"{self._path}: has no run_start, and the run resumes at step {start.resume_step}"
            )
        self._plan = start.plan
        self._log = self._open()
        self._over = "run_stop" in keys
        if "run_start" not in keys:
            self._begin(start.plan)
        blocks = [record for record in before if record["key"] in {"block_start", "block_stop"}]
        if blocks and blocks[-1]["key"] == "block_start":
            self._block = blocks[-1]["metadata"]["first_epoch_num"]
        self._since = _now()

    def _open(self) -> Any:  # noqa: ANN401 -- mlperf-logging has no types
        """Return the package's logger for the file, without its global logger, which prints."""
        logger = logging.Logger("largebatch.lab.mlperf", logging.INFO)  # noqa: LOG001 -- not shared
        logger.addHandler(self._file)
        root = re.escape(str(Path(__file__).parents[2]))
        return self._package.MLLogger(logger, root_dir=root)

    def _begin(self, plan: Plan) -> None:
        log = self._log
        recipe = self._recipe
        began = round(1000 * self._began)
        # Only who starts the run can clear the file system's cache, and says so here.
        log.event("cache_clear", os.environ.get("MLPERF_CACHE_CLEARED") == "1", time_ms=began)
        log.start("init_start", time_ms=began)
        for key, value in self._submission.items():
            log.event(f"submission_{key}", value)
        log.event("seed", recipe.seed)
        log.event("train_samples", plan.train_samples)
        log.event("eval_samples", plan.val_samples)
        for key, setting in hyperparameters(recipe, plan).items():
            log.event(key, setting)
        log.end("init_stop")
        log.start("run_start")

    def _begin_block(self, step: int) -> None:
        """Log the start of the block of updates before the next evaluation; `step` is the first."""
        if self._block is not None:
            return
        plan = self._plan
        assert plan is not None
        # A block ends with an evaluation, or where the stage does.
        ends = {*plan.evaluate_after, plan.train_steps, plan.steps, plan.updates}
        end = min(end for end in ends if end > step)
        self._block = round(1 + plan.epoch(step), 6)  # the rules number epochs from 1
        count = round(plan.epoch(end) - plan.epoch(step), 6)
        metadata = {"first_epoch_num": self._block, "epoch_count": count}
        self._log.start("block_start", metadata=metadata, time_ms=self._since)

    def _evaluate(self, event: EvaluationEvent) -> None:
        end = _now()
        begin = end - round(1000 * event.seconds) if math.isfinite(event.seconds) else end
        metadata = {"epoch_num": round(event.epoch, 6)}
        self._end_block(at=begin)
        self._log.start("eval_start", metadata=metadata, time_ms=begin)
        self._log.event("eval_accuracy", event.top1, metadata=metadata, time_ms=end)
        self._log.end("eval_stop", metadata=metadata, time_ms=end)
        self._since = end
        if event.top1 >= rules.TARGET:
            self._stop("success", at=end)

    def _end_block(self, *, at: int) -> None:
        if self._block is not None:
            metadata = {"first_epoch_num": self._block}
            self._log.end("block_stop", metadata=metadata, time_ms=at)
            self._block = None

    def _stop(self, status: str, *, at: int) -> None:
        self._end_block(at=at)
        self._log.end("run_stop", metadata={"status": status}, time_ms=at)
        self._over = True


class _File(logging.FileHandler):
    """Append each line immediately and raise errors of writing."""

    def handleError(self, _: logging.LogRecord) -> None:  # noqa: N802 -- logging's
        raise  # noqa: PLE0704 -- called while that error is handled


def hyperparameters(recipe: Recipe, plan: Plan) -> dict[str, object]:
    """Return a recipe's hyper-parameters under MLPerf's names.

    The names are those of the rules for ResNet with LARS and SGD, and `opt_` for other
    optimizers. Decay steps are those of the whole run, with the warm-up, as in most of the
    reference's points.
    """
    section = recipe.optimizer
    schedule = recipe.schedule
    decay = schedule.decay
    opt = f"{section.kind}_opt" if isinstance(section, (LARS, SGD)) else "opt"
    warmup = "lars_opt" if isinstance(section, LARS) else "opt"
    parameters: dict[str, object] = {
        "global_batch_size": plan.global_batch,
        "gradient_accumulation_steps": plan.accumulation,
        "model_bn_span": plan.bn_span,
        "label_smoothing": recipe.loss.label_smoothing,
        "opt_name": section.kind,
        f"{opt}_base_learning_rate": schedule.peak_lr,
        f"{opt}_weight_decay": getattr(section, "weight_decay", 0.0),
        f"{warmup}_learning_rate_warmup_epochs": rules.warmup_epochs(
            schedule.warmup, updates_per_epoch=recipe.train_samples / plan.global_batch
        ),
    }
    momentum = getattr(section, "momentum", None)
    if momentum is not None:
        parameters[f"{opt}_momentum"] = momentum
    if isinstance(section, LARS):
        parameters["lars_epsilon"] = section.eps
    if isinstance(decay, Polynomial):
        parameters[f"{opt}_end_learning_rate"] = decay.end_lr
        parameters[f"{opt}_learning_rate_decay_poly_power"] = decay.power
        parameters[f"{opt}_learning_rate_decay_steps"] = plan.steps
    return parameters


def _submission(*, closed: bool) -> dict[str, str]:
    """Return the log's lines on the submission, from MLPERF_SUBMISSION_ORG and the like.

    The default division is closed where the recipe keeps all of its rules.
    """
    defaults = {
        "benchmark": rules.BENCHMARK,
        "division": "closed" if closed else "open",
        "org": f"{UNNAMED}: MLPERF_SUBMISSION_ORG",
        "platform": f"{UNNAMED}: MLPERF_SUBMISSION_PLATFORM",
        "status": "research",
    }
    submission = {
        key: (key != "benchmark" and os.environ.get(f"MLPERF_SUBMISSION_{key.upper()}")) or value
        for key, value in defaults.items()
    }
    for key, allowed in _SUBMISSION.items():
        if submission[key] not in allowed:
            raise LargebatchError(
                f"MLPERF_SUBMISSION_{key.upper()}: expected {' or '.join(allowed)}, got "
                f"{submission[key]!r}"
            )
    return submission


def _records(path: Path) -> list[Mapping[str, Any]]:
    if not path.exists():
        return []
    try:
        drop_unfinished_line(path)
        lines = path.read_text(encoding="utf-8").splitlines()
        return [json.loads(line.removeprefix(TOKEN)) for line in lines if TOKEN in line]
    except ValueError as error:
        raise CheckpointError(f"{path}: is damaged: {error}") from None


def _now() -> int:
    return round(1000 * time.time())
