"""The pairs of recipes: a small batch and a large one."""
