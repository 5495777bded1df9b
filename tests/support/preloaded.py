"""What forked workers need, imported once in the process that they are forked from."""

import pytest  # noqa: F401 -- the modules that the functions stand in import it

import largebatch.runs.run  # noqa: F401
from largebatch.optional import require_timm

require_timm()
