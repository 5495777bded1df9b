"""Compare code that runs with the eager code that the other checks examine.

An audit runs eagerly, because graphs do not have the hooks of its recorder. So compiled code is
compared first: three passes (a batch, the same again, another one) from one state, compiled and
eager. The same passes compare channels_last with contiguous tensors, and autocast with the model's
own type.
"""

import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from largebatch.audit.passes import Numbers, Passes, compare, keep
from largebatch.audit.ranks import Ranks, in_one_line
from largebatch.audit.recording import Micro
from largebatch.audit.restoring import held_by
from largebatch.audit.rules import compiled as rules
from largebatch.audit.subject import Subject
from largebatch.models.wrappers import describe_layer, uncompiled
from largebatch.rules import Finding, decide, examine

_REMEDY = "call the compiled model without the audit, which shows the traceback"


def is_compiled(value: object) -> bool:
    """Return True for a function that torch.compile has made."""
    attributes = getattr(value, "__dict__", {})
    is_of_compiler = "_torchdynamo_orig_callable" in attributes
    return is_of_compiler and "_torchdynamo_disable" not in attributes
