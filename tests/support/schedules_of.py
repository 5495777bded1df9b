"""The learning rates of a recipe."""

from largebatch.recipe.arithmetic.plan import plan_updates
from largebatch.recipe.recipe import Recipe
from largebatch.schedules.build import Course, build_schedule, follow
from largebatch.schedules.functions import Schedule


def schedule_of(recipe: Recipe) -> Schedule:
    """Return the schedule of a recipe."""
    return build_schedule(recipe.schedule, plan_updates(recipe))


def course_of(recipe: Recipe) -> Course:
    """Return every learning rate of a recipe's run."""
    return follow(recipe.schedule, plan_updates(recipe))
