"""Rules for rates, warm-up, updates and decay by hand, modes of layers, and when all works."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from largebatch.audit.findings import Check, Findings
from largebatch.audit.ranks import Ranks
from largebatch.audit.rates import check_rates, require_base
from largebatch.audit.recording import ScheduleStep
from largebatch.audit.replicas import check_modes
from largebatch.distributed.serial import Serial
from largebatch.rules import Finding, Level

BATCHES, BATCH = 10, 256


def found(
    rates: list[float],
    *,
    kind: type[torch.optim.Optimizer] = torch.optim.SGD,
    group: dict[str, float] | None = None,
    batch: int = BATCH,
    skipped: int = 0,
    steps: Sequence[ScheduleStep] = (),
    **words: object,
) -> dict[str, Finding]:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    settings = {"params": model.parameters(), "lr": rates[0], **(group or {})}
    subject = mock.Mock(
        inner=model,
        optimizer=kind([settings]),  # type: ignore[call-arg]
        loader=range(BATCHES),
        **{"base": None, "rate": None, "epochs": None, **words},
    )
    updates: Any = [
        mock.Mock(rate=rate, micros=1, samples=batch, attempt=skipped + number)
        for number, rate in enumerate(rates)
    ]
    findings = check_rates(subject, updates, Ranks(Serial(torch.device("cpu"))), steps)
    return {it.check: it for it in findings}


@pytest.mark.parametrize(
    ("peak", "level"),
    [
        pytest.param(0.1, "note", id="not scaled"),
        pytest.param(0.4, "fine", id="square root"),
        pytest.param(1.6, "fine", id="linear"),
        pytest.param(3.2, "note", id="twice the linear rule"),
    ],
)
def test_a_rate_between_the_two_rules_is_fine(peak: float, level: str) -> None:
    finding = found([peak], base=(16, 0.1))["rate for the batch"]
    assert finding.level == level
    assert finding.figure == pytest.approx(peak / 1.6)
    assert "linear rule gives 1.6, the square root 0.4" in finding.text


@pytest.mark.parametrize(
    ("group", "peak"),
    [
        pytest.param({"initial_lr": 1.6}, 1.6, id="a warm-up"),
        pytest.param({"initial_lr": 0.1, "max_lr": 3.2}, 3.2, id="one cycle"),
    ],
)
def test_the_peak_of_a_scheduler_of_torch_counts_in_its_warm_up(
    group: dict[str, float], peak: float
) -> None:
    finding = found([0.01, 0.02], group=group, base=(16, 0.1))["rate for the batch"]
    assert finding.figure == pytest.approx(peak / 1.6)


def test_a_rising_rate_without_a_schedule_has_no_known_peak() -> None:
    rising = found([0.01, 0.02], base=(16, 0.1))["rate for the batch"]
    assert rising.level == "unknown"
    assert "give rate=" in rising.remedy
    assert found([1.6, 1.5], base=(16, 0.1))["rate for the batch"].figure == pytest.approx(1.0)


@pytest.mark.parametrize("base", [(0.1, 32), (0, 0.1), (32.5, 0.1), (32, 0.0)])
def test_a_base_that_is_no_batch_and_rate_is_refused(base: tuple[float, float]) -> None:
    require_base((32, 0.1))
    with pytest.raises(ValueError, match="base is"):
        require_base(base)


def test_the_peak_of_the_schedule_counts_in_warm_up() -> None:
    def rate(update: int) -> float:
        return 1.6 * min(1.0, (update + 1) / 50)

    result = found([rate(0), rate(1)], base=(16, 0.1), rate=rate, epochs=300)
    assert result["rate for the batch"].figure == pytest.approx(1.0)
    assert result["warm-up"].level == "fine"
    assert "after 49 updates (4.9 epochs)" in result["warm-up"].text
    assert result["updates"].level == "fine"
    assert result["updates"].figure == 3000


@pytest.mark.parametrize(
    ("rates", "skipped", "level", "figure"),
    [
        pytest.param([1, 2, 3], 0, "fine", None, id="as planned"),
        pytest.param([3, 4, 5], 2, "fine", None, id="it moves in skipped updates"),
        pytest.param([1, 2, 3], 2, "fine", None, id="it rests in skipped updates"),
        pytest.param([1, 4, 7], 0, "fault", 3.0, id="three steps an update"),
        pytest.param([5, 7, 9], 2, "fault", 2.0, id="two steps an update and in skipped ones"),
        pytest.param([2], 0, "fault", 2.0, id="one rate shows no speed"),
    ],
)
def test_a_schedule_that_moves_too_fast_is_counted(
    rates: list[float], skipped: int, level: str, figure: float | None
) -> None:
    finding = found(rates, skipped=skipped, rate=lambda update: update + 1.0)["warm-up"]
    assert (finding.level, finding.figure) == (level, figure)


def moves(length: int, times: int, *, is_placed: bool = False) -> list[ScheduleStep]:
    """Return calls of a scheduler in three updates, all of them between two forward passes."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, length)
    return [
        ScheduleStep(scheduler, update, update, is_placed=is_placed, is_of_accelerate=False)
        for update in (1, 2, 3)
        for _ in range(times)
    ]


@pytest.mark.parametrize(
    ("length", "times", "level"),
    [
        pytest.param(5 * BATCHES, 1, "fine", id="once an update"),
        pytest.param(5 * BATCHES, 2, "fault", id="twice, with a length in updates"),
        pytest.param(10 * BATCHES, 2, "fine", id="twice, with a length in these moves"),
        pytest.param(5, 1, "fault", id="a length in epochs"),
    ],
)
def test_moves_of_a_scheduler_are_compared_with_its_length(
    length: int, times: int, level: str
) -> None:
    finding = found([0.1] * 3, steps=moves(length, times), epochs=5)["warm-up"]
    assert finding.level == level


def test_a_scheduler_that_is_given_its_place_is_not_said_to_rest() -> None:
    placed = found([0.1] * 3, steps=moves(5, 1, is_placed=True))["warm-up"]
    assert (placed.level, placed.argument) == ("unknown", "")
    resting = found([0.1] * 3)["warm-up"]
    assert resting.argument.startswith("rate=")


def test_checks_without_their_argument_have_one_row_of_the_table() -> None:
    missing = [
        Finding(check=check, level="unknown", text="not examined", argument=argument)
        for check, argument in (("updates", "epochs= (a length)"), ("warm-up", "rate= (it)"))
    ]
    samples = Finding(check="samples", level="fine", text="all are read")
    table = Findings((samples, *missing)).table()
    first, *rows = table.splitlines()
    assert first.endswith("2 unknown, 1 fine")
    assert [row for row in rows if row.startswith("unknown")] == rows[:1]
    for part in ("updates", "warm-up", "epochs= (a length)", "rate= (it)"):
        assert part in " ".join(table.split())


def test_modes_are_compared_of_layers_that_depend_on_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Dropout(0), nn.BatchNorm1d(2))
    ranks = mock.Mock(size=2, gather=lambda own: [own, []])
    (finding,) = check_modes(model, {name for name, _ in model.named_modules()}, ranks)
    assert (finding.check, finding.level, finding.figure) == ("training mode", "fault", 2.0)
    assert check_modes(model, {"0", "2"}, ranks) == []


def findings(*pairs: tuple[Check, Level]) -> Findings:
    return Findings(tuple(Finding(check=check, level=level, text="") for check, level in pairs))


@pytest.mark.parametrize(
    ("pairs", "is_ok"),
    [
        pytest.param([("gradient scale", "fine"), ("samples", "note")], True, id="a note"),
        pytest.param([("gradient scale", "fine"), ("samples", "unknown")], True, id="not read"),
        pytest.param([("gradient scale", "fine"), ("samples", "fault")], False, id="a fault"),
        pytest.param([("gradient scale", "unknown")], False, id="the step raises"),
        pytest.param([("gradient direction", "unknown")], False, id="another loss"),
        pytest.param([("world size", "fine")], False, id="nothing compared"),
        pytest.param([], False, id="nothing"),
    ],
)
def test_findings_are_ok_if_gradients_were_compared_and_nothing_is_a_fault(
    pairs: list[tuple[Check, Level]], is_ok: bool
) -> None:
    assert findings(*pairs).ok is is_ok
