"""Predicts the time of a recipe on machines that are not here, and suggests recipes for a batch.

`cluster` reads the description of a machine, `model` computes seconds from it, `calibration` fits
the few constants that no data sheet gives to published MLPerf runs, `prediction` puts a recipe on a
cluster, and `scan` tries other batches and numbers of GPUs. `suggest` chooses settings for a batch,
and `draft` writes them as a recipe. Nothing here imports torch.
"""
