"""Whether weights, buffers, optimizer state and rates are equal on all workers."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from largebatch.distributed.agreement import checksum, have_same_bytes, shape
from largebatch.errors import SHOWN, shorten
from largebatch.formatting import plural, three_digits
from largebatch.measure.audit.findings import Check, Finding
from largebatch.measure.audit.ranks import Ranks

_REMEDIES: dict[Check, str] = {
    "weights": "give every worker worker 0's weights before training, and the same updates",
    "buffers": "broadcast the buffers (broadcast_buffers=True), or make them equal at the start",
    "optimizer state": "load or broadcast the optimizer's state on every worker",
    "learning rates": "step the same schedule equally often on every worker",
}


def tensors_of(model: nn.Module, optimizer: Optimizer) -> dict[Check, dict[str, Tensor]]:
    """Return the tensors that workers must have in common, by check and name."""
    norms = {
        id(buffer)
        for layer in model.modules()
        if isinstance(layer, _NormBase)
        for buffer in layer.buffers(recurse=False)
    }
    buffers = {name: it for name, it in model.named_buffers() if id(it) not in norms}
    is_divided = type(optimizer).__name__ == "ZeroRedundancyOptimizer"
    return {
        "weights": dict(model.named_parameters()),
        "buffers": buffers,
        "optimizer state": {} if is_divided else dict(_state_of(model, optimizer)),
        "learning rates": dict(_rates_of(optimizer)),
    }


class ReplicaCheck:
    """Comparison of what workers have in common, at the start and after the updates."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, ranks: Ranks, *, are_broadcast: bool
    ) -> None:
        self._model, self._optimizer, self._ranks = model, optimizer, ranks
        self._are_broadcast = are_broadcast
        self._faults: dict[Check, Finding] = {}

    def compare(self, when: str) -> None:
        """Compare all tensors; every worker calls this. Only the first difference is kept."""
        for check, tensors in tensors_of(self._model, self._optimizer).items():
            finding = differences(check, tensors, self._ranks, when=when)
            if finding is not None and check == "buffers" and self._are_broadcast:
                remedy = "nothing if a layer keeps statistics: worker 0's are sent before each pass"
                finding = replace(finding, level="note", remedy=remedy)
            if finding is not None:
                self._faults.setdefault(check, finding)

    def findings(self, updates: int) -> list[Finding]:
        """Return a finding for each check."""
        text = f"equal on all workers, at the start and after {plural(updates, 'update')}"
        return [
            self._faults.get(check) or Finding(check=check, level="fine", text=text)
            for check, tensors in tensors_of(self._model, self._optimizer).items()
            if tensors
        ]


def differences(
    check: Check, tensors: Mapping[str, Tensor], ranks: Ranks, *, when: str
) -> Finding | None:
    """Return a fault that names the tensors that differ between workers; None if none does."""
    own = [[name, shape(it), checksum({name: it.cpu()})] for name, it in tensors.items()]
    digest = hashlib.sha256(json.dumps(own).encode()).digest()
    device = ranks.backend.device
    if have_same_bytes(torch.tensor(list(digest), dtype=torch.uint8, device=device), ranks.backend):
        return None
    everyone = ranks.gather(own)
    if any([it[:2] for it in other] != [it[:2] for it in everyone[0]] for other in everyone):
        counts = ", ".join(str(len(other)) for other in everyone[:SHOWN])
        text = f"workers have tensors of other names or shapes {when}: {counts} of them"
        return _fault(check, text, float("nan"))
    unequal = [row[0][0] for row in zip(*everyone, strict=True) if len({it[2] for it in row}) > 1]
    figures = [relative_difference(tensors[name], ranks) for name in unequal[:SHOWN]]
    text = (
        f"unequal on the workers {when}: {len(unequal)} of {plural(len(own), 'tensor')} "
        f"({shorten(unequal, most=3)}), by up to {three_digits(100 * max(figures))} % of the mean"
    )
    return _fault(check, text, max(figures))


def relative_difference(tensor: Tensor, ranks: Ranks) -> float:
    """Return the largest distance of a worker's tensor from the mean, over the mean's length."""
    mean = ranks.sum(tensor) / ranks.size
    distance = float((tensor.detach().double() - mean).norm())
    largest = float(max(ranks.gather(distance)))
    return largest / max(float(mean.norm()), torch.finfo(torch.float64).tiny)


def _fault(check: Check, text: str, figure: float) -> Finding:
    return Finding(check=check, level="fault", text=text, remedy=_REMEDIES[check], figure=figure)


def _state_of(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, (Tensor, int, float)):
                yield f"{name}.{key}", torch.as_tensor(value)


def _rates_of(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            values = value if isinstance(value, tuple) else (value,)
            if key != "params" and all(isinstance(it, (float, int, Tensor)) for it in values):
                yield f"group {number} {key}", torch.tensor(list(map(float, values))).double()
