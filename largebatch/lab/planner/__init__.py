"""Predicts the time of a recipe on machines that are not here, and suggests recipes for a batch.

`cluster` reads the description of a machine, `prediction` puts a recipe on it and computes seconds,
and `suggest` writes a recipe for a batch. Nothing here imports torch.
"""
