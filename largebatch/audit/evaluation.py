"""A script's evaluation against exact figures: samples, means, modes, and workers that disagree.

Each sample is classified once, by any worker. From the hits of all samples and the batches of the
user's loader follow the figures that usual mistakes give, so that the mistake can be named.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import nn
from torch.utils.data import DataLoader, Subset

from largebatch.audit.findings import Finding, fault, fine, note, unknown
from largebatch.audit.ranks import Ranks
from largebatch.audit.replicas import depends_on_mode
from largebatch.audit.samples import (
    Epoch,
    NoNumbersError,
    Numbers,
    Readings,
    around,
    read_epochs,
    torch_loader,
    whole,
)
from largebatch.audit.subject import Subject
from largebatch.distributed.serial import Serial
from largebatch.formatting import percent, plural
from largebatch.models.wrappers import device_of, local_model
from largebatch.training.evaluation import Answers, evaluate

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

_ALL = "the mean of all readings"


def check_evaluation(subject: Subject, ranks: Ranks) -> list[Finding]:
    """Check the samples of a validation loader, and the script's evaluation if it is given."""
    found, epoch, held = _check_samples(subject, ranks)
    if subject.evaluate is None:
        return found
    evaluation = subject.evaluate
    models = [subject.inner, *([subject.averaged] if subject.averaged else [])]
    remedy = "correct it, or leave `evaluate` out; it must return a number on every worker"
    with _modes(models) as training:
        value = ranks.attempt(
            "evaluation mean", "evaluate()", lambda: float(evaluation()), remedy=remedy
        )
    values, layers = zip(*ranks.gather([value, len(training)]), strict=True)
    if max(layers):
        text = f"{plural(max(layers), 'layer')} ran in training mode"
        remedy = "call model.eval() before the evaluation and model.train() after it"
        found.append(fault("evaluation mode", text, remedy, float(max(layers))))
    else:
        found.append(fine("evaluation mode", "no layer ran in training mode"))
    if not np.allclose(values, values[0], _EQUAL, 0, equal_nan=True):
        text = f"workers report {min(values):.5g} to {max(values):.5g}"
        remedy = "sum hits and samples over the workers (all_reduce), then divide"
        found.append(fault("evaluation mean", text, remedy, max(values) - min(values)))
    elif epoch is None or held is None:
        text = f"evaluate() gives {value:.5g}, which was not compared"
        remedy = "give the audit val_loader too, of one data set that the workers divide"
        found.append(unknown("evaluation mean", text, remedy))
    elif not max(layers):
        figures = [_figure(it, subject, held, epoch, values[0], ranks) for it in models]
        figures.sort(key=lambda it: (it.level != "fine", it.figure is None))
        if figures[0].level == "fine" and found[0].level == "note":  # padding is left out
            text = f"{found[0].text.partition(';')[0]}; evaluate() counts each sample once"
            found[0] = replace(found[0], level="fine", text=text, remedy="")
        found.append(figures[0])  # of the model or its average: the first that is explained
    return found


def _check_samples(
    subject: Subject, ranks: Ranks
) -> tuple[list[Finding], Epoch | None, Numbers | None]:
    """Return findings on a validation loader, this worker's samples, and those of all workers."""
    loader = subject.val_loader
    if loader is None:
        return [], None, None
    try:
        _, epochs, readings = read_epochs(
            loader, 1, ranks, "evaluation samples", other=subject.loader
        )
    except NoNumbersError as error:
        remedy = "give the audit a DataLoader whose data set has a length"
        return [unknown("evaluation samples", str(error), remedy)], None, None
    return [_coverage(readings, ranks.size)], epochs[0], readings.held


def _coverage(readings: Readings, world_size: int) -> Finding:
    size, never, twice = readings.size, readings.never, readings.twice
    if readings.everything:
        return fine("evaluation samples", f"every worker reads all {plural(size, 'sample')}")
    if not never and not twice:
        return fine("evaluation samples", f"each of {plural(size, 'sample')} is read once")
    moves = max(twice / max(1, size + twice), never / max(1, size))
    text = f"{plural(size, 'sample')}: {never:,} never read, {twice:,} read again"
    text += ", of data sets that differ between workers" * (readings.held is None)
    text += f"; top-1 may be off by {percent(moves)} points"
    if never < world_size and twice < max(world_size, readings.global_batch):
        remedy = "evaluate shares of any size without padding: largebatch.training.evaluate"
        return note("evaluation samples", text, remedy, float(never or twice))
    remedy = "no drop_last, one order of the data on all workers, DistributedSampler(shuffle=False)"
    return fault("evaluation samples", text, remedy, float(never or twice))


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


def _figure(
    model: nn.Module, subject: Subject, held: Numbers, epoch: Epoch, value: float, ranks: Ranks
) -> Finding:
    """Return the finding for a figure; it has a figure itself if a mistake explains this one.

    Each sample is classified by one worker. What is exact is tried first, and mistakes with a
    smaller tolerance: there are several of them.
    """
    loader, forward = subject.val_loader, subject.forward
    base = torch_loader(loader)
    assert base is not None  # its sample numbers were drawn
    data = Subset(whole(base.dataset)[0], held.tolist())
    everyone = np.arange(len(held))
    own = np.array_split(everyone, ranks.size)[ranks.rank]
    size, answers = base.batch_size or 64, Answers()
    share: DataLoader[Any] = DataLoader(
        data,
        batch_sampler=[own[at : at + size].tolist() for at in range(0, len(own), size)],
        collate_fn=base.collate_fn,
        num_workers=base.num_workers,
    )

    def classify() -> None:
        if len(own):
            backend = Serial(device_of(local_model(model)))
            evaluate(model, around(loader, share), backend, each=answers.add, forward=forward)

    remedy = "pass a `val_loader` of images and labels, or leave `evaluate` out"
    ranks.attempt("evaluation mean", "the exact evaluation", classify, remedy=remedy)
    answer = answers.gather(own, everyone, ranks.backend)
    measures = np.full((2, max(held, default=0) + 1), np.nan)  # hits and losses
    measures[:, held] = answer.label == answer.predicted, answer.loss
    of_hits, of_losses = (_usual_figures(it, epoch, ranks) for it in measures)
    errors = {"": 1 - of_hits[""], _ALL: 1 - of_hits[_ALL]}
    tries = [(value / unit, it, 0.25 / len(held)) for it in (of_hits, errors) for unit in (1, 100)]
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
    text = f"evaluate() gives {value:.5g}; top-1 over each sample once is {of_hits['']:.5g}"
    remedy = f"nothing if it measures something else than top-1 or the loss, {of_losses['']:.5g}"
    return note("evaluation mean", text, remedy)


def _usual_figures(measure: Measure, epoch: Epoch, ranks: Ranks) -> dict[str, float]:
    """Return the figures that ways to average give: of each sample once, then of mistakes."""
    batches = [measure[numbers] for numbers in epoch.batches() if len(numbers)]
    means = sum(float(batch.mean()) for batch in batches)
    total, number = float(sum(batch.sum() for batch in batches)), int(epoch.sizes.sum())
    everyone = ranks.gather([total, number, means, len(batches)])
    totals, numbers, means, counts = np.array(everyone, dtype=np.float64).T
    with np.errstate(invalid="ignore"):  # a worker may have no sample
        own, of_means = totals / numbers, means / counts
    figures = {
        "": np.nanmean(measure),
        _ALL: totals.sum() / numbers.sum(),
        "the mean of the batch means": means.sum() / counts.sum(),
        "the mean of the worker means": own.mean(),
        "the sum over the workers, not their mean": own.sum(),
        "the sum over the workers of batch means": of_means.sum(),
        "the sum over the number of batches, not of samples": totals.sum() / counts.sum(),
        "the figure of worker 0's samples": own[0],
    }
    return {name: float(figure) for name, figure in figures.items()}


def _named(name: str, value: float, exact: float) -> Finding:
    off, text = abs(value - exact), f"evaluate() gives {value:.5g}"
    if not name:
        return fine("evaluation mean", f"{text}, the figure of each sample once")
    if name == _ALL:
        text += f", with repeated or missing samples; over each sample once it is {exact:.5g}"
        remedy = "evaluate shares of any size without padding: largebatch.training.evaluate"
        return note("evaluation mean", text, remedy, off)
    text += f", {name}; over each sample once it is {exact:.5g}"
    remedy = "sum hits and samples over batches and workers, then divide"
    return fault("evaluation mean", text, remedy, off)
