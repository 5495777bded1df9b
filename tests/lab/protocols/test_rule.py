"""What the arithmetic of the protocols gives, against the papers' own formulas and examples."""

import math

import pytest
from pydantic import TypeAdapter

from largebatch.lab.protocols.server import MiniBatches, Rule
from largebatch.recipe.protocols import Protocol

PROTOCOL: TypeAdapter[Protocol] = TypeAdapter(Protocol)


def rule(mini_batch: int = 4, **section: object) -> Rule:
    return Rule.of(PROTOCOL.validate_python(section), mini_batch=mini_batch)


@pytest.mark.parametrize(("n", "gradients"), [(1, 30), (2, 15), (7, 4), (15, 2), (16, 1), (30, 1)])
def test_an_update_of_n_softsync_takes_lambda_over_n_gradients_rounded_down(
    n: int, gradients: int
) -> None:
    found = rule(kind="softsync", learners=30, n=n, modulation="none")
    assert found == Rule(learners=30, gradients=gradients, waits=False)


def test_asynchronous_is_softsync_with_n_of_lambda() -> None:
    for modulation in ("none", "n", "staleness"):
        softsync = rule(kind="softsync", learners=30, n=30, modulation=modulation)
        assert rule(kind="asynchronous", learners=30, modulation=modulation) == softsync


def test_the_rate_is_divided_by_n_or_by_each_gradients_staleness() -> None:
    by_n = rule(kind="softsync", learners=30, n=15, modulation="n")
    assert (by_n.rate, by_n.factor(9)) == (1 / 15, 1)
    late = rule(kind="softsync", learners=30, n=15, modulation="staleness")
    assert late.rate == 1
    assert [late.factor(tau) for tau in (0, 1, 2, 30)] == [1, 1, 1 / 2, 1 / 30]


def test_hardsync_scales_the_rate_by_the_root_of_the_batch() -> None:
    """Rudra's example: 30 learners of 4 samples, at a rate found for 128."""
    found = rule(kind="hardsync", learners=30, modulation="sqrt", reference_batch=128)
    assert found.rate == pytest.approx(math.sqrt(120 / 128))
    assert (found.gradients, found.waits) == (30, True)


@pytest.mark.parametrize("learners", [1, 2, 5])
@pytest.mark.parametrize("gradients", [1, 2, 3])
def test_every_mini_batch_is_handed_out_once_however_unequal_the_learners_are(
    learners: int, gradients: int
) -> None:
    them = MiniBatches(Rule(learners=learners, gradients=gradients, waits=False), range(2, 5))
    handed = [them.next(turn * turn % learners) for turn in range(3 * gradients)]
    assert handed == list(range(2 * gradients, 5 * gradients))
    assert them.next(0) is None


def test_stopping_early_completes_the_updates_that_were_begun() -> None:
    them = MiniBatches(Rule(learners=4, gradients=3, waits=False), range(10))
    handed = [them.next(learner) for learner in range(4)]
    them.stop_early()
    handed += [them.next(0) for _ in range(3)]
    assert handed == [0, 1, 2, 3, 4, 5, None]
