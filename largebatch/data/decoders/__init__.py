"""Decoders from requests to tensors: DALI, torchvision, a pixel cache, and synthetic images.

To add one, write a module here whose `require_decoder` returns a function that opens it, as
`torchvision.py` does, and its name in `registry.OURS`.
"""
