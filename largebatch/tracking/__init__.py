"""The record of a run (`events`, and log.jsonl) and what shows it: the console, W&B."""
