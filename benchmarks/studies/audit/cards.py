"""Measure how soon replays find a device that computes wrong numbers, and what they cost.

    PYTHONPATH=tests/support python -m benchmarks.studies.audit.cards

Workers are threads that train a small network (tests/support/faulty_cards.py), one of them with a
fault: in a weight, an activation, a gradient, an input or BatchNorm's statistics; always, or once
in 50 passes; with a replay in every update. A thousand workers have no network: passes are drawn,
and judged as those of a run. Costs are counted in passes, and in processor time of one worker.
"""

import math
import time
from collections.abc import Callable
from random import Random
from statistics import mean, median
from typing import Any

import torch
from faulty_cards import FaultyCard, Worker, flip, trained
from torch import nn

from benchmarks.speed.measuring import write
from largebatch.data.types import Batch
from largebatch.distributed.reducer import Reducer
from largebatch.distributed.serial import Serial
from largebatch.models import build
from largebatch.models.batchnorm import Spans, with_span
from largebatch.training.loop import EagerStep
from largebatch.training.pass_record import record_pass
from largebatch.training.replay import offsets
from largebatch.training.verdict import Pass, verdict

NAME = "cards"
RARE = 1 / 50
"""Probability that a pass of the faulty worker is wrong, if not all are."""

FLEET = 1000
LAYER = 3
UPDATES = 120
WRONG = 1
"""Rank of the faulty worker."""

Occurs = Callable[[int], bool]


def add_weight_fault(worker: Worker, occurs: Occurs) -> None:
    """Break a weight, which stays wrong."""
    del occurs
    flip(_weight(worker, LAYER))


def add_activation_fault(worker: Worker, occurs: Occurs) -> None:
    """Break one forward kernel of one layer."""
    worker.cards.append(FaultyCard("convolution", _weight(worker, LAYER), is_wrong=occurs))


def add_gradient_fault(worker: Worker, occurs: Occurs) -> None:
    """Break one backward kernel of one layer."""
    weight = _weight(worker, LAYER)
    card = FaultyCard("convolution_backward", weight, result=1, is_wrong=occurs)
    worker.cards.append(card)


def add_input_fault(worker: Worker, occurs: Occurs) -> None:
    """Break what the worker reads."""

    def damage(batch: Batch) -> None:
        if occurs(0):
            flip(batch.images)

    worker.pipeline.damage = damage


def add_statistics_fault(worker: Worker, occurs: Occurs) -> None:
    """Break the mean that BatchNorm keeps for its backward pass."""
    scale = _weight(worker, LAYER + 1)
    worker.cards.append(FaultyCard("native_batch_norm", scale, result=1, is_wrong=occurs))


def _weight(worker: Worker, layer: int) -> torch.Tensor:
    weight = worker.model[layer].weight
    assert isinstance(weight, torch.Tensor)
    return weight


FAULTS = {
    "weight": add_weight_fault,
    "activation": add_activation_fault,
    "gradient": add_gradient_fault,
    "input": add_input_fault,
    "statistics": add_statistics_fault,
}


def found(fault: str, *, workers: int, rare: bool, seed: int) -> dict[str, Any]:
    """Return what the replays of a training with this fault have found."""
    draws = Random(seed)

    def occurs(_: int) -> bool:
        return not rare or draws.random() < RARE

    def damage(rank: int, worker: Worker) -> None:
        if rank == WRONG:
            FAULTS[fault](worker, occurs)

    results = trained(workers=workers, updates=UPDATES if rare else 1, damage=damage)
    events = results[0].log.events
    return {
        "replays": events[0].step + 1 if events else None,
        "place": events[0].place if events else None,
        "events": len(events),
        "certain": sum(it.is_certain for it in events),
        "others_accused": sum(
            it.is_certain and tuple(s.worker for s in it.suspects) != (WRONG,) for it in events
        ),
    }


def fleet(*, rare: bool, wrong: int, seed: int) -> tuple[int, bool]:
    """Return the replays until a verdict among FLEET workers, and whether it is right."""
    draws = Random(seed)
    faulty = set(draws.sample(range(FLEET), wrong))
    number = -1
    while True:
        number += 1
        first, second = offsets(number, FLEET)

        def record(worker: int) -> float:
            is_wrong = worker in faulty and (not rare or draws.random() < RARE)
            return draws.random() if is_wrong else 0.0

        passes: dict[int, list[Pass[float]]] = {}
        for worker in range(FLEET):
            for owner in (worker, (worker + first) % FLEET):
                passes.setdefault(owner, []).append(Pass(worker, record(worker)))
        if all(a.record == b.record for a, b in passes.values()):
            continue
        for worker in range(FLEET):
            for owner in ((worker + second) % FLEET, worker):
                passes[owner].append(Pass(worker, record(worker)))
        for of_owner in passes.values():
            of_owner.sort(key=lambda it: it.worker)
        result = verdict(passes, lambda a, b: None if a == b else 0, workers=FLEET)
        right = result is not None and result.is_certain and set(result.workers) <= faulty
        return number + 1, right


def processor_seconds(name: str, *, size: int, side: int) -> dict[str, float]:
    """Return the processor time of a pass with a record, as a multiple of one without."""
    backend = Serial(torch.device("cpu"))
    model = with_span(build(name, num_classes=10), size)
    reducer = Reducer(model.named_parameters(), backend)
    step = EagerStep(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        nn.CrossEntropyLoss(reduction="sum"),
        reducer,
        Spans(model, backend),
        global_batch=size,
    )
    batch = Batch(torch.randn(size, 3, side, side), torch.arange(size) % 10)

    def seconds(work: Callable[[], object]) -> float:
        begin = time.process_time()
        work()
        return time.process_time() - begin

    plain = plain_pass(step, batch)
    plain()
    ratios = []
    for _ in range(5):
        restore = step.spans.save()
        without = seconds(plain)
        with_ = seconds(lambda: record_pass(step, batch))
        restore()
        ratios.append(with_ / without)
    return {"n": len(ratios), "median": median(ratios), "least": min(ratios), "most": max(ratios)}


def plain_pass(step: EagerStep, batch: Batch) -> Callable[[], None]:
    """Return a call of the first pass of an update."""
    return lambda: step.forward_backward(batch, first=True, last=False)


def main() -> None:
    """Measure everything, and write it to results/."""
    table: list[dict[str, Any]] = []
    for fault in FAULTS:
        for workers in (2, 3, 4, 8):
            row = {"fault": fault, "workers": workers, "rare": False}
            table.append(row | found(fault, workers=workers, rare=False, seed=0))
            print(table[-1], flush=True)
    for fault in ("activation", "gradient"):
        for workers in (2, 4):
            row = {"fault": fault, "workers": workers, "rare": True}
            table.append(row | found(fault, workers=workers, rare=True, seed=1))
            print(table[-1], flush=True)
    fleets = {}
    for wrong in (1, 2, 3):
        for rare in (False, True):
            runs = [fleet(rare=rare, wrong=wrong, seed=seed) for seed in range(20 if rare else 5)]
            key = f"{wrong} wrong, {'once in 50 passes' if rare else 'always'}"
            fleets[key] = {
                "n": len(runs),
                "replays_mean": mean(replays for replays, _ in runs),
                "replays_most": max(replays for replays, _ in runs),
                "right": sum(right for _, right in runs),
            }
            print(key, fleets[key], flush=True)
    # A worker makes two passes in a replay: its own first one, and that of another worker.
    expected = 1 / (1 - math.pow(1 - RARE, 2))
    passes = {}
    for accumulation in (1, 4):
        for every in (5, 10):
            without, with_ = (
                trained(workers=3, updates=20, accumulation=accumulation, every=it)[0].passes
                for it in (None, every)
            )
            passes[f"every {every}, accumulation {accumulation}"] = (with_ - without) / without
    print(passes, flush=True)
    cost = {
        f"{name}, {size} x {side}": processor_seconds(name, size=size, side=side)
        for name, size, side in (("resnet18", 8, 96), ("resnet18", 32, 96))
    }
    print(cost, flush=True)
    write(
        NAME,
        {
            "faults": table,
            "fleet": {"workers": FLEET, "expected_replays_of_one_rare": expected, **fleets},
            "more_passes": passes,
            "record_over_plain_pass": cost,
        },
    )


if __name__ == "__main__":
    main()
