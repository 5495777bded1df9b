"""The experiment as data: what a recipe may hold, how it is read, checked, planned and explained.

Nothing here imports PyTorch.
"""

from largebatch.recipe.loading import load_recipe as load_recipe
from largebatch.recipe.recipe import Recipe as Recipe
