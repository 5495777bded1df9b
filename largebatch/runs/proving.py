"""What makes a run on a GPU fast, proven before its first update, and decided by all workers.

The first worker of each host tries the kernels and the graph of the recipe on its device, in a
process of their own or from the record of an earlier run (`proof`); the others of the host, if they
have the same device, use the result. What one worker refuses no worker uses: with different kernels
the optimizers of workers would round differently, and NCCL hangs where the graphs of workers
differ.
"""

import json
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from largebatch import accelerator, proof
from largebatch.data.decoders import pixel_cache
from largebatch.data.index.index import Index
from largebatch.data.pipeline import DTYPES
from largebatch.data.types import Batch
from largebatch.distributed.agreement import agree, gather_values
from largebatch.distributed.backend import Backend
from largebatch.distributed.environment import STARTING
from largebatch.distributed.serial import Serial
from largebatch.models import kernels as batchnorm_kernels
from largebatch.models.batchnorm import SpanBatchNorm, Spans, with_span
from largebatch.models.of_recipe import build_model
from largebatch.optim.kernels.tabled import Tabled
from largebatch.optim.kernels.trials import Build
from largebatch.optim.kernels.trials import trials_of as trials_of_optimizer
from largebatch.proof import BATCHNORM, CROPS, GRAPH, OPTIMIZER, PARTS, Trial, Trials, TrialsResult
from largebatch.recipe.arithmetic.plan import Plan, make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.runs.optimizer_of_recipe import build_momentum_sgd, build_optimizer
from largebatch.runs.options import Options
from largebatch.runs.passes import random_labels
from largebatch.runs.state import build_state, criterion_of_trial
from largebatch.training.graph import UseGraph, refused, step_for
from largebatch.training.loop import step_seeds, train

_UPDATES = 7  # of a trial of the graph: two before it is recorded, and five that are measured
_RECORDED = 2

NOT_TRIED = "not tried yet"
"""Why a part is not used that no trial has decided, such as one that a model does not have."""

_SHRUNK = 0.01  # of the peak learning rate: a few updates on noise must not diverge


def wait_for_proof(device: torch.device) -> None:
    """Use PyTorch's operations until `settle`, such as while memory is measured."""
    proof.switched_off()  # raises an error for a value that the variable does not take
    proof.decide(device, dict.fromkeys(PARTS, NOT_TRIED))


def switch_off(recipe: Recipe, device: torch.device) -> None:
    """Use PyTorch's operations for a recipe that asks for them, where nothing is trained.

    Evaluations and polishing try by themselves what else they use.
    """
    refusals = {part: _choice(recipe, part) for part in PARTS}
    proof.decide(device, {part: why for part, why in refusals.items() if why is not None})


def settle(
    recipe: Recipe, plan: Plan, index: Index, model: nn.Module, backend: Backend, options: Options
) -> str | None:
    """Decide with all workers what this run uses; return a line for the log, None on a CPU.

    `index` is that of the training images. Raises RecipeError, on every worker, if a graph is
    required and refused.
    """
    device = backend.device
    has_crops = proof.has_kernels(CROPS, device)
    pixels = pixel_cache.one_size(index) if has_crops else None
    has_spans = any(isinstance(layer, SpanBatchNorm) for layer in model.modules())
    parts = _parts_on(device, recipe, has_spans=has_spans, has_one_size=pixels is not None)
    if not parts:  # on no worker
        return None
    # What the user has switched off is not tried, and what is refused here is refused by all below.
    refusals = {part: _choice(recipe, part) for part in parts}
    tried = [part for part, refusal in refusals.items() if refusal is None]
    settings, key = _settings(recipe, plan, pixels, options.imports)

    def prove() -> dict[str, TrialsResult]:
        if not tried:
            return {}
        accelerator.free_memory_bytes(device)  # gives the trials what the allocator has cached
        return proof.prove(
            __name__,
            tried,
            device,
            settings,
            key=key,
            seconds=min(proof.LONGEST, options.timeout * STARTING / 2),  # the other workers wait
            announces=backend.rank == 0,
        )

    facts = partial(proof.facts_of_trials, __name__, tried, device, key)
    findings = _findings_on_hosts(prove, facts, backend)
    refusals |= {part: finding.refused for part, finding in findings.items()}
    # All workers come here, also one without a trial: a host with another device decides with them.
    agreed = agree(refusals, backend, backend.device)
    proof.decide(device, agreed)
    if recipe.execution.graph is True and agreed.get(GRAPH):
        raise refused(str(agreed[GRAPH]))
    return _line(agreed, findings)


def _findings_on_hosts(
    prove: Callable[[], dict[str, TrialsResult]], facts: Callable[[], str], backend: Backend
) -> dict[str, TrialsResult]:
    """Return the findings of this worker, or of its host's first one if it has the same facts.

    Otherwise all workers of a host would compile the same kernels at the same time.
    """
    is_first = backend.local_rank == 0
    findings = prove() if is_first else {}
    if backend.world_size == 1:
        return findings
    facts_here = facts()
    sent = None
    if is_first:
        sent = [facts_here, {part: asdict(finding) for part, finding in findings.items()}]
    everyone = gather_values(sent, backend, backend.device)
    if is_first:
        return findings
    for facts_there, record in filter(None, everyone):
        if facts_there == facts_here:
            return {part: TrialsResult(**fields) for part, fields in record.items()}
    return prove()  # this worker's device is another one than that of the first


def prove_again(recipe: Recipe, device: torch.device) -> dict[str, TrialsResult]:
    """Return the findings of new trials of a recipe on one device, of images in a cache."""
    side = recipe.data.image_size
    settings, key = _settings(recipe, make_plan(recipe), (side, side), ())
    parts = _parts_on(device, recipe, has_spans=True, has_one_size=True)
    return proof.prove(__name__, parts, device, settings, key=key, again=True)


def _parts_on(
    device: torch.device, recipe: Recipe, *, has_spans: bool, has_one_size: bool
) -> list[str]:
    """Return the parts that this type of device has and the recipe may use."""
    graph = recipe.execution.graph is not False and recipe.sums_gradients
    is_cached = has_one_size and recipe.execution.cache in {None, "device"}
    may_use = {
        BATCHNORM: has_spans and proof.has_kernels(BATCHNORM, device),
        OPTIMIZER: proof.has_kernels(OPTIMIZER, device),
        CROPS: is_cached and proof.has_kernels(CROPS, device),
        GRAPH: graph and device.type in accelerator.GRAPHS,
    }
    return [part for part in PARTS if may_use[part]]


def _choice(recipe: Recipe, part: str) -> str | None:
    """Return why a part is not even tried: by the variable or by the recipe."""
    if reason := proof.switched_off():
        return reason
    execution = recipe.execution
    if execution.kernels == "torch" and not (part == GRAPH and execution.graph is True):
        return "execution.kernels: torch"
    return None


def _settings(
    recipe: Recipe, plan: Plan, pixels: tuple[int, int] | None, imports: Sequence[str]
) -> tuple[dict[str, object], object]:
    """Return what the trials need, and what of it decides their result.

    Seeds, learning rates and other numbers of the method do not: a study has one trial.
    """
    resolved = recipe.with_execution(device_batch=plan.device_batch)
    sides = {piece.image_size for piece in plan.sizes} | {recipe.data.image_size}
    sizes = [[plan.device_batch, side] for side in sorted(sides, reverse=True)]
    execution = recipe.execution
    key = {
        "model": recipe.model.model_dump(mode="json", exclude={"weights", "head_std"}),
        "classes": recipe.data.classes,
        "mixes": recipe.data.mix is not None,
        "optimizer": _without_numbers(recipe.optimizer.model_dump(mode="json")),
        "loss": _without_numbers(recipe.loss.model_dump(mode="json", exclude={"class_weights"})),
        "weights classes": recipe.loss.class_weights is not None,
        "affine": recipe.polish is not None and recipe.polish.affine is not None,
        "precision": recipe.precision,
        "skips": recipe.nonfinite.action,
        "span": plan.bn_span,
        "shares": plan.sync_workers > 1,
        "accumulates": plan.accumulation > 1,
        "sizes": sizes,
        "pixels": pixels,
        "memory_format": execution.memory_format,
        "compile": execution.compile,
        "kernels": execution.kernels,
        "required": execution.graph is True,
    }
    settings = {
        "recipe": resolved.model_dump(mode="json"),
        "workers": plan.workers,
        "sizes": sizes,
        "pixels": pixels,
        "imports": [*imports],
    }
    return settings, key


def _without_numbers(section: Any) -> Any:  # noqa: ANN401 -- any JSON
    if isinstance(section, dict):
        return {k: _without_numbers(v) for k, v in section.items() if not isinstance(v, float)}
    return section


def _line(agreed: Mapping[str, str | None], findings: Mapping[str, TrialsResult]) -> str | None:
    words = []
    for part, refusal in agreed.items():
        if refusal is not None:
            words.append(f"{part}: PyTorch's operations ({refusal})")
        elif findings[part].variants:
            words.append(f"{part}: {findings[part].describe()}")
    return f"kernels and graphs: {'; '.join(words)}" if words else None


def trials(device: torch.device, settings: Mapping[str, Any]) -> Trials:
    """Return the trials of a recipe on a device, in a process that has nothing else to do."""
    for name in settings["imports"]:
        from largebatch.data.datasets.own import import_own

        import_own(name)
    torch.backends.cudnn.allow_tf32 = False  # as in a run
    recipe = Recipe.model_validate_json(json.dumps(settings["recipe"]))
    plan = make_plan(recipe, workers=settings["workers"])
    sizes = [(int(num), int(side)) for num, side in settings["sizes"]]
    update = partial(_Updates, recipe, plan, device)

    def batchnorm() -> Iterator[Trial]:
        from largebatch.models.kernels.trials import trials_of

        uses: Counter[batchnorm_kernels.Use] = Counter()
        for num, side in sizes:
            with batchnorm_kernels.noted_uses() as noted:
                update(num, side, graph=False, updates=1).result()
            uses |= noted
        return trials_of(uses, device)

    def optimizer() -> Iterator[Trial]:
        model = build_model(recipe, device)
        scaled = recipe.precision == "fp16"
        is_apex = recipe.execution.kernels == "apex"
        builders: dict[str, Build] = {
            recipe.optimizer.kind: lambda model: build_optimizer(recipe, model, Serial(device))
        }
        if recipe.polish is not None and recipe.polish.affine is not None:
            builders["sgd of the affine stage"] = partial(
                build_momentum_sgd, recipe.optimizer, lr=recipe.polish.affine.lr, scaled=scaled
            )
        for name, build in builders.items():
            built = build(model)
            if isinstance(built, Tabled) or isinstance(getattr(built, "_others", None), Tabled):
                yield from trials_of_optimizer(
                    f"{name} by apex" if is_apex else name,
                    build,
                    model,
                    scaled=scaled,
                    count=0 if is_apex else 1,  # who asks for apex's gets them if they are right
                )

    def crops() -> Iterator[Trial]:
        from largebatch.data.decoders.trials import trials_of

        return trials_of(
            tuple(settings["pixels"]),
            sizes,
            device,
            channels_last=recipe.execution.channels_last(device.type),
            dtype=DTYPES[recipe.precision],
        )

    def graph() -> Iterator[Trial]:
        is_required = recipe.execution.graph is True
        for num, side in sizes:
            # A graph rounds like its operations, but some of these add in any order; `exact` is a
            # second run without a graph, whose difference from the first is what the graph's may
            # be.
            ours = update(num, side, graph="auto")
            theirs = update(num, side, graph=False)
            yield Trial(
                name=f"updates of {num} images of {side} x {side}",
                ours=ours.result,
                theirs=theirs.result,
                exact=update(num, side, graph=False).result,
                is_repeated=True,
                count=0 if is_required else 1,
                seconds=partial(_both_seconds, ours, theirs),
                remark=partial(getattr, ours, "noted"),
            )

    return {BATCHNORM: batchnorm, OPTIMIZER: optimizer, CROPS: crops, GRAPH: graph}


def _both_seconds(ours: "_Updates", theirs: "_Updates") -> tuple[float, float]:
    return ours.seconds, theirs.seconds


class _Updates:
    """Updates of a recipe on random images by one worker, from the same state in each object."""

    def __init__(  # noqa: PLR0913 -- what decides an update
        self,
        recipe: Recipe,
        plan: Plan,
        device: torch.device,
        num: int,
        side: int,
        *,
        graph: UseGraph,
        updates: int | None = None,
    ) -> None:
        self._recipe = recipe
        self._plan = plan
        self._device = device
        self._num = num
        self._side = side
        self._graph = graph
        self._updates = updates or _UPDATES
        self.seconds = 0.0
        """Median of the updates that a graph replays."""

        self.noted = ""
        """Which parts of an update are in a graph, and why others are not."""

    def _note(self, text: str) -> None:
        self.noted = text

    def result(self) -> list[Tensor]:
        """Make the updates; return losses, weights, statistics and the optimizer's state."""
        recipe = self._recipe
        plan = self._plan
        device = self._device
        group = Serial(device)
        model = build_model(recipe, device)
        if plan.sync_workers > 1:  # its part of a span is all of it here
            with_span(model, self._num)
        if recipe.execution.compile and self._updates > 1:
            from largebatch.models.compiled import compile_model

            shares = plan.sync_workers > 1
            compile_model(model, recipe.execution.compile, device, shares_spans=shares)
        # A first and a last micro-batch; one between them computes nothing that these do not.
        accumulation = min(2, plan.accumulation)
        accelerator.seed(0, device)
        images = torch.randn(self._num, 3, self._side, self._side, device=device)
        if recipe.execution.channels_last(device.type):
            images = images.contiguous(memory_format=torch.channels_last)
        mixes = recipe.data.mix is not None
        labels = random_labels(self._num, recipe.data.classes, device, mixes=mixes)
        with closing(build_state(recipe, plan, model, group)) as state:
            # One worker alone: layers that share spans in the run must not wait for others here.
            spans = Spans(model, group)
            for layer in spans.layers if plan.sync_workers > 1 else ():
                layer.group = group
            step = step_for(self._graph, device, note=self._note)(
                model,
                state.updater.optimizer,
                criterion_of_trial(recipe, device),
                state.updater.reducer,
                spans,
                scaler=state.scaler,
                global_batch=self._num * accumulation,
                skip_nonfinite=recipe.nonfinite.action == "skip" and not state.scaler.is_enabled(),
                clip_norm=recipe.optimizer.clip_norm,
                follow=state.move_average,
            )
            updates = train(
                step,
                repeat(Batch(images, labels)),
                lambda _: _SHRUNK * recipe.schedule.peak_lr,
                steps=range(self._updates),
                accumulation=accumulation,
                seed=step_seeds(0, 0),
            )
            losses = []
            seconds = []
            with closing(updates):
                for _ in range(self._updates):
                    # sync: this is a measurement
                    accelerator.synchronize(device)
                    start = time.perf_counter()
                    losses.append(next(updates).loss)
                    accelerator.synchronize(device)
                    seconds.append(time.perf_counter() - start)
            self.seconds = statistics.median(seconds[_RECORDED:] or seconds)
            tensors = [torch.stack(losses), *model.state_dict().values()]
            for of_weight in state.updater.optimizer.state.values():
                tensors += [value for value in of_weight.values() if isinstance(value, Tensor)]
            return [tensor.detach().clone() for tensor in tensors if tensor.is_floating_point()]
