"""Recorded runs with known causes."""
