"""Recipe and machine -> a session: the workers, the model, the images, and what trains them."""

import os
import time
from collections.abc import Callable, Iterator
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
from largebatch.data.types import HostCache
from largebatch.distributed.agreement import Facts, require_agreement, share_weights
from largebatch.distributed.backend import Backend
from largebatch.distributed.connection import connect
from largebatch.distributed.environment import LAUNCHER, available_cores, world_size
from largebatch.errors import DeviceMemoryError, PlanError, RecipeError
from largebatch.models.of_recipe import build_model, require_accepted, require_trainable
from largebatch.recipe.arithmetic.plan import Plan, make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.runs.fitting import resolve
from largebatch.runs.interrupts import stop_requests
from largebatch.runs.optimizer_of_recipe import depths_of_recipe
from largebatch.runs.options import Options
from largebatch.runs.proving import settle, switch_off, wait_for_proof
from largebatch.runs.state import build_session, build_state
from largebatch.tracking.environment import versions
from largebatch.tracking.events import TRACE, StopCause
from largebatch.training.checkpoint import require_storable
from largebatch.training.graph import require_graphs
from largebatch.training.session import Session, synchronous_updates


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
    """Connect to the other workers and build every object of a run; trackers can be added later.

    `facts` and errors are those of join.
    """
    splits = True
    with suppress(PlanError, RecipeError):  # raised again when the workers know each other's recipe
        # One sample at most: whether workers would share spans where memory is short.
        most = 1 if accelerator.kind() or options.resume else None
        splits = make_plan(recipe, workers=world_size(), fits=most).sync_workers > 1
    facts = {**facts, **recipe.model_dump(mode="json")}
    with (
        join(options, facts, starting=True, splits=splits) as backend,
        session_on(backend, recipe, options) as session,
    ):
        yield session


@contextmanager
def session_on(
    backend: Backend,
    recipe: Recipe,
    options: Options,
    *,
    handles_stops: bool = True,
    in_float64: bool = False,
) -> Iterator[Session]:
    """Build every object of a run, on all workers of a backend, which may have several in turn.

    Nothing that is built changes afterwards: the images are read, then where their pixels come from
    is chosen, then the plan is resolved, and only then batches are opened.

    Without `handles_stops` nothing answers a signal or a time limit. With `in_float64` weights,
    statistics and gradients are in that type, and batches must be converted to it.
    """
    # Reading a folder for the first time is a part of the time limit.
    began = time.time()
    start_monotonic = time.monotonic()
    device = backend.device
    # A recipe that cannot be divided, or a wrong model, is refused before images are read.
    draft = make_plan(recipe, workers=backend.world_size, backend=backend.name)
    wait_for_proof(device)
    model = build_model(recipe, device)
    if in_float64:
        model.double()
    _require_model(recipe, draft, model)
    require_graphs(recipe.execution.graph, device)

    images = read_images(
        recipe,
        backend,
        folder=options.data,
        dataset=options.dataset,
        cache=host_cache(options, backend),
    )
    warning = images.check_order(recipe.data.order)
    # Cached images take memory of a GPU, so the device batch is measured after them.
    passes = draft.epoch(draft.updates)
    decoding = choose_decoding(recipe, images, backend, passes=passes)
    resumes = options.out if options.resume else None
    plan, remarks = resolve(recipe, draft, model, backend, resumes=resumes)
    if decoding.remark is not None:
        remarks.insert(0, decoding.remark)
    if warning is not None:
        remarks.append(warning)

    requests: AbstractContextManager[Callable[[], StopCause | None]] = nullcontext(lambda: None)
    if handles_stops:
        # A server without a learner sees the time only when learners rest, and would mistake the
        # time between for the time that a stop needs.
        limit = None if recipe.is_server(backend.rank) else options.time_limit
        handles_signals = backend.rank == 0 and LAUNCHER not in os.environ  # else the launcher does
        requests = stop_requests(
            handles_signals=handles_signals, limit=limit, begun=start_monotonic
        )
    with (
        closing(open_pipeline(recipe, plan, images, decoding, backend)) as pipeline,
        requests as wants_stop,
    ):
        proven = settle(recipe, plan, images.train, model, backend, options)
        if recipe.execution.compile:
            from largebatch.models.compiled import compile_model

            shares_spans = plan.sync_workers > 1
            compile_model(model, recipe.execution.compile, device, shares_spans=shares_spans)
        if backend.rank == 0:  # worker 0 sends its weights to the others
            _init_from_images(model, pipeline)
        share_weights(model, backend, facts={"plan": asdict(plan), "index": pipeline.splits})
        with closing(build_state(recipe, plan, model, backend)) as state:
            yield build_session(
                recipe,
                pipeline,
                backend,
                state,
                folder=options.out,
                wants_stop=wants_stop,
                began=began,
                proven=proven,
                remarks=remarks,
                ignored=images.ignored,
            )


def _require_model(recipe: Recipe, plan: Plan, model: nn.Module) -> None:
    """Raise RecipeError unless the model can be trained on these images, saved and resumed."""
    name = recipe.model.name
    require_trainable(model, name)
    require_storable(model, name)
    sizes = {piece.image_size for piece in plan.sizes}
    if recipe.optimizer.layer_decay is not None:
        depths_of_recipe(recipe, model)
    require_accepted(recipe.model, classes=recipe.data.classes, image_sizes=sizes)


def host_cache(options: Options, backend: Backend) -> HostCache | None:
    """Return where this worker keeps what it reads from a bucket; None without --cache-dir."""
    if options.cache_dir is None:
        return None
    share = None
    if options.cache_gb is not None:
        share = int(options.cache_gb * 1e9) // backend.local_size
    return HostCache(
        options.cache_dir, share, worker=backend.local_rank, workers=backend.local_size
    )


@contextmanager
def open_measuring(recipe: Recipe, options: Options, facts: Facts) -> Iterator[Session]:
    """Build the objects that evaluate or polish a saved run on any number of workers."""
    facts = {**facts, **recipe.model_dump(mode="json")}
    # This machine may lack the kernels of the run's, and a measurement sends no gradients.
    portable = recipe.without_machine_settings
    with join(options, facts) as backend:
        switch_off(portable, backend.device)
        plan = make_plan(recipe.mathematics).measuring(
            workers=backend.world_size, device_batch=recipe.execution.device_batch
        )
        model = build_model(recipe, backend.device)
        opened = open_images(
            recipe,
            plan,
            backend,
            folder=options.data,
            dataset=options.dataset,
            cache=host_cache(options, backend),
        )
        with closing(opened) as pipeline:
            share_weights(model, backend, facts={"plan": asdict(plan), "index": pipeline.splits})
            with closing(build_state(portable, plan, model, backend)) as state:
                session = build_session(portable, pipeline, backend, state, folder=options.out)
                try:
                    with accelerator.memory_errors():
                        yield session
                except torch.OutOfMemoryError:
                    raise DeviceMemoryError(
                        f"execution.device_batch: {plan.device_batch:,} images do not fit the "
                        f"memory of {backend.device}; give a smaller --device-batch"
                    ) from None


def _init_from_images(model: nn.Module, pipeline: Pipeline) -> None:
    """Call the model's `init_from_images`, if any, with clean images in a random order."""
    init = getattr(model, "init_from_images", None)
    if init is None:
        return
    size = pipeline.plan.statistics_batch
    positions = range(pipeline.plan.train_samples)
    starts = range(0, len(positions), size)
    batches_of_samples = (
        pipeline.random_samples(positions[start : start + size]) for start in starts
    )
    # In float32, with decoders of its own: weights are computed from the images.
    exact = replace(pipeline, dtype=torch.float32, idle={})
    with closing(exact), closing(exact.clean("train", batches_of_samples)) as batches:
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
    done = session.state.progress.step
    end = min(until, session.plan.updates)
    if options.resume == "auto":  # the same command starts the run and every restart
        first = max(first, done + 1)
        if first > last:
            return session, nullcontext()
    if not done < first <= last <= end:
        raise PlanError(f"--profile {first}:{last}: expected updates from {done + 1} to {end}")
    if session.backend.rank:
        return session, nullcontext()

    def action(calls: int) -> ProfilerAction:
        update = done + 1 + calls  # the profiler counts from its start, users from the run's
        if update == last:
            return ProfilerAction.RECORD_AND_SAVE
        return ProfilerAction.RECORD if first <= update < last else ProfilerAction.NONE

    def write(recorded: profile) -> None:
        recorded.export_chrome_trace(str(options.out / TRACE))
        session.step_log.resume_clock()  # writing took seconds that are no update's

    profiler = profile(schedule=action, on_trace_ready=write, acc_events=True)
    return replace(session, updates=partial(synchronous_updates, after=profiler.step)), profiler
