"""Predicts the time of a recipe on machines that are not here, and suggests recipes for a batch.

`cluster` reads the description of a machine, `model` computes seconds from it, `prediction` puts a
recipe on a cluster, and `suggest` writes one for a batch. Nothing here imports torch.
"""
