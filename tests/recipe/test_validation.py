"""Conflicts between the sections of a recipe."""

import pytest
from short_runs import DIGITS

from largebatch.errors import RecipeError
from largebatch.recipe.loading import load_recipe


def test_all_conflicts_of_a_recipe_are_reported_together() -> None:
    changes = [
        *("data.source=synthetic", "execution.cache=memory", "reduction.dtype=fp16"),
        *("optimizer={kind: lamb}", "monitor=[trust_ratios]", "loss.label_smoothing=0.95"),
    ]
    with pytest.raises(RecipeError) as caught:
        load_recipe(DIGITS, changes)
    head, *problems = str(caught.value).splitlines()
    assert head.endswith(": 4 problems")
    starts = ["execution.cache: memory", "reduction.dtype: fp16", "monitor: trust_ratios", "loss."]
    assert [
        problem.strip().startswith(start) for problem, start in zip(problems, starts, strict=True)
    ]


@pytest.mark.parametrize(
    ("changes", "conflict"),
    [
        (["data.held_out={samples: 2000}"], "data.held_out.samples (2000) must be fewer than"),
        (
            ["polish.keep=better", "polish.held_out=2000"],
            "polish.held_out (2000) must be fewer than data.train_samples (1437)",
        ),
    ],
)
def test_a_cause_is_reported_without_its_consequences(changes: list[str], conflict: str) -> None:
    """Numbers of samples that are too large make others too large as well."""
    with pytest.raises(RecipeError) as caught:
        load_recipe(DIGITS, changes)
    assert ": 1 problem\n" in str(caught.value)
    assert conflict in str(caught.value)


def test_a_change_of_the_machine_is_validated_like_a_recipe() -> None:
    recipe = load_recipe(DIGITS, ["protocol={kind: hardsync, learners: 2}"])
    with pytest.raises(ValueError, match="must be a learner's mini-batch with protocol"):
        recipe.with_execution(device_batch=24)
