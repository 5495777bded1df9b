"""Studies: which policy, which configuration, measured with intervals."""
