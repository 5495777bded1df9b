"""What forked workers need, imported once in the process that they are forked from."""

import gc
from contextlib import suppress

import pytest  # noqa: F401 -- the modules that the functions stand in import it

import largebatch.runs.run  # noqa: F401
from largebatch.models import kernels
from largebatch.optional import require_timm

require_timm()
with suppress(ImportError):
    kernels.batchnorm()  # imports Triton

# Otherwise each garbage collection of a worker visits, and so copies, all that was imported here.
gc.freeze()
