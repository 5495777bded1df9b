"""Measure a script's evaluation against exact figures: samples, means, modes, and workers.

Each sample is classified once, by any worker. From the hits of all samples and the batches of the
user's loader follow the figures that usual mistakes give, so that the mistake can be named.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn
from torch.utils.data import DataLoader, Subset

from largebatch.audit.ranks import Ranks, unable
from largebatch.audit.replicas import depends_on_mode
from largebatch.audit.rules import evaluation as rules
from largebatch.audit.samples import (
    Epoch,
    NoNumbersError,
    Readings,
    SampleNumbers,
    around,
    read_epochs,
    torch_loader,
    whole,
)
from largebatch.audit.subject import Subject
from largebatch.distributed.serial import Serial
from largebatch.models.wrappers import device_of, local_model
from largebatch.rules import Finding, decide
from largebatch.training.evaluation import Answers, evaluate

Measure = npt.NDArray[np.float64]
"""A number for each sample of the validation set: 1 or 0 if it is a hit or not, or its loss."""

_LOSS_TOLERANCE = 1e-3
"""Relative difference of equal losses: scripts compute them in bf16 or with other kernels."""

_CLOSER = 0.1
"""A figure is of all readings, not of each sample once, if it is that much closer to it."""

_RIGHT = (rules.EACH_ONCE, rules.ALL_READINGS)
"""Ways to average that are tried for errors too; one minus a sum is not a mistake people make."""

_ROUNDED = 1e-4
"""Difference of a figure that a mistake explains: scripts round per cent to two decimals."""


def check_evaluation(subject: Subject, ranks: Ranks) -> list[Finding]:
    """Check the samples of a validation loader, and the script's evaluation if it is given."""
    problem, epoch, readings = _read(subject, ranks)
    findings: list[Finding] = []
    each_once = False
    if subject.evaluate is not None:
        findings, each_once = _check_figure(subject, epoch, readings, ranks)
    if problem:
        remedy = "give the audit a DataLoader whose data set has a length"
        findings.append(unable("evaluation samples", problem, remedy))
    if readings is not None:
        coverage = _coverage(readings, ranks.size, each_once=each_once)
        findings += decide(coverage, rules.COVERAGE)
    return findings


def _read(subject: Subject, ranks: Ranks) -> tuple[str, Epoch | None, Readings | None]:
    """Read the sample numbers of a validation loader; return what prevents that, or all readings
    and those of this worker.
    """
    if subject.val_loader is None:
        return "", None, None
    try:
        _, (epoch,), readings = read_epochs(
            subject.val_loader, 1, ranks, "evaluation samples", other=subject.loader
        )
    except NoNumbersError as error:
        return str(error), None, None
    return "", epoch, readings


def _coverage(readings: Readings, workers: int, *, each_once: bool) -> rules.ValidationCoverage:
    return rules.ValidationCoverage(
        size=readings.size,
        twice=readings.twice,
        never=readings.never,
        is_one_set=readings.held is not None,
        everything=readings.everything,
        global_batch=readings.global_batch,
        workers=workers,
        counts_each_once=each_once,
    )


def _check_figure(
    subject: Subject, epoch: Epoch | None, readings: Readings | None, ranks: Ranks
) -> tuple[list[Finding], bool]:
    """Check the script's figure; return True too if it is that of each sample once."""
    evaluate_script = subject.evaluate
    assert evaluate_script is not None
    models = [subject.inner, *([subject.averaged] if subject.averaged else [])]
    remedy = "correct it, or leave `evaluate` out; it must return a number on every worker"
    with _modes(models) as training:
        own_value = ranks.attempt(
            "evaluation mean", "evaluate()", lambda: float(evaluate_script()), remedy=remedy
        )
    values, layers = zip(*ranks.gather([own_value, len(training)]), strict=True)
    findings = decide(rules.TrainingLayers(max(layers)), rules.MODES)
    held = None if readings is None else readings.held
    reported = rules.Reported(values=values, has_samples=held is not None)
    if not_comparable := decide(reported, rules.REPORTED):
        return findings + not_comparable, False
    if max(layers) or held is None or epoch is None:  # figures of training mode show nothing
        return findings, False
    # The script may evaluate the model or its average: the one that explains the figure counts.
    figures = [_measure_figure(it, subject, held, epoch, values[0], ranks) for it in models]
    means = [figure.mean for figure in figures]
    each_once = rules.EACH_ONCE in means
    figures.sort(key=lambda it: (it.mean != rules.EACH_ONCE, it.mean == rules.UNEXPLAINED))
    return findings + decide(figures[0], rules.FIGURE), each_once


@contextmanager
def _modes(models: Sequence[nn.Module]) -> Iterator[set[nn.Module]]:
    """Collect the layers that run in training mode, of those whose output depends on it."""
    training: set[nn.Module] = set()

    def see(layer: nn.Module, _: object) -> None:
        if layer.training:
            training.add(layer)

    layers = [layer for model in models for layer in model.modules() if depends_on_mode(layer)]
    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(see).remove)
        yield training


def _measure_figure(
    model: nn.Module,
    subject: Subject,
    held: SampleNumbers,
    epoch: Epoch,
    value: float,
    ranks: Ranks,
) -> rules.EvaluationFigure:
    """Find the way to average that gives a figure.

    Each sample is classified by one worker. What is exact is tried first, and mistakes with a
    smaller tolerance: there are several of them.
    """
    base = torch_loader(subject.val_loader)
    assert base is not None  # its sample numbers were drawn
    data = Subset(whole(base.dataset)[0], held.tolist())
    places = np.arange(len(held))
    own_places = np.array_split(places, ranks.size)[ranks.rank]
    size = base.batch_size or 64
    answers = Answers()
    share: DataLoader[Any] = DataLoader(
        data,
        batch_sampler=[
            own_places[start : start + size].tolist() for start in range(0, len(own_places), size)
        ],
        collate_fn=base.collate_fn,
        num_workers=base.num_workers,
    )

    def classify() -> None:
        if len(own_places):
            batches = around(subject.val_loader, share)
            backend = Serial(device_of(local_model(model)))
            evaluate(model, batches, backend, each=answers.add, forward=subject.forward)

    remedy = "pass a `val_loader` of images and labels, or leave `evaluate` out"
    ranks.attempt("evaluation mean", "the exact evaluation", classify, remedy=remedy)
    answer = answers.gather(own_places, places, ranks.backend)
    measures = np.full((2, max(held, default=0) + 1), np.nan)
    measures[0, held] = answer.label == answer.predicted
    measures[1, held] = answer.loss
    of_hits, of_losses = (_usual_figures(it, epoch, ranks) for it in measures)
    errors = {mean: 1 - figure for mean, figure in of_hits.items() if mean in _RIGHT}
    tries = [
        (value / unit, figures, 0.25 / len(held))
        for figures in (of_hits, errors)
        for unit in (1, 100)
    ]
    tries.append((value, of_losses, _LOSS_TOLERANCE * of_losses[rules.EACH_ONCE]))
    for reported, figures, near in tries:
        off = abs(reported - figures[rules.EACH_ONCE])
        if off <= near:
            # Padding may move top-1 by less than the tolerance; that of a loss is for rounding, so
            # being closer shows nothing within it.
            of_all = abs(reported - figures[rules.ALL_READINGS])
            is_all = figures is not of_losses and of_all < _CLOSER * off
            mean = rules.ALL_READINGS if is_all else rules.EACH_ONCE
            return _figure(reported, figures, of_losses, mean)
    for reported, figures, near in tries:
        limit = near if figures is of_losses else min(near, _ROUNDED)
        for mean, figure in figures.items():
            if abs(reported - figure) <= limit:
                return _figure(reported, figures, of_losses, mean)
    return _figure(value, of_hits, of_losses, rules.UNEXPLAINED)


def _figure(
    value: float, figures: Mapping[str, float], of_losses: Mapping[str, float], mean: str
) -> rules.EvaluationFigure:
    exact = figures[rules.EACH_ONCE]
    return rules.EvaluationFigure(
        value=value, exact=exact, loss=of_losses[rules.EACH_ONCE], mean=mean
    )


def _usual_figures(measure: Measure, epoch: Epoch, ranks: Ranks) -> dict[str, float]:
    """Return the figures that ways to average give: of each sample once, then of mistakes."""
    batches = [measure[numbers] for numbers in epoch.batches() if len(numbers)]
    sum_of_means = sum(float(batch.mean()) for batch in batches)
    total = float(sum(batch.sum() for batch in batches))
    of_workers = ranks.gather([total, int(epoch.sizes.sum()), sum_of_means, len(batches)])
    totals, numbers, sums_of_means, counts = np.array(of_workers, dtype=np.float64).T
    with np.errstate(invalid="ignore"):  # a worker may have no sample
        worker_means = totals / numbers
        of_means = sums_of_means / counts
    figures = {
        rules.EACH_ONCE: np.nanmean(measure),
        rules.ALL_READINGS: totals.sum() / numbers.sum(),
        "the mean of the batch means": sums_of_means.sum() / counts.sum(),
        "the mean of the worker means": worker_means.mean(),
        "the sum over the workers, not their mean": worker_means.sum(),
        "the sum over the workers of batch means": of_means.sum(),
        "the sum over the number of batches, not of samples": totals.sum() / counts.sum(),
        "the figure of worker 0's samples": worker_means[0],
    }
    return {name: float(figure) for name, figure in figures.items()}
