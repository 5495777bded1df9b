"""The record of a run (`events`, and log.jsonl) and what shows it: the console, W&B.

To add a tracker, write a class here, as `tensorboard.py` does, and its name in `registry.OURS`. To
add a monitor, see `training.step_log.Monitors`.
"""
