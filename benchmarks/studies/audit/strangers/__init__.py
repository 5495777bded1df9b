"""Loops of public threads that differ from one process, and what the audit says of them."""
