"""Protocols with parameter servers, from fully synchronous to fully asynchronous updates."""
