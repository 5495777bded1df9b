"""Optimizers that torch.optim does not have: LARS, and the kernels that compute its update."""

from largebatch.optim.lars import LARS as LARS
