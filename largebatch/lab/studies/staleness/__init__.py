"""What it costs not to wait: accuracy, staleness and time over (sigma, mu, lambda)."""
