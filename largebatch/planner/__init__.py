"""How long a recipe takes on machines that are not here, and what limits it.

`cluster` reads what a machine is, `model` turns it into seconds, `calibration` fits the few
constants that no data sheet gives to published MLPerf runs, `prediction` puts a recipe on a
cluster, and `scan` tries other batches and numbers of GPUs. Nothing here imports torch, and nothing
below `report` knows of it.
"""
