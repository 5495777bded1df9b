"""A script's evaluation against exact figures: samples, means, modes, and workers that disagree.

Each sample is classified once, by any worker. From the hits of all samples and the batches of the
user's loader follow the figures that usual mistakes give, so that the mistake can be named.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn
from torch.utils.data import DataLoader

from largebatch.audit.findings import Finding
from largebatch.audit.order import Epoch, around, levels, torch_loader
from largebatch.audit.ranks import Ranks
from largebatch.audit.replicas import depends_on_mode
from largebatch.audit.samples import Readings, count_readings, numbered_epochs
from largebatch.audit.subject import Subject
from largebatch.distributed.serial import Serial
from largebatch.formatting import percent, plural
from largebatch.models.wrappers import device_of, local_model
from largebatch.training.evaluation import Answers, evaluate

Evaluation = Callable[[], float]
Measure = npt.NDArray[np.float64]
"""A number for each sample of the validation set: 1 or 0 if it is a hit or not, or its loss."""

_EQUAL = 1e-5
"""Relative difference of equal figures of two workers. Sums of float32 in another order differ by
less; one of 50,000 samples differs by more."""

_LOSS_TOLERANCE = 1e-3
"""Relative difference of equal losses: scripts compute them in bf16 or with other kernels."""

_CLOSER = 0.1
"""A figure is of all readings, not of each sample once, if it is that much closer to it."""

_ROUNDED = 1e-4
"""Difference of a figure that a mistake explains: scripts round per cent to two decimals."""

_ALL, _HITS = "the mean of all readings", "the hits of all readings over the number of samples"


@dataclass(frozen=True, slots=True)
class Reported:
    """What the script's evaluation returned and did."""

    values: tuple[float, ...]
    """By worker."""

    training: int
    """Number of layers that ran in training mode, which changes their output."""


def check_evaluation(subject: Subject, ranks: Ranks) -> list[Finding]:
    """Check the samples of a validation loader, and the script's evaluation if it is given."""
    found, epoch, divided = _check_samples(subject.val_loader, ranks)
    if subject.evaluate is None:
        return found
    models = [subject.inner, *([subject.averaged] if subject.averaged else [])]
    reported = run(subject.evaluate, models, ranks)
    found.append(_mode(reported))
    if not np.allclose(reported.values, reported.values[0], _EQUAL, 0, equal_nan=True):
        found.append(_disagreement(reported.values))
    elif subject.val_loader is None or (epoch is not None and divided is None):
        text = f"evaluate() gives {reported.values[0]:.5g}, which was not compared"
        text += ": the workers' data sets differ" * (epoch is not None)
        remedy = "give the audit val_loader too, of one data set that the workers divide"
        found.append(Finding(check="evaluation mean", level="unknown", text=text, remedy=remedy))
    elif epoch is not None and not reported.training:
        exact = [measures(it, subject, divided, ranks) for it in models]
        figure = _figure(exact, epoch, reported.values[0], ranks)
        found = [_of_no_effect(it) if figure.level == "fine" else it for it in found]
        found.append(figure)
    return found


def _check_samples(loader: object, ranks: Ranks) -> tuple[list[Finding], Epoch | None, Any]:
    """Return the findings on a validation loader, this worker's samples, and the data divided."""
    if loader is None:
        return [], None, None
    epochs, problem = numbered_epochs(loader, 1, ranks, "evaluation samples")
    base = torch_loader(loader)
    if problem or base is None:
        remedy = "give the audit a DataLoader whose data set has a length"
        unknown = Finding(check="evaluation samples", level="unknown", text=problem, remedy=remedy)
        return [unknown], None, None
    readings = count_readings(base.dataset, epochs[0], ranks)
    return [_coverage(readings, ranks.size)], epochs[0], readings.divided


def _coverage(readings: Readings, world_size: int) -> Finding:
    size, never, twice = readings.size, readings.never, readings.twice
    if readings.everything:
        text = f"every worker reads all {plural(size, 'sample')}"
        return Finding(check="evaluation samples", level="fine", text=text)
    moves = max(twice / max(1, size + twice), never / max(1, size))
    text = (
        f"{plural(size, 'sample')}: {never:,} never read, {twice:,} read again"
        + ", of data sets that differ between workers" * readings.own_data
        + f"; top-1 may be off by {percent(moves)} points"
    )
    if twice and not never and readings.divided is None and not readings.own_data:
        text = (
            f"{twice:,} of {size + twice:,} readings repeat a sample of another worker's part, so "
        )
        text += f"as many may never be read; top-1 may be off by {percent(moves)} points"
    if not never and not twice:
        text = f"each of {plural(size, 'sample')} is read once"
        return Finding(check="evaluation samples", level="fine", text=text)
    padded = never < world_size and twice < max(world_size, readings.global_batch)
    return Finding(
        check="evaluation samples",
        level="note" if padded else "fault",
        text=text,
        remedy="evaluate shares of any size without padding: largebatch.training.evaluate"
        if padded
        else "read each sample once: no drop_last, the same order of the data on all workers, and "
        "one DistributedSampler(shuffle=False)",
        figure=float(never or twice),
    )


def _of_no_effect(finding: Finding) -> Finding:
    """Return a note on repeated samples as fine, because the evaluation leaves them out."""
    if finding.level != "note":
        return finding
    text = f"{finding.text.partition(';')[0]}; evaluate() counts each sample once"
    return replace(finding, level="fine", text=text, remedy="")


def run(evaluation: Evaluation, models: Sequence[nn.Module], ranks: Ranks) -> Reported:
    """Run the script's evaluation on every worker and note in which mode the layers ran."""
    with _modes(models) as training:
        remedy = "correct it, or leave `evaluate` out; it must return a number on every worker"
        value = ranks.attempt(
            "evaluation mean", "evaluate()", lambda: float(evaluation()), remedy=remedy
        )
    everyone = ranks.gather([value, len(training)])
    return Reported(tuple(rank[0] for rank in everyone), max(rank[1] for rank in everyone))


@contextmanager
def _modes(models: Sequence[nn.Module]) -> Iterator[set[nn.Module]]:
    """Collect the layers that run in training mode, of those whose output depends on it."""
    training: set[nn.Module] = set()

    def see(layer: nn.Module, _: object) -> None:
        if layer.training:
            training.add(layer)

    layers = [layer for model in models for layer in model.modules() if depends_on_mode(layer)]
    hooks = [layer.register_forward_pre_hook(see) for layer in layers]
    try:
        yield training
    finally:
        for hook in hooks:
            hook.remove()


def _mode(reported: Reported) -> Finding:
    if not reported.training:
        return Finding(check="evaluation mode", level="fine", text="no layer ran in training mode")
    layers = plural(reported.training, "layer")
    return Finding(
        check="evaluation mode",
        level="fault",
        text=f"{layers} ran in training mode",
        remedy="call model.eval() before the evaluation and model.train() after it",
        figure=float(reported.training),
    )


def _disagreement(values: tuple[float, ...]) -> Finding:
    return Finding(
        check="evaluation mean",
        level="fault",
        text=f"workers report {min(values):.5g} to {max(values):.5g}: each has the figure of its "
        "own samples or weights",
        remedy="sum hits and samples over the workers (all_reduce), then divide",
        figure=max(values) - min(values),
    )


def _figure(
    exact: Sequence[tuple[Measure, Measure]], epoch: Epoch, value: float, ranks: Ranks
) -> Finding:
    """Compare a figure with the exact ones of the model or, if none fits, of its average."""
    findings = [_explain(value, hits, losses, epoch, ranks) for hits, losses in exact]
    findings.sort(key=lambda it: (it.level != "fine", it.figure is None))
    return findings[0]  # the first of those that are explained


def measures(
    model: nn.Module,
    subject: Subject,
    data: Any,  # noqa: ANN401 -- a data set of any kind
    ranks: Ranks,
) -> tuple[Measure, Measure]:
    """Return hits and losses of all samples, NaN for those outside of `data`, a `Subset` perhaps.

    Each sample is classified by one worker.
    """
    loader, forward = subject.val_loader, subject.forward
    base = torch_loader(loader)
    assert base is not None  # its sample numbers were drawn
    everyone, parts = np.arange(len(data)), levels(data)
    own = np.array_split(everyone, ranks.size)[ranks.rank]
    size = base.batch_size or 64
    share: DataLoader[Any] = DataLoader(
        data,
        batch_sampler=[own[at : at + size].tolist() for at in range(0, len(own), size)],
        collate_fn=base.collate_fn,
        num_workers=base.num_workers,
    )
    answers = Answers()

    def classify() -> None:
        if len(own):
            device = device_of(local_model(model))
            backend, batches = Serial(device), around(loader, share)
            evaluate(model, batches, backend, each=answers.add, forward=forward)

    remedy = "pass a `val_loader` of images and labels, or leave `evaluate` out"
    ranks.attempt("evaluation mean", "the exact evaluation", classify, remedy=remedy)
    answer = answers.gather(own, everyone, ranks.backend)
    found = np.full((2, len(parts[-1][0])), np.nan)
    found[:, parts[0][1]] = answer.label == answer.predicted, answer.loss
    return found[0], found[1]


def _explain(value: float, hits: Measure, losses: Measure, epoch: Epoch, ranks: Ranks) -> Finding:
    """Return the finding for a figure; it has a figure itself if a mistake explains this one.

    What is exact is tried first, and mistakes with a smaller tolerance: there are several of them.
    """
    of_hits, of_losses = (_usual_figures(it, epoch, ranks) for it in (hits, losses))
    errors = {"": 1 - of_hits[""], _ALL: 1 - of_hits[_ALL]}
    near = 0.25 / np.isfinite(hits).sum()
    tries = [(value / unit, it, near) for it in (of_hits, errors) for unit in (1, 100)]
    tries.append((value, of_losses, _LOSS_TOLERANCE * of_losses[""]))
    for reported, usual, near in tries:
        off = abs(reported - usual[""])
        if off <= near:
            is_all = usual is not of_losses and abs(reported - usual[_ALL]) < _CLOSER * off
            return _named(_ALL * is_all, reported, usual[""])  # padding may move it less
    for reported, usual, near in tries:
        limit = near if usual is of_losses else min(near, _ROUNDED)
        name = next((it for it in usual if abs(reported - usual[it]) <= limit), None)
        if name is not None:
            return _named(name, reported, usual[""])
    text = (
        f"evaluate() gives {value:.5g}; top-1 over each sample once is {of_hits['']:.5g}, the loss "
        f"{of_losses['']:.5g}"
    )
    remedy = "nothing if it measures something else; else compare it sample by sample"
    return Finding(check="evaluation mean", level="note", text=text, remedy=remedy)


def _usual_figures(measure: Measure, epoch: Epoch, ranks: Ranks) -> dict[str, float]:
    """Return the figures that ways to average give: of each sample once, then of mistakes."""
    batches = [measure[numbers] for numbers in epoch.batches() if len(numbers)]
    means = sum(float(batch.mean()) for batch in batches)
    total, number = float(sum(batch.sum() for batch in batches)), int(epoch.sizes.sum())
    full = int(epoch.sizes.max(initial=0)) * len(batches)
    everyone = ranks.gather([total, number, means, len(batches), full])
    totals, numbers, means, counts, fulls = np.array(everyone, dtype=np.float64).T
    with np.errstate(invalid="ignore"):  # a worker may have no sample
        own, of_means, of_full = totals / numbers, means / counts, totals / fulls
    read = totals.sum() / numbers.sum()
    figures = {
        "": np.nanmean(measure),
        _ALL: read,
        _HITS: totals.sum() / np.isfinite(measure).sum(),
        "the mean of the batch means": means.sum() / counts.sum(),
        "the mean of the worker means": own.mean(),
        "the mean of the worker means of batch means": of_means.mean(),
        "the sum over the workers, not their mean": own.sum(),
        "the sum over the workers of batch means": of_means.sum(),
        "the sum over full batches, of which some are not full": totals.sum() / fulls.sum(),
        "the mean over workers and full batches, of which some are not full": of_full.mean(),
        "the sum over the number of batches, not of samples": totals.sum() / counts.sum(),
        "divided by the workers twice": read / ranks.size,
        "the figure of worker 0's samples": own[0],
    }
    return {name: float(figure) for name, figure in figures.items()}


def _named(name: str, value: float, exact: float) -> Finding:
    off = abs(value - exact)
    if not name:
        text = f"evaluate() gives {value:.5g}, the figure of each sample once"
        return Finding(check="evaluation mean", level="fine", text=text)
    if name in {_ALL, _HITS}:
        return Finding(
            check="evaluation mean",
            level="note",
            text=f"evaluate() gives {value:.5g}; over each sample once it is {exact:.5g}: repeated "
            "samples count twice, or some are missing",
            remedy="evaluate shares of any size without padding: largebatch.training.evaluate",
            figure=off,
        )
    return Finding(
        check="evaluation mean",
        level="fault",
        text=f"evaluate() gives {value:.5g}, {name}; over each sample once it is {exact:.5g}",
        remedy="sum hits and samples over batches and workers, then divide",
        figure=off,
    )
