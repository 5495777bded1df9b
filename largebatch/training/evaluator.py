"""Measures the model of a run on its validation, training and held-out images."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from largebatch.data.pipeline import CleanSamples, Pipeline
from largebatch.data.types import Batch
from largebatch.distributed.backend import Backend
from largebatch.models.wrappers import uncompiled
from largebatch.optim.schedule_free import at_average, is_averaging, store_average
from largebatch.polish.statistics import Drift, polish
from largebatch.training.evaluation import Metrics, evaluate
from largebatch.training.state import TrainState

Each = Callable[[Tensor, Tensor], object]
"""Called with the scores and labels of every batch, as `evaluate` does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Measures the current model of a run, on all workers.

    If the optimizer averages weights, their average is measured, with statistics of its own.
    """

    state: TrainState
    pipeline: Pipeline
    backend: Backend
    views: int
    """Views of each image whose logits are averaged."""

    average_samples: int | None
    """Number of images that the statistics of an optimizer's average are measured on."""

    def validation(self, each: Each = lambda *_: None) -> Metrics:
        """Evaluate on the validation data; `each` is as in evaluate."""
        expected = self.pipeline.plan.val_samples
        return self._evaluate(self.pipeline.validation(), expected=expected, each=each)

    def training(self) -> Metrics:
        """Evaluate on all training images, without augmentation."""
        samples = CleanSamples(self.pipeline, self.pipeline.plan.train_samples)
        return self._evaluate(samples, expected=samples.samples)

    def held_out(self) -> Metrics:
        """Evaluate on the training samples that are held out."""
        expected = len(self.pipeline.held_out_samples)
        return self._evaluate(self.pipeline.held_out(), expected=expected)

    def statistics(self, samples: int) -> Drift:
        """Polish the statistics of the model over the first samples of the training order."""
        images = CleanSamples(self.pipeline, samples)
        return polish(self.state.model, images, self.backend)

    def store_average(self) -> None:
        """Copy the average of the weights into the model, if the optimizer has one."""
        optimizer = self.state.updater.optimizer
        if is_averaging(optimizer.param_groups):
            store_average(optimizer)
            self._measure_average()

    def _evaluate(
        self, batches: Iterable[Batch], *, expected: int, each: Each = lambda *_: None
    ) -> Metrics:
        model = self.state.model
        if self.views > 1:
            from largebatch.models.views import MeanOfViews

            model = MeanOfViews(model, views=self.views)
        with self._measurable():
            return evaluate(model, batches, self.backend, expected=expected, each=each)

    @contextmanager
    def _measurable(self) -> Iterator[None]:
        """Run the model uncompiled, and at the average of its weights if the optimizer has one."""
        optimizer = self.state.updater.optimizer
        with uncompiled():
            if not is_averaging(optimizer.param_groups):
                yield
                return
            with at_average(self.state.model, optimizer):
                self._measure_average()
                yield

    def _measure_average(self) -> None:
        if self.average_samples is not None:
            self.statistics(self.average_samples)
