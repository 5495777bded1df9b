"""Protocols between waiting for every gradient and waiting for none, over parameter servers."""
