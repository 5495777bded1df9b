"""The policies of LRBench, each at its own best rate."""
