"""Optimizers that torch.optim does not have, such as LARS and its kernels."""

from largebatch.optim.kernels import agree_on_kernels as agree_on_kernels
from largebatch.optim.lars import LARS as LARS
