"""The audit of a resumption: the rest of a run beside that of a run without a stop."""
