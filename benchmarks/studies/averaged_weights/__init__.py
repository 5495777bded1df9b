"""What averages of weights are worth with and without a statistics pass."""
