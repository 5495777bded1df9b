"""Checkpoint files with changed contents and a correct checksum."""

import json
from collections.abc import Callable
from typing import Any

import safetensors.torch

from largebatch.training.checkpoint import CHECKSUM, CONTENT, _checksum


def rewritten(content: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Return the bytes of a checkpoint whose JSON `change` has changed in place."""
    length = int.from_bytes(content[:8], "little")
    header = json.loads(json.loads(content[8 : 8 + length])["__metadata__"][CONTENT])
    change(header)
    tensors, text = safetensors.torch.load(content), json.dumps(header)
    metadata = {CONTENT: text, CHECKSUM: _checksum(text, tensors)}
    return safetensors.torch.save(tensors, metadata)
