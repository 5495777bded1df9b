"""LAMB (You et al. 2020, arXiv:1904.00962): the optimizer of timm."""

from largebatch.optional import require_timm

require_timm()

from timm.optim.lamb import Lamb as LAMB  # noqa: E402, N814

__all__ = ["LAMB"]
