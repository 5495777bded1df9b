"""Which learning-rate policy: standings, recommendation and page."""
