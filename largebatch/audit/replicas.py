"""Whether weights, buffers, averages, optimizer state, rates and modes are equal on all workers."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FunctionType

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from largebatch.audit.ranks import Ranks
from largebatch.audit.rules import updates as rules
from largebatch.audit.subject import Subject
from largebatch.distributed.agreement import checksum, gather_unequal, shape
from largebatch.errors import SHOWN
from largebatch.models.wrappers import local_model
from largebatch.rules import Finding, decide


def averaged_tensors(averaged: nn.Module, model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of an averaged copy, and the buffers that the model does not have.

    Workers may measure BatchNorm's statistics on different samples.
    """
    averaged = local_model(averaged)
    known = {name for name, _ in model.named_buffers()}
    # AveragedModel puts "module." before the names of the model.
    others = {
        name: buffer
        for name, buffer in averaged.named_buffers()
        if not any(map(name.endswith, known))
    }
    return dict(averaged.named_parameters()) | others


def compare_replicas(
    subject: Subject, optimizer: Optimizer, ranks: Ranks, when: str
) -> dict[str, Finding]:
    """Compare what workers have in common, by check; every worker calls this."""
    model = subject.inner
    averaged = subject.averaged
    # BatchNorm's statistics are of each worker's samples; `norms` reports how far they differ.
    layers = [it for it in model.modules() if isinstance(it, _NormBase)]
    statistics = {id(buffer) for layer in layers for buffer in layer.buffers(recurse=False)}
    is_divided = type(optimizer).__name__ == "ZeroRedundancyOptimizer"
    settings = settings_of([optimizer]).items()
    compared: dict[str, dict[str, Tensor]] = {
        "weights": dict(model.named_parameters()),
        "buffers": {name: it for name, it in model.named_buffers() if id(it) not in statistics},
        "optimizer state": {} if is_divided else dict(_state_of(model, optimizer)),
        "learning rates": {name: torch.tensor(values).double() for name, values in settings},
        "averaged weights": averaged_tensors(averaged, model) if averaged else {},
    }
    are_sent = bool(getattr(subject.model, "broadcast_buffers", False))
    findings = {}
    for check, tensors in compared.items():
        difference = measure_difference(tensors, ranks)
        # Workers without tensors of a kind have nothing to compare, if all of them are.
        if difference is None and not tensors:
            continue
        replicas = rules.Replicas(
            difference=difference,
            when=when,
            noun="number" if check == "learning rates" else "tensor",
            are_sent=check == "buffers" and are_sent,
        )
        (findings[check],) = decide(replicas, rules.REPLICAS[check])
    return findings


def measure_difference(tensors: Mapping[str, Tensor], ranks: Ranks) -> rules.Difference | None:
    """Find the tensors that differ between workers; None if none does."""
    rows = [[name, shape(it), checksum({name: it.cpu()})] for name, it in tensors.items()]
    of_workers = gather_unequal(rows, ranks.backend, ranks.backend.device)
    if of_workers is None:
        return None
    shapes = [[row[:2] for row in of_worker] for of_worker in of_workers]
    if any(of_worker != shapes[0] for of_worker in shapes):
        names = [{name for name, _ in of_worker} for of_worker in shapes]
        other = sorted(set.union(*names) - set.intersection(*names)) or [*tensors]
        return rules.Difference(
            other_sets=tuple(other), unequal=(), number=len(tensors), most=math.nan
        )
    unequal = tuple(
        of_tensor[0][0]
        for of_tensor in zip(*of_workers, strict=True)
        if len({digest for *_, digest in of_tensor}) > 1
    )
    most = max(_relative_difference(tensors[name], ranks) for name in unequal[:SHOWN])
    return rules.Difference(other_sets=(), unequal=unequal, number=len(tensors), most=most)


def compare_settings(updates: Sequence[Mapping[str, list[float]]], ranks: Ranks) -> list[Finding]:
    """Compare the settings of the optimizers in each update, the results of `settings_of`.

    Rates that are equal before and after the audit may differ between: a schedule that moves an
    update late on one worker.
    """
    of_workers = gather_unequal([dict(it) for it in updates], ranks.backend, ranks.backend.device)
    return [] if of_workers is None else decide(_first_unequal(of_workers), rules.SETTINGS)


def _first_unequal(
    of_workers: Sequence[Sequence[Mapping[str, list[float]]]],
) -> rules.UnequalSettings | None:
    for update, of_update in enumerate(zip(*of_workers, strict=True), 1):
        for name in of_update[0]:
            lists = [settings.get(name, []) for settings in of_update]
            for values in zip(*lists, strict=False):  # a worker may not have the group
                if len(set(values)) > 1:
                    return rules.UnequalSettings(name=name, update=update, values=values)
    return None


def check_moves(moves: Mapping[int, int], ranks: Ranks) -> list[Finding]:
    """Check that the averaged copy moves once an update at most on all workers."""
    most = max(ranks.gather(max(moves.values(), default=0)))
    return decide(rules.AverageMoves(most), rules.AVERAGE_MOVES)


def check_modes(model: nn.Module, evaluated: set[str], ranks: Ranks) -> list[Finding]:
    """Compare the layers that were in evaluation mode in some forward pass of the updates."""
    named = model.named_modules()
    layers = {name for name, it in named if depends_on_mode(it) or _reads_mode(it)}
    of_workers = [set(names) for names in ranks.gather(sorted(evaluated & layers))]
    unequal = sorted(set.union(*of_workers) - set.intersection(*of_workers))
    modes = rules.EvaluatingLayers(
        layers=tuple(unequal),
        evaluating=sum(unequal[0] in names for names in of_workers) if unequal else 0,
        workers=ranks.size,
    )
    return decide(modes, rules.MODES)


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
    settings: dict[str, list[float]] = {}
    for place, optimizer in enumerate(optimizers):
        owner = f"optimizer {place} " * bool(place)
        for number, group in enumerate(optimizer.param_groups):
            for key, value in group.items():
                values = value if isinstance(value, tuple) else (value,)
                if key != "params" and all(isinstance(it, (float, int, Tensor)) for it in values):
                    settings[f"{owner}group {number} {key}"] = list(map(float, values))
    return settings
