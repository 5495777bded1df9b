"""Epochs to a fixed accuracy by optimizer and batch."""
