"""Decoders from requests to tensors: DALI, torchvision, a pixel cache, and synthetic images."""
