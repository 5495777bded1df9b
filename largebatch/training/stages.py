"""The stages of a run, in order: train, clean, ema, affine, statistics; all but train optional.

A stage drives the training loop and does between two updates what the loop does not know of: log,
evaluate, save, and stop when asked. It ends with an evaluation. Where the recipe says `keep:
better`, training pictures that were held out decide whether what it did is kept, or the state
before it comes back.
"""

import math
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from largebatch.errors import CheckpointError, DivergedError
from largebatch.polish.statistics import QUANTILES, Drift, polish
from largebatch.recipe.plan import Plan
from largebatch.training.evaluation import Metrics, evaluate
from largebatch.training.loop import step_seeds, train
from largebatch.training.state import Checkpoint, Session


def run_stages(session: Session, *, until: int) -> bool:
    """Go through the stages that remain; return whether the run is complete.

    Stops early when `until` updates have been made in all, or when any worker is asked to; what was
    done is saved.
    """
    ended = {stage["name"] for stage in session.stages}
    for name, end in _ends(session.plan).items():
        if name in ended:
            continue
        if name == "ema":
            take_average(session)
        elif name == "statistics":
            polish_statistics(session)
        else:
            _train_stage(session, name, end=end, until=until)
            if session.step < end:
                session.save()
                return False
    return True


def require_resumable(state: Checkpoint, plan: Plan, folder: Path) -> None:
    """Raise CheckpointError where a stage has ended and updates before its end are missing.

    `largebatch polish` leaves that of a run that had not ended: the updates that are missing would
    be made by a network whose statistics no training gave it, under the names of later stages.
    """
    ends = _ends(plan)
    for stage in state.stages:
        if state.step < ends[stage["name"]]:
            raise CheckpointError(
                f"{folder}: holds a run that was polished after {state.step:,} of "
                f"{plan.updates:,} updates, which training cannot go on from; resume the run that "
                "was polished, in its own folder, or begin anew with another --out"
            )


def _ends(plan: Plan) -> dict[str, int]:
    """Return the stages in order, and how many updates of the plan lie behind when each ends."""
    return {
        "train": plan.train_steps,
        "clean": plan.steps,
        "ema": plan.steps,
        "affine": plan.updates,
        "statistics": plan.updates,
    }


def _train_stage(session: Session, name: str, *, end: int, until: int) -> None:
    plan = session.plan
    until += session.given_up
    if session.step >= min(end, until) or session.log.stopped:
        return
    session.remember()
    if name == "affine" and session.step == plan.steps:  # else it was restored
        session.use(session.build_affine())
    lost = None
    try:
        make_updates(session, name, range(session.step, end), until=until)
    except DivergedError as error:
        if not session.before:  # nothing to come back to
            raise
        lost = str(error)
    sizes = {"train": plan.train_steps, "clean": plan.clean_steps, "affine": plan.affine_steps}
    made = sizes[name] - (end - session.step)
    if lost is not None:
        session.given_up += end - session.step
        session.step = end
    if session.step == end:
        end_stage(session, name, num_steps=made, note=lost, failed=lost is not None)


def make_updates(session: Session, name: str, steps: range, *, until: int) -> None:
    """Make these updates of a stage, or those before `until`; evaluate and save on the way."""
    plan, log = session.plan, session.log
    batches = session.pipeline.training(steps, clean=name != "train")
    updates = train(
        session.model,
        session.optimizer,
        batches,
        session.schedule,
        session.criterion,
        session.reducer,
        session.spans,
        session.scaler,
        steps=steps,
        accumulation=plan.accumulation,
        global_batch=plan.global_batch,
        seed=step_seeds(session.recipe.seed, session.backend.rank),
    )
    log.resume_clock()
    with closing(batches), closing(updates):
        for update in updates:
            log.add(name, update)  # one that is under way when the one before diverged is not made
            session.step = update.step + 1
            if session.average is not None and not update.skipped:
                session.average.update()
            if session.step < steps.stop and session.step in plan.evaluate_after:
                log.flush()
                measure(session, name)
                session.save()
                log.resume_clock()
            if log.stopped or session.step in (steps.stop, until):
                break
    log.flush()


def take_average(session: Session) -> None:
    """Let the average become the model, if there is one."""
    if session.average is None:
        return
    session.remember()
    session.average.store()
    session.average = None
    end_stage(session, "ema", num_steps=0)


def polish_statistics(session: Session) -> None:
    """Do the statistics pass, if the recipe has one, and emit what it changed."""
    section = session.recipe.polish.statistics if session.recipe.polish else None
    if section is None:
        return
    session.remember()
    drift = measure_statistics(session, section.samples, sequential=section.sequential)
    session.emit(
        {
            "event": "drift",
            "stage": "statistics",
            "step": session.step,
            "samples": section.samples,
            "passes": drift.passes,
            "settling": drift.settling,
            "settled": drift.settled,
            "quantiles": QUANTILES,
            "layers": [asdict(layer) for layer in drift],
        }
    )
    end_stage(session, "statistics", num_steps=0, note=say_unsettled(drift))


def say_unsettled(drift: Drift) -> str | None:
    """Say that statistics never came to rest; None if they did."""
    if drift.settled:
        return None
    return (
        f"the statistics have not settled in {drift.passes} passes: the last one moved them by "
        f"{drift.settling:.2g} standard deviations or ln(variance)"
    )


def measure_statistics(session: Session, samples: int, *, sequential: bool) -> Drift:
    """Polish the statistics of the model over the first samples of the training order."""
    pictures = _Pictures(session, samples)
    return polish(session.model, pictures, session.backend, sequential=sequential)


@dataclass(frozen=True, slots=True)
class _Pictures:
    """Clean training pictures, which can be gone through again."""

    session: Session
    samples: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        with closing(self.session.pipeline.statistics(self.samples)) as batches:
            yield from batches


def measure(session: Session, stage: str) -> Metrics:
    """Evaluate the model as it is and emit the record."""
    begun = time.perf_counter()
    metrics = evaluate(
        session.model,
        session.pipeline.validation(),
        session.backend,
        expected=session.plan.val_samples,
    )
    session.emit(
        {
            "event": "evaluation",
            "stage": stage,
            "step": session.step,
            "epoch": session.plan.epoch(session.step),
            **asdict(metrics),
            "seconds": time.perf_counter() - begun,
        }
    )
    return metrics


def say(session: Session, stage: str, text: str) -> None:
    """Tell whoever follows the run, in words."""
    session.emit({"event": "note", "stage": stage, "step": session.step, "text": text})


def end_stage(
    session: Session, name: str, *, num_steps: int, note: str | None = None, failed: bool = False
) -> None:
    """Evaluate, keep or undo what the stage did, note what it changed, and save.

    `note` is what else there is to say of the stage; one that `failed` is undone whatever it did.
    """
    if note is not None:
        say(session, name, note)
    metrics = measure(session, name)
    after = {"top1": metrics.top1, "top5": metrics.top5, "loss": metrics.loss}
    last = session.last_kept
    verdict = _judge(session, name, failed=failed)
    if not verdict["kept"]:
        session.go_back()
    session.before = {}
    session.stages.append(
        {
            "name": name,
            "steps": num_steps,
            "seconds": session.seconds - sum(stage["seconds"] for stage in session.stages),
            **after,
            "before": {key: last[key] for key in after} if last else None,
            **verdict,
            "note": note,
        }
    )
    session.save()


def _judge(session: Session, name: str, *, failed: bool) -> dict[str, Any]:
    """Return top-1 on the pictures held out, where there are some, and whether to keep the stage.

    A model whose loss is no number is not kept, though some labels may be met by chance. Every
    worker decides alike: counts are exact, and one all-reduce gives all of them the same.
    """
    if not session.judged:
        return {"held_out": None, "kept": True}
    samples = len(session.pipeline.held_out_samples)
    batches = session.pipeline.held_out()
    measured = evaluate(session.model, batches, session.backend, expected=samples)
    found, last = measured.top1, session.last_kept
    usable = not failed and math.isfinite(measured.loss)
    kept = last is None or (usable and found > last["held_out"])
    if last is not None:
        session.emit(
            {
                "event": "decision",
                "stage": name,
                "step": session.step,
                "samples": samples,
                "before": last["held_out"],
                "after": found,
                "kept": kept,
            }
        )
    return {"held_out": found, "kept": kept}
