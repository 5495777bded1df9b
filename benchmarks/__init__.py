"""Measurements: today's code compared with its peers, and the frozen studies."""
