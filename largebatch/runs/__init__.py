"""From a recipe and a machine to a finished run folder, and what can be done with one afterwards.

`run` is where a run begins, `build` puts its objects together, `launch` starts its workers,
`folder` is its record. `checkpoints` and `pretrained` evaluate, polish and compare weights that
are there.
"""
