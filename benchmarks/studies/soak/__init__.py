"""Runs that are disturbed at random."""
