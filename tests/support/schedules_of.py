"""The learning rates of a recipe."""

from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.recipe import Recipe
from largebatch.schedules.build import Course, build_schedule, follow
from largebatch.schedules.functions import Schedule


def schedule_of(recipe: Recipe) -> Schedule:
    """Return the schedule of a recipe."""
    return build_schedule(recipe.schedule, make_plan(recipe.mathematics))


def course_of(recipe: Recipe) -> Course:
    """Return every learning rate of a recipe's run."""
    return follow(recipe.schedule, make_plan(recipe.mathematics))
