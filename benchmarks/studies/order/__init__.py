"""The study of what an order in chunks and windows costs in accuracy."""
