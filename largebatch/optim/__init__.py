"""Optimizers that torch.optim does not have, such as LARS and its kernels."""

from largebatch.optim.lars import LARS as LARS
