"""Recipe and machine -> a session: the workers, the model, the images, and what trains them."""

import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from functools import partial

import torch
from torch import nn
from torch.profiler import ProfilerAction, profile

from largebatch import accelerator
from largebatch.data.decoding import choose_decoding
from largebatch.data.images import read_images
from largebatch.data.pipeline import Pipeline, open_images, open_pipeline
from largebatch.distributed.agreement import Facts, require_agreement, share_weights
from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import connect
from largebatch.distributed.environment import LAUNCHER, available_cores, world_size
from largebatch.errors import DeviceMemoryError, PlanError, RecipeError
from largebatch.models.of_recipe import build_model, require_accepted, require_trainable
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.runs.fitting import resolve
from largebatch.runs.interrupts import stop_requests
from largebatch.runs.options import Options
from largebatch.runs.proving import settle, switch_off, wait_for_proof
from largebatch.runs.state import build_session, build_state
from largebatch.tracking.environment import versions
from largebatch.tracking.events import TRACE
from largebatch.training.checkpoint import require_storable
from largebatch.training.graph import require_graphs
from largebatch.training.session import Session, Updates, synchronous_updates


@contextmanager
def join(
    options: Options,
    facts: Facts,
    *,
    starting: bool = False,
    splits: bool = False,
) -> Iterator[Backend]:
    """Connect to the other workers; possible once in a process, as their address serves once.

    `starting` and `splits` are passed to connect. The backend is closed only on success: after an
    error the other workers may be gone. Raises MismatchError on every worker unless all have the
    same options, packages and `facts`.
    """
    for name in options.imports:
        from largebatch.data.datasets.own import import_own

        import_own(name)
    backend = connect(options.backend, timeout=options.timeout, starting=starting, splits=splits)
    require_agreement({**facts, **options.shared, "versions": versions()}, backend, backend.device)
    if "OMP_NUM_THREADS" not in os.environ:
        threads = max(1, available_cores() // backend.local_size)
        torch.set_num_threads(threads)
    torch.backends.cudnn.allow_tf32 = False  # fp32 in a recipe is fp32
    yield backend
    backend.close()


@contextmanager
def open_session(recipe: Recipe, options: Options, facts: Facts) -> Iterator[Session]:
    """Build every object of a run, on all workers; trackers can be added later.

    `facts` and errors are those of join.
    """
    splits = True
    with suppress(PlanError, RecipeError):  # raised again when the workers know each other's recipe
        # One sample at most: whether workers would share spans where memory is short.
        most = 1 if accelerator.kind() or options.resume else None
        splits = make_plan(recipe, workers=world_size(), fits=most).sync_workers > 1
    facts, protocol = {**facts, **recipe.model_dump(mode="json")}, recipe.protocol
    with join(options, facts, starting=True, splits=splits) as backend:
        # Reading a folder for the first time is a part of the time limit.
        began, begun = time.time(), time.monotonic()
        # What the recipe alone decides, and what it cannot be divided into, before images are read.
        draft = make_plan(recipe, workers=backend.world_size, backend=backend.name)
        section, device = recipe.model, backend.device
        wait_for_proof(device)
        model = build_model(recipe, device)
        require_trainable(model, section.name)
        require_storable(model, section.name)
        sizes = {piece.image_size for piece in draft.sizes}
        require_accepted(section, classes=recipe.data.classes, image_sizes=sizes)
        require_graphs(recipe.execution.graph, device, protocol=protocol is not None)
        # A server without a learner sees the time only when learners rest, and would mistake the
        # time between for the time that a stop needs.
        serves = protocol is not None and backend.rank >= protocol.learners
        limit = None if serves else options.time_limit
        handles_signals = backend.rank == 0 and LAUNCHER not in os.environ  # else the launcher does
        alone = protocol is not None  # each worker's gradients are its own, for the servers
        # Cached images take memory of a GPU, so the device batch is measured after them.
        images = read_images(recipe, backend, folder=options.data, dataset=options.dataset)
        passes = draft.epoch(draft.updates)
        decoding = choose_decoding(recipe, images, backend, passes=passes)
        resumes = options.out if options.resume else None
        plan, remarks = resolve(recipe, draft, model, backend, resumes=resumes)
        if decoding.remark is not None:
            remarks.insert(0, decoding.remark)
        with (
            closing(open_pipeline(recipe, plan, images, decoding, backend)) as pipeline,
            stop_requests(handles_signals=handles_signals, limit=limit, begun=begun) as wants_stop,
        ):
            proven = settle(recipe, plan, images.train, model, backend, options)
            if recipe.execution.compile:
                from largebatch.models.compiled import compile_model

                mode, shares_spans = recipe.execution.compile, plan.sync_workers > 1
                compile_model(model, mode, device, shares_spans=shares_spans)
            if backend.rank == 0:  # worker 0 sends its weights to the others
                _init_from_images(model, pipeline)
            share_weights(model, backend, facts={"plan": asdict(plan), "index": pipeline.splits})
            with closing(build_state(recipe, plan, model, backend, alone=alone)) as state:
                updates: Updates = synchronous_updates
                if protocol is not None:
                    updates = protocol.build(recipe, state, backend)
                yield build_session(
                    recipe,
                    pipeline,
                    backend,
                    state,
                    updates,
                    folder=options.out,
                    alone=alone,
                    wants_stop=wants_stop,
                    began=began,
                    proven=proven,
                    remarks=remarks,
                    ignored=images.ignored,
                )


@contextmanager
def open_measuring(recipe: Recipe, options: Options, facts: Facts) -> Iterator[Session]:
    """Build the objects that evaluate or polish a saved run on any number of workers."""
    facts, here = {**facts, **recipe.model_dump(mode="json")}, recipe.without_machine_settings
    device_batch, folder = recipe.execution.device_batch, options.data
    with join(options, facts) as backend:
        switch_off(here, backend.device)
        alone = make_plan(recipe.mathematics)
        plan = alone.measuring(workers=backend.world_size, device_batch=device_batch)
        model = build_model(recipe, backend.device)
        with closing(
            open_images(recipe, plan, backend, folder=folder, dataset=options.dataset)
        ) as pipeline:
            share_weights(model, backend, facts={"plan": asdict(plan), "index": pipeline.splits})
            with closing(build_state(here, plan, model, backend)) as state:
                updates = synchronous_updates  # it makes none
                try:
                    with accelerator.memory_errors():
                        yield build_session(
                            here, pipeline, backend, state, updates, folder=options.out
                        )
                except torch.OutOfMemoryError:
                    raise DeviceMemoryError(
                        f"execution.device_batch: {plan.device_batch:,} images do not fit the "
                        f"memory of {backend.device}; give a smaller --device-batch"
                    ) from None


def _init_from_images(model: nn.Module, pipeline: Pipeline) -> None:
    """Call the model's `init_from_images`, if any, with clean images in the first epoch's order."""
    init = getattr(model, "init_from_images", None)
    if init is None:
        return
    size, positions = pipeline.plan.statistics_batch, range(pipeline.plan.train_samples)
    starts = range(0, len(positions), size)
    parts = (pipeline.training_samples(positions[start : start + size]) for start in starts)
    # In float32, with decoders of its own: weights are computed from the images.
    exact = replace(pipeline, dtype=torch.float32, idle={})
    with closing(exact), closing(exact.clean("train", parts)) as batches:
        init(batch.images for batch in batches)


def with_profiler(
    session: Session, options: Options, *, until: int
) -> tuple[Session, AbstractContextManager[object]]:
    """Return the session with a profiler of the updates in `options.profile`, and that profiler.

    It writes PyTorch's trace. Raises PlanError unless this part of the run makes these updates.
    """
    if options.profile is None:
        return session, nullcontext()
    if session.updates is not synchronous_updates:
        raise PlanError("--profile follows no learners of a protocol; leave one of the two out")
    first, last = options.profile
    made, end = session.state.progress.step, min(until, session.plan.updates)
    if options.resume == "auto":  # the same command starts the run and every restart
        first = max(first, made + 1)
        if first > last:
            return session, nullcontext()
    if not made < first <= last <= end:
        raise PlanError(f"--profile {first}:{last}: expected updates from {made + 1} to {end}")
    if session.backend.rank:
        return session, nullcontext()

    def action(number: int) -> ProfilerAction:
        number += made + 1
        if number == last:
            return ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.RECORD if first <= number < last else ProfilerAction.NONE

    def write(found: profile) -> None:
        found.export_chrome_trace(str(options.out / TRACE))
        session.step_log.resume_clock()

    profiler = profile(schedule=action, on_trace_ready=write, acc_events=True)
    return replace(session, updates=partial(synchronous_updates, after=profiler.step)), profiler
