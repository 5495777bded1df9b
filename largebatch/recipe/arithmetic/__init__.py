"""What follows from a recipe by arithmetic: the division of its batches, and its `Plan`."""
