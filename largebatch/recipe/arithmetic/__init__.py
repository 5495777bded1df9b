"""The arithmetic of a recipe: the division of its batches, and its `Plan`."""
