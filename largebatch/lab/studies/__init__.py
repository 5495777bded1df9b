"""Studies: which policy, which configuration, measured with intervals.

To add one of recipes, variants and seeds, write a file in `presets/`. To add a kind with cells,
columns and findings of its own, write a module here, as `scaling.py`, with a section in `study.py`.
"""
