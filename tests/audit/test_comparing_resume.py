"""A rest is compared with the whole: each cause is named once, and harmless differences are not.

The records are those of a simulated training, whose tensors have one number each. A fault is a
change of the state with which the rest begins, or of its loop; what follows from it is computed.
"""

import hashlib
import math
import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace

import pytest

from largebatch.audit.findings import Check
from largebatch.audit.resume.comparing import Resumption, compare
from largebatch.audit.resume.record import Batch, Run, Trace, Update, Worker

SAMPLES = 24
GLOBAL_BATCH = 8
UPDATES = SAMPLES // GLOBAL_BATCH
"""Updates of an epoch."""

WEIGHTS = ("conv.weight", "conv.bias", "head.weight", "head.bias")
GROUPS = (2, 2)
BUFFERS = ("norm.running_mean", "norm.running_var")
WARM_UP = 2


def digest(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def draw(*values: object) -> float:
    """Return a number from 0 to 1 that depends on these values alone."""
    return int(digest(values), 16) / 2**64


def trace(value: float) -> Trace:
    return Trace(digest=digest(value), norm=abs(value), sketch=(value, *[0.0] * 15))


def traces(values: dict[str, float]) -> dict[str, Trace]:
    return {name: trace(value) for name, value in values.items()}


@dataclass
class Process:
    """State of a worker's process, and how its loop works."""

    rank: int = 0
    size: int = 1
    updates: int = 0
    epoch: int = 0
    batch: int = 0
    weights: dict[str, float] = field(default_factory=dict)
    momentum: dict[str, float] = field(default_factory=dict)
    buffers: dict[str, float] = field(default_factory=dict)
    average: dict[str, float] = field(default_factory=dict)
    averaged: int = 0
    schedule: int = 0
    scale: float = 65536.0
    growth: int = 0
    generator: int = 0
    best: float = -1.0
    epochs_before: int = 0
    """Epochs before this process began."""

    accumulation: int = 1
    offset: int = 0
    """Batches by which the loop is ahead."""

    counter_offset: int = 0
    """Moves of the scheduler that its rate does not depend on."""

    order: Callable[["Process"], object] = lambda it: it.epoch
    """What the order of an epoch is drawn from, when it begins."""

    order_seed: object = 0
    sets_epoch: bool = True
    epoch_set: int | None = None
    augments: bool = True
    loader_seed: object = None
    drops: bool = True
    steps_are_tensors: bool = True
    rate_factor: Callable[[int], float] = lambda _: 1.0
    """Factor of the learning rate, by the number of all updates."""

    missing_keys: tuple[str, ...] = ()
    unused_keys: tuple[str, ...] = ()
    other_gradient: bool = False

    def begin_epoch(self) -> None:
        if self.sets_epoch:
            self.epoch_set = self.epoch
        self.order_seed = self.order(self)
        self.loader_seed = self.generator
        self.generator += 1

    def rate(self) -> float:
        count = self.schedule
        return 0.1 * min(1.0, (count + 1) / WARM_UP) * 0.9**count


def new_processes(workers: int = 1, **options: object) -> list[Process]:
    processes = []
    for rank in range(workers):
        process = Process(rank=rank, size=workers, generator=1000 * rank, **options)  # type: ignore[arg-type]
        process.weights = {name: draw("weight", name) for name in WEIGHTS}
        process.average = dict(process.weights)
        process.buffers = dict.fromkeys(BUFFERS, 1.0)
        process.begin_epoch()
        processes.append(process)
    return processes


def batches_of(process: Process) -> tuple[Batch, ...]:
    order = list(range(SAMPLES))
    random.Random(digest(process.order_seed)).shuffle(order)
    device_batch = GLOBAL_BATCH // process.size // process.accumulation
    batches = []
    for micro in range(process.accumulation):
        position = process.batch * process.accumulation + micro + process.offset
        begin = (position * process.size + process.rank) * device_batch
        indices = tuple(order[(begin + place) % SAMPLES] for place in range(device_batch))
        seed = process.loader_seed if process.augments else None
        samples = tuple(
            digest((index, seed, position * process.augments, place))
            if process.augments
            else digest(index)
            for place, index in enumerate(indices)
        )
        labels = tuple(digest(("label", index % 3)) for index in indices)
        batches.append(
            Batch(
                loader=0,
                epoch=process.epoch - process.epochs_before,
                position=position,
                indices=indices,
                samples=samples,
                labels=labels,
            )
        )
    return tuple(batches)


def state_of(process: Process, files: Sequence[str]) -> Update:
    rate = process.rate() * process.rate_factor(process.updates)
    steps: dict[str, Trace | float] = {}
    for name in process.momentum:
        count = float(process.updates)
        steps[f"{name}:step"] = trace(count) if process.steps_are_tensors else count
    momentum = {f"{name}:momentum_buffer": it for name, it in process.momentum.items()}
    return Update(
        number=process.updates,
        epoch=process.epoch_set,
        rates=(rate, rate),
        settings=({"momentum": 0.9}, {"momentum": 0.9}),
        sizes=GROUPS,
        schedules=(process.schedule + process.counter_offset,),
        schedule_moves=1,
        scale=process.scale,
        scale_growth=process.growth,
        weights=traces(process.weights),
        buffers=traces(process.buffers),
        state=traces(momentum) | steps,
        averages=traces({f"0:{name}": value for name, value in process.average.items()}),
        averaged_updates=process.averaged,
        generators={"torch": digest(process.generator), "numpy": digest("unused")},
        saved=tuple(files),
    )


def train(processes: list[Process], updates: int) -> Run:
    """Make updates, and return the records of all workers."""
    records: list[list[Update]] = [[] for _ in processes]
    files: list[list[str]] = [[] for _ in processes]
    for number in range(updates):
        gradients = dict.fromkeys(WEIGHTS, 0.0)
        pending = []
        for process in processes:
            state = state_of(process, files[process.rank])
            files[process.rank] = []
            batches = batches_of(process)
            masks = (digest(("mask", process.generator)),) if process.drops else ()
            process.generator += 1
            inputs = [it for batch in batches for it in batch.samples]
            for name in WEIGHTS:
                part = sum(draw(name, it) - 0.5 for it in inputs) / GLOBAL_BATCH
                part += draw(name, *masks) / 10 if masks else 0.0
                part += 0.01 if process.other_gradient else 0.0
                gradients[name] += part + 0.1 * process.weights[name] / len(processes)
            loss = sum(process.weights.values()) + sum(draw(it) for it in inputs)
            pending.append((process, replace(state, batches=batches, masks=masks, loss=loss)))
        for process, update in pending:
            record = replace(update, number=number, gradients=traces(gradients))
            records[process.rank].append(record)
            advance(process, gradients, update.rates[0], files[process.rank])
    return tuple(
        Worker(
            rank=process.rank,
            size=process.size,
            workers_of_loader=0,
            resumed_from=("last.pth",) if process.epochs_before else (),
            missing_keys=process.missing_keys,
            unexpected_keys=process.unused_keys,
            updates=tuple(of_worker),
            end=state_of(process, files[process.rank]),
        )
        for process, of_worker in zip(processes, records, strict=True)
    )


def advance(process: Process, gradients: dict[str, float], rate: float, files: list[str]) -> None:
    for name, gradient in gradients.items():
        process.momentum[name] = 0.9 * process.momentum.get(name, 0.0) + gradient
        process.weights[name] -= rate * process.momentum[name]
        process.average[name] = 0.9 * process.average[name] + 0.1 * process.weights[name]
    for name in process.buffers:
        process.buffers[name] = 0.9 * process.buffers[name] + 0.1 * process.weights["conv.weight"]
    process.updates += 1
    process.averaged += 1
    process.schedule += 1
    process.growth += 1
    if process.growth == 4:
        process.scale *= 2
        process.growth = 0
    process.batch += 1
    if process.batch == UPDATES:
        # The first epoch has the best metric.
        metric = 1.0 - process.epoch / 10
        if metric > process.best:
            process.best = metric
            files.append("best.pth")
        files.append("last.pth")
        process.batch = 0
        process.epoch += 1
        process.begin_epoch()


Fault = Callable[[Process, Process], object]
"""Changes the process of a rest; the second one is a new process of the same rank."""


def resumed(processes: list[Process], fault: Fault | None = None) -> list[Process]:
    """Return the processes that continue, each with an epoch's own count."""
    new = new_processes(len(processes))
    results = []
    for process, of_rank in zip(processes, new, strict=True):
        result = deepcopy(process)
        result.epochs_before = process.epoch
        if fault is not None:
            fault(result, of_rank)
        results.append(result)
    return results


def audit(
    fault: Fault | None = None,
    *,
    stop: int = UPDATES,
    workers: int = 1,
    loop: dict[str, object] | None = None,
) -> Resumption:
    """Stop a training of two epochs, resume it with a fault, and compare."""
    whole = train(new_processes(workers, **loop or {}), 2 * UPDATES)
    processes = new_processes(workers, **loop or {})
    first = train(processes, stop)
    rest = train(resumed(processes, fault), 2 * UPDATES - stop)
    return compare(whole, whole, first, rest)


def faults(findings: Resumption) -> list[str]:
    return [finding.check for finding in findings.faults]


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_rest_that_continues_is_the_same_training(stop: int, workers: int) -> None:
    findings = audit(stop=stop, workers=workers)
    assert findings.ok
    assert {finding.level for finding in findings} == {"fine"}
    assert findings.difference == 0


@pytest.mark.parametrize(
    ("fault", "named"),
    [
        pytest.param(None, [], id="right"),
        pytest.param(lambda rest, _: rest.momentum.clear(), ["optimizer state"], id="wrong"),
    ],
)
def test_a_first_part_may_stop_after_its_checkpoint(fault: Fault | None, named: list[str]) -> None:
    whole = train(new_processes(), 2 * UPDATES)
    processes = new_processes()
    train(processes, 2)
    rest = train(resumed(processes, fault), 2 * UPDATES - 2)
    findings = compare(whole, whole, train(new_processes(), 4), rest)
    assert faults(findings) == named
    assert [it.figure for it in findings if it.level == "note"] == [2.0]
    assert findings.updates == 2 * UPDATES - 2


def test_equal_losses_of_nan_do_not_show_a_lost_generator() -> None:
    def without_number(run: Run) -> Run:
        return tuple(
            replace(worker, updates=tuple(replace(it, loss=math.nan) for it in worker.updates))
            for worker in run
        )

    def lose_generator(rest: Process, _: Process) -> None:
        rest.generator += 100

    loop: dict[str, object] = {"drops": False, "augments": False}
    whole = without_number(train(new_processes(**loop), 2 * UPDATES))  # type: ignore[arg-type]
    processes = new_processes(**loop)  # type: ignore[arg-type]
    first = without_number(train(processes, 2))
    rest = without_number(train(resumed(processes, lose_generator), 2 * UPDATES - 2))
    findings = compare(whole, whole, first, rest)
    assert findings.ok
    assert [it.check for it in findings if it.level == "note"] == ["random numbers"]


def momentum_of_new_groups(rest: Process, _: Process) -> None:
    for name in WEIGHTS[2:]:
        del rest.momentum[name]


def momentum_of_other_parameters(rest: Process, _: Process) -> None:
    values = [*rest.momentum.values()]
    rest.momentum = dict(zip(WEIGHTS, [*values[1:], values[0]], strict=True))


def momentum_of_zero(rest: Process, _: Process) -> None:
    rest.momentum = dict.fromkeys(WEIGHTS, 0.0)


def new_weights_by_a_prefix(rest: Process, new: Process) -> None:
    rest.weights = new.weights
    rest.buffers = new.buffers
    rest.unused_keys = tuple(f"_orig_mod.{name}" for name in WEIGHTS)
    rest.missing_keys = WEIGHTS


def rounded_weights(rest: Process, _: Process) -> None:
    rest.weights = {name: value * 1.001 for name, value in rest.weights.items()}


def new_buffers_by_a_prefix(rest: Process, new: Process) -> None:
    rest.buffers = new.buffers
    rest.unused_keys = tuple(f"module.{name}" for name in BUFFERS)


def no_set_epoch(rest: Process, new: Process) -> None:
    rest.order_seed = new.order_seed
    rest.epoch_set = None
    rest.sets_epoch = False


def set_epoch_from_zero(rest: Process, new: Process) -> None:
    rest.order_seed = new.order_seed
    rest.epoch_set = 0


def new_generator(rest: Process, new: Process) -> None:
    rest.generator = new.generator


def new_generator_and_loader(rest: Process, new: Process) -> None:
    rest.generator = new.generator
    rest.loader_seed = new.loader_seed


def new_generator_and_order(rest: Process, new: Process) -> None:
    new_generator_and_loader(rest, new)
    rest.order_seed = new.order_seed


def generator_of_worker_0(rest: Process, _: Process) -> None:
    rest.generator -= 1000 * rest.rank
    rest.loader_seed = rest.generator - 1


def warm_up_again(rest: Process, _: Process) -> None:
    begin = rest.updates
    rest.rate_factor = lambda updates: min(1.0, (updates - begin + 1) / 3)


def rate_of_a_new_optimizer(rest: Process, _: Process) -> None:
    """The scheduler, which is restored, sets the rate only after the first update."""
    begin = rest.updates
    rest.rate_factor = lambda updates: 0.1 if updates == begin else 1.0


def new_optimizer(rest: Process, new: Process) -> None:
    rest.momentum.clear()
    rate_of_a_new_optimizer(rest, new)


def new_scale(rest: Process, new: Process) -> None:
    rest.scale = new.scale
    rest.growth = new.growth


def epoch_again(rest: Process, _: Process) -> None:
    rest.batch = 0


def updates_for_batches(rest: Process, _: Process) -> None:
    rest.offset = rest.batch - rest.batch * rest.accumulation


def everything_new(rest: Process, new: Process) -> None:
    vars(rest).update(vars(new))


def setting(**values: object) -> Fault:
    def change(rest: Process, _: Process) -> None:
        for name, value in values.items():
            setattr(rest, name, value)

    return change


def of_new(name: str) -> Fault:
    return lambda rest, new: setattr(rest, name, getattr(new, name))


@dataclass(frozen=True)
class Case:
    """A fault, the check that names it, and words of the finding that no other cause has."""

    check: Check
    words: str
    fault: Fault
    figure: float | None = None
    stop: int = UPDATES
    workers: int = 1
    loop: dict[str, object] = field(default_factory=dict)


BY_GENERATOR: dict[str, object] = {"order": lambda it: it.generator, "sets_epoch": False}

CASES = {
    "optimizer_not_saved": Case(
        "optimizer state", "none before", lambda rest, _: rest.momentum.clear(), 1.0
    ),
    "optimizer_with_its_rate_not_saved": Case("optimizer state", "none before", new_optimizer, 1.0),
    "scheduler_made_after_the_load": Case(
        "learning rates", "no later one", rate_of_a_new_optimizer, 0.9
    ),
    "momentum_of_new_groups": Case("optimizer state", "2 of 4", momentum_of_new_groups, 0.5),
    "momentum_of_others": Case("optimizer state", "other param", momentum_of_other_parameters, 0.5),
    "momentum_of_zero": Case("optimizer state", "are zero", momentum_of_zero, 0.5),
    "schedule_once_too_often": Case(
        "learning rates", "last_epoch is 4, not 3", setting(schedule=UPDATES + 1), stop=UPDATES
    ),
    "schedule_from_0": Case("learning rates", "with its warm-up", of_new("schedule")),
    "warm_up_again": Case("learning rates", ": warm-up again", warm_up_again, 2 / 3),
    "scale_lost": Case("loss scale", "as at the start", new_scale, 0.5, stop=4),
    "growth_lost": Case("loss scale", "counts 0", setting(growth=0), -3.0),
    "average_not_saved": Case("averaged weights", "of a new model", of_new("average"), 1.0),
    "average_of_the_weights": Case(
        "averaged weights",
        "from the resumed weights",
        lambda rest, _: setattr(rest, "average", dict(rest.weights)),
        1.0,
    ),
    "average_counts_from_0": Case("averaged weights", "counts 0", setting(averaged=0), -3.0),
    "buffers_dropped": Case("buffers", "module.norm", new_buffers_by_a_prefix, 1.0),
    "buffers_new": Case("buffers", "of a new model", of_new("buffers"), 1.0),
    "weights_by_a_prefix": Case("weights", "_orig_mod.conv", new_weights_by_a_prefix, 1.0),
    "weights_of_the_average": Case(
        "weights",
        "averaged copy",
        lambda rest, _: setattr(rest, "weights", dict(rest.average)),
        1.0,
    ),
    "weights_rounded": Case("weights", "rounded", rounded_weights, 0.001),
    "nothing_loaded": Case("weights", "as a new run", everything_new),
    "set_epoch_missing": Case("epoch order", "not call set_epoch", no_set_epoch, 24.0),
    "set_epoch_from_0": Case("epoch order", "set_epoch(0)", set_epoch_from_zero, 24.0),
    "generator_of_the_order": Case(
        "epoch order", "torch's generator", new_generator_and_order, 24.0, loop=BY_GENERATOR
    ),
    "own_generator_of_the_order": Case(
        "epoch order", "batch 1 of epoch 1", of_new("order_seed"), 24.0, loop=BY_GENERATOR
    ),
    "epoch_again": Case("samples", "begins the epoch again", epoch_again, 8.0, stop=4),
    "epoch_again_on_two": Case(
        "samples", "begins the epoch again", epoch_again, 8.0, stop=4, workers=2
    ),
    "batches_skipped": Case("samples", "batch 3 of", setting(offset=1), 8.0, stop=4),
    "offset_by_accumulation": Case(
        "samples", "batch 3 of", updates_for_batches, 8.0, stop=5, loop={"accumulation": 2}
    ),
    "loader_seeded_alike": Case("augmentation", "24 of 24", of_new("loader_seed"), 1.0),
    "generator_of_augmentation": Case(
        "augmentation", "dropout masks are drawn too", new_generator_and_loader, 1.0
    ),
    "generator_of_dropout": Case("dropout", "beginning of the run", new_generator, 1.0),
    "worker_0_for_all": Case(
        "random numbers", "1 of 2 workers", generator_of_worker_0, 1.0, workers=2
    ),
    "best_lost": Case("best checkpoint", "keeps that of update 3", setting(best=-1.0), 6.0),
    "another_loss": Case("weights", "gradients", setting(other_gradient=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fault_is_named_once_with_its_figure(name: str) -> None:
    case = CASES[name]
    findings = audit(case.fault, stop=case.stop, workers=case.workers, loop=case.loop)
    assert faults(findings) == [case.check], findings.table()
    (finding,) = findings.faults
    assert case.words in finding.text, finding.text
    assert finding.remedy
    if case.figure is not None:
        assert finding.figure == pytest.approx(case.figure, rel=1e-3)
    assert not findings.ok


SILENT: dict[str, object] = {"augments": False, "drops": False}

HARMLESS = {
    "steps_as_numbers": (setting(steps_are_tensors=False), {}),
    "counter_of_the_scheduler": (setting(counter_offset=1), {}),
    "passes_of_half_the_size": (setting(accumulation=2), SILENT),
    "unused_generator": (new_generator, SILENT),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_changes_no_weight_is_no_fault(name: str) -> None:
    fault, loop = HARMLESS[name]
    findings = audit(fault, loop=loop)
    assert not findings.faults
    assert findings.ok
    assert findings.difference == 0


def on_other_workers(workers: int, rest_workers: int, **options: object) -> Resumption:
    """Resume on other workers a training that was stopped within its second epoch."""
    stop = 4
    offset = options.pop("offset", 0)
    whole = train(new_processes(workers, **options), 2 * UPDATES)
    processes = new_processes(workers, **options)
    first = train(processes, stop)
    rest = [deepcopy(processes[rank % workers]) for rank in range(rest_workers)]
    for rank, process in enumerate(rest):
        vars(process).update(rank=rank, size=rest_workers, epochs_before=1, offset=offset)
        process.generator += 5000 * rank
        process.loader_seed = process.generator
    return compare(whole, whole, first, train(rest, 2 * UPDATES - stop))


@pytest.mark.parametrize(("workers", "rest_workers"), [(1, 2), (2, 1), (4, 2)])
def test_other_workers_may_read_the_same_samples(workers: int, rest_workers: int) -> None:
    findings = on_other_workers(workers, rest_workers, **SILENT)
    assert findings.ok
    assert findings.difference < 1e-12
    # Augmentation and dropout are drawn for each worker: weights differ, and that is no fault.
    drawn = on_other_workers(workers, rest_workers)
    assert drawn.ok
    assert drawn.difference > 0.001
    assert not drawn.named("dropout")
    assert not drawn.named("random numbers")


@pytest.mark.parametrize(("workers", "rest_workers"), [(1, 2), (2, 1)])
def test_samples_that_other_workers_lose_are_counted(workers: int, rest_workers: int) -> None:
    findings = on_other_workers(workers, rest_workers, offset=1)
    assert faults(findings) == ["samples"]
    assert findings.faults[0].figure == GLOBAL_BATCH


def compare_repeats(change: Fault) -> Resumption:
    whole = train(new_processes(), 2 * UPDATES)
    again = new_processes()
    change(again[0], new_processes()[0])
    repeat = train(again, 2 * UPDATES)
    first = train(processes := new_processes(), UPDATES)
    return compare(whole, repeat, first, train(resumed(processes), UPDATES))


def test_runs_that_differ_from_themselves_are_not_compared() -> None:
    changes = {
        "seed": new_seed,
        "order": setting(order_seed="another"),
        "augmentation": setting(loader_seed="another"),
        "weights": lambda rest, _: rest.weights.update({"conv.bias": 0.5}),
        "operation": setting(other_gradient=True),
    }
    remedies = set()
    for change in changes.values():
        findings = compare_repeats(change)
        (finding,) = findings
        assert (finding.check, finding.level) == ("repeated run", "unknown")
        assert not findings.ok
        remedies.add(finding.remedy)
    assert len(remedies) == len(changes)


def new_seed(rest: Process, _: Process) -> None:
    rest.generator = 17
    rest.begin_epoch()


def test_of_a_first_part_with_a_schedule_of_its_own_only_other_causes_are_named() -> None:
    whole = train(new_processes(), 2 * UPDATES)
    shorter = new_processes(rate_factor=lambda updates: 0.5**updates)
    first = train(shorter, UPDATES)
    rest = resumed(shorter, lambda rest, _: rest.momentum.clear())
    findings = compare(whole, whole, first, train(rest, UPDATES))
    assert [it.check for it in findings if it.level == "unknown"] == ["first part"]
    assert faults(findings) == ["optimizer state"]
    right = compare(whole, whole, first, train(resumed(shorter), UPDATES))
    assert not right.faults
    assert not right.ok


@pytest.mark.parametrize("extra", [-1, 3])
def test_other_numbers_of_updates_are_a_fault_of_their_own(extra: int) -> None:
    whole = train(new_processes(), 2 * UPDATES)
    first = train(processes := new_processes(), UPDATES)
    rest = train(resumed(processes), UPDATES + extra)
    (finding,) = compare(whole, whole, first, rest)
    assert (finding.check, finding.level, finding.figure) == ("updates", "fault", extra)


def test_without_an_update_nothing_is_compared() -> None:
    whole = train(new_processes(), 2 * UPDATES)
    first = train(processes := new_processes(), UPDATES)
    rest = train(resumed(processes), 0)
    (finding,) = (findings := compare(whole, whole, first, rest))
    assert finding.level == "unknown"
    assert not findings.ok


def test_an_epoch_that_repeats_its_order_is_a_fault_of_the_whole_too() -> None:
    loop: dict[str, object] = {"order": lambda _: 0, "sets_epoch": False}
    findings = audit(loop=loop)
    assert faults(findings) == ["epoch order"]
    assert findings.difference == 0


def test_samples_without_numbers_are_compared_by_label_and_content() -> None:
    def unnumbered(run: Run) -> Run:
        return tuple(
            replace(worker, updates=tuple(map(without_numbers, worker.updates))) for worker in run
        )

    def compared(fault: Fault | None) -> Resumption:
        whole = unnumbered(train(new_processes(), 2 * UPDATES))
        first = unnumbered(train(processes := new_processes(), UPDATES))
        rest = unnumbered(train(resumed(processes, fault), UPDATES))
        return compare(whole, whole, first, rest)

    assert compared(None).ok
    assert faults(compared(no_set_epoch)) == ["epoch order"]
    assert faults(compared(of_new("loader_seed"))) == ["augmentation"]


def without_numbers(update: Update) -> Update:
    batches = tuple(replace(batch, indices=None) for batch in update.batches)
    return replace(update, batches=batches)


def test_what_was_not_seen_is_unknown() -> None:
    def blind(run: Run) -> Run:
        return tuple(
            replace(
                worker,
                updates=tuple(replace(it, batches=(), weights={}) for it in worker.updates),
                end=None,
            )
            for worker in run
        )

    whole = blind(train(new_processes(), 2 * UPDATES))
    first = blind(train(processes := new_processes(), UPDATES))
    findings = compare(whole, whole, first, blind(train(resumed(processes), UPDATES)))
    assert {it.check for it in findings if it.level == "unknown"} == {"samples", "weights"}
    assert not findings.ok
