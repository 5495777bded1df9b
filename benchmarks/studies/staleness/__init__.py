"""The cost of late gradients."""
