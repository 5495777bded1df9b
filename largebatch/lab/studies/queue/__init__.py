"""A study as a queue of runs: its file, its cells, its database, and the processes that run it."""
