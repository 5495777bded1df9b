"""Who follows a run: the console, log.jsonl, Weights & Biases."""
