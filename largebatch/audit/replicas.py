"""Whether weights, buffers, averages, optimizer state, rates and modes are equal on all workers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FunctionType

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from largebatch.audit.findings import Check, Finding, fault, fine
from largebatch.audit.ranks import Ranks
from largebatch.audit.subject import Subject
from largebatch.distributed.agreement import checksum, gather_unequal, shape
from largebatch.errors import SHOWN, shorten
from largebatch.formatting import plural, three_digits
from largebatch.models.wrappers import local_model

_REMEDIES: dict[Check, str] = {
    "weights": "give every worker worker 0's weights before training, and the same updates",
    "buffers": "broadcast the buffers (broadcast_buffers=True), or make them equal at the start",
    "optimizer state": "load or broadcast the optimizer's state on every worker",
    "learning rates": "step the same schedule equally often, in the same update, on every worker",
    "averaged weights": "average on every worker after each update, from weights that all share",
}


def averaged_tensors(averaged: nn.Module, model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of an averaged copy, and the buffers that the model does not have.

    Workers may measure BatchNorm's statistics on different samples.
    """
    averaged = local_model(averaged)
    known = {name for name, _ in model.named_buffers()}
    buffers = averaged.named_buffers()
    own = {name: it for name, it in buffers if not any(map(name.endswith, known))}
    return dict(averaged.named_parameters()) | own


def compare_replicas(
    subject: Subject, optimizer: Optimizer, ranks: Ranks, when: str
) -> dict[Check, Finding]:
    """Compare what workers have in common, by check; every worker calls this."""
    model, averaged = subject.inner, subject.averaged
    layers = [it for it in model.modules() if isinstance(it, _NormBase)]
    norms = {id(buffer) for layer in layers for buffer in layer.buffers(recurse=False)}
    is_divided = type(optimizer).__name__ == "ZeroRedundancyOptimizer"
    compared: dict[Check, dict[str, Tensor]] = {
        "weights": dict(model.named_parameters()),
        "buffers": {name: it for name, it in model.named_buffers() if id(it) not in norms},
        "optimizer state": {} if is_divided else dict(_state_of(model, optimizer)),
        "learning rates": {
            name: torch.tensor(values).double() for name, values in settings_of([optimizer]).items()
        },
        "averaged weights": averaged_tensors(averaged, model) if averaged else {},
    }
    found = {}
    for check, tensors in compared.items():
        finding = differences(check, tensors, ranks, when=when)
        if finding is None:
            if tensors:
                found[check] = fine(check, f"equal on all workers, before the audit and {when}")
            continue
        if check == "buffers" and getattr(subject.model, "broadcast_buffers", False):
            remedy = "nothing if a layer keeps statistics: worker 0's are sent before each pass"
            finding = replace(finding, level="note", remedy=remedy)
        found[check] = finding
    return found


def differences(
    check: Check, tensors: Mapping[str, Tensor], ranks: Ranks, *, when: str
) -> Finding | None:
    """Return a fault that names the tensors that differ between workers; None if none does."""
    own = [[name, shape(it), checksum({name: it.cpu()})] for name, it in tensors.items()]
    everyone = gather_unequal(own, ranks.backend, ranks.backend.device)
    if everyone is None:
        return None
    if any([it[:2] for it in other] != [it[:2] for it in everyone[0]] for other in everyone):
        sets = [{name for name, *_ in other} for other in everyone]
        names = sorted(set.union(*sets) - set.intersection(*sets)) or [name for name, *_ in own]
        text = f"workers have tensors of other names or shapes {when}: {shorten(names, most=3)}"
        return fault(check, text, _REMEDIES[check])
    unequal = [row[0][0] for row in zip(*everyone, strict=True) if len({it[2] for it in row}) > 1]
    most = max(_relative_difference(tensors[name], ranks) for name in unequal[:SHOWN])
    text = (
        f"unequal on the workers {when}: {len(unequal)} of {plural(len(own), 'tensor')} "
        f"({shorten(unequal, most=3)}), by up to {three_digits(100 * most)} % of the mean"
    )
    return fault(check, text, _REMEDIES[check], most)


def compare_settings(updates: Sequence[Mapping[str, list[float]]], ranks: Ranks) -> Finding | None:
    """Return a fault that names the first update in which settings differ; None if none does.

    `updates` are the results of `settings_of` at each update. Rates that are equal before and after
    the audit may differ between: a schedule that moves an update late on one worker.
    """
    everyone = gather_unequal([dict(it) for it in updates], ranks.backend, ranks.backend.device)
    if everyone is None:
        return None
    for number, of_update in enumerate(zip(*everyone, strict=True), 1):
        for name in of_update[0]:
            values = [settings.get(name) for settings in of_update]
            if None in values or all(it == values[0] for it in values):
                continue
            place = next(at for at, it in enumerate(zip(*values, strict=True)) if len(set(it)) > 1)
            each = [it[place] for it in values]
            mean = sum(each) / len(each)
            most = max(abs(it - mean) for it in each) / max(abs(mean), 1e-30)
            what = "learning rates differ" if name.endswith(" lr") else f"{name} differs"
            text = f"{what} in update {number} ({shorten([f'{it:.6g}' for it in each])})"
            return fault("learning rates", text, _REMEDIES["learning rates"], most)
    return None


def check_moves(moves: Mapping[int, int], ranks: Ranks) -> list[Finding]:
    """Return a fault if the averaged copy moved several times in an update on some worker."""
    most = max(ranks.gather(max(moves.values(), default=0)))
    if most <= 1:
        return []
    text = f"the averaged copy moves {most} times in an update, between its micro-batches"
    return [fault("averaged weights", text, "move it once an update", most)]


def check_modes(model: nn.Module, evaluated: set[str], ranks: Ranks) -> list[Finding]:
    """Compare the layers that were in evaluation mode in some forward pass of the updates."""
    named = model.named_modules()
    layers = {name for name, it in named if depends_on_mode(it) or _reads_mode(it)}
    everyone = ranks.gather(sorted(evaluated & layers))
    unequal = sorted(set().union(*everyone) - set(everyone[0]).intersection(*everyone))
    if not unequal:
        return []
    number = sum(unequal[0] in it for it in everyone)
    text = (
        f"{number} of {ranks.size} workers train with {plural(len(unequal), 'layer')} in "
        f"evaluation mode ({shorten(unequal, most=3)}), the others do not"
    )
    remedy = "call model.train() before the training on all workers, and freeze the same layers"
    return [fault("training mode", text, remedy, float(len(unequal)))]


def depends_on_mode(layer: nn.Module) -> bool:
    """Return True for a layer of torch whose output depends on its mode."""
    if isinstance(layer, _NormBase):
        return layer.track_running_stats
    if isinstance(layer, (nn.RNNBase, nn.MultiheadAttention)):
        return float(layer.dropout) > 0
    return isinstance(layer, nn.RReLU) or (isinstance(layer, _DropoutNd) and layer.p > 0)


def _reads_mode(layer: nn.Module) -> bool:
    """Return True for a layer of the script, or of another library, that reads its mode."""
    if type(layer).__module__.startswith("torch."):
        return False
    kinds = type(layer).__mro__[: type(layer).__mro__.index(nn.Module)]
    functions = [it for kind in kinds for it in vars(kind).values() if isinstance(it, FunctionType)]
    return any("training" in it.__code__.co_names for it in functions)


def _relative_difference(tensor: Tensor, ranks: Ranks) -> float:
    """Return the largest distance of a worker's tensor from the mean, over the mean's length."""
    mean = ranks.sum(tensor) / ranks.size
    distance = float((tensor.detach().double() - mean).norm())
    largest = float(max(ranks.gather(distance)))
    return largest / max(float(mean.norm()), torch.finfo(torch.float64).tiny)


def _state_of(model: nn.Module, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, (Tensor, int, float)):
                yield f"{name}.{key}", torch.as_tensor(value)


def settings_of(optimizers: Iterable[Optimizer]) -> dict[str, list[float]]:
    """Return learning rates, momentum and other numbers of the groups of these optimizers."""
    found: dict[str, list[float]] = {}
    for place, optimizer in enumerate(optimizers):
        owner = f"optimizer {place} " * bool(place)
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                values = value if isinstance(value, tuple) else (value,)
                if key != "params" and all(isinstance(it, (float, int, Tensor)) for it in values):
                    found[f"{owner}group {number} {key}"] = list(map(float, values))
    return found
