"""How the time of a pass is measured."""

import torch

from largebatch.runs.passes import median_seconds


def test_works_are_timed_in_turn_and_the_first_round_does_not_count() -> None:
    now = 0.0
    made: list[str] = []
    taken = {"pass": iter([100.0, 3.0, 1.0, 2.0]), "update": iter([0.5, 7.0, 8.0, 9.0])}

    def work(name: str) -> None:
        nonlocal now
        made.append(name)
        now += next(taken[name])

    found = median_seconds(
        {"pass": lambda: work("pass"), "update": lambda: work("update")},
        torch.device("cpu"),
        rounds=3,
        clock=lambda: now,
    )
    assert found == {"pass": 2, "update": 8}
    assert made == ["pass", "update"] * 4
