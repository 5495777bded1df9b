"""What is told of a run (`events`, and log.jsonl), and who follows it: the console, W&B."""
