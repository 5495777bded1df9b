"""Measurements: today's code beside its peers, and the frozen studies."""
