"""Optimizers that torch.optim does not have, such as LARS and its kernels.

To add one, write its section in `recipe/optimizers.py`, which names its builder, and the builder
here: a function of the section and `building.Weights`.
"""

from largebatch.optim.kernels import agree_on_kernels as agree_on_kernels
from largebatch.optim.lars import LARS as LARS
