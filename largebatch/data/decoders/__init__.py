"""Decoders from requests to tensors: DALI, torchvision, a pixel cache, and synthetic images.

`reader` reads encoded images ahead and `prefetch` fills batches ahead, both in threads.
"""
