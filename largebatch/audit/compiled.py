"""Compare compiled code with the eager code that the other checks examine.

An audit runs eagerly, because graphs do not have the hooks of its recorder. So its findings are on
eager code, and hold for compiled code if both compute the same: three passes (a batch, the same
again, another one) from one state, compiled and eager.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from largebatch.audit.passes import Numbers, Passes, compare, distance_of
from largebatch.audit.ranks import Ranks, in_one_line
from largebatch.audit.recording import Micro
from largebatch.audit.restoring import held_by
from largebatch.audit.rules import compiled as rules
from largebatch.audit.subject import Subject
from largebatch.models.wrappers import describe_layer, without_wrappers
from largebatch.rules import Finding, examine

_OF_CAST = (0.25, 4.0)
"""A difference is that of a cast if it is this part of what autocast makes, or up to this many
times as much: a cast may be in some layers only."""

_EXPECTED_AGAIN = ("training", "grad_mode")
"""Words in the reasons of graphs that are compiled again for an evaluation, as they should be."""


def check_compiled(subject: Subject, ranks: Ranks) -> list[Finding]:
    """Compare passes of the compiled model or loss with eager ones, on every worker."""
    parts, examined = _compiled_parts(subject)
    evidence = rules.Unexamined(
        functions=tuple(_names_outside(subject, examined)),
        is_autograd=_has_compiled_autograd(),
        is_run=bool(subject.micros) or not parts,
    )
    findings = [*examine(evidence, rules.UNEXAMINED)]
    # Passes are made by all workers or by none: an exchange follows.
    if not any(ranks.gather(bool(parts))) or not all(ranks.gather(bool(subject.micros))):
        return findings
    remedy = "call the compiled model without the audit on that worker, which shows the traceback"
    own = ranks.attempt(
        "compiled code",
        "the compiled model",
        lambda: _findings_of(subject, parts),
        remedy=remedy,
    )
    return findings + worst_of_workers(own, ranks)


def worst_of_workers(own: Sequence[Finding], ranks: Ranks) -> list[Finding]:
    """Return the findings of the worker with most faults, the first of several."""
    of_workers = ranks.gather([asdict(finding) for finding in own])
    worst = max(of_workers, key=lambda them: sum(it["level"] == "fault" for it in them))
    return [Finding(**fields) for fields in worst]


def consecutive(micros: Sequence[Micro]) -> list[Micro]:
    """Return the micro-batches of three passes: one, the same again, and another one."""
    return [micros[0], micros[0], micros[-1]]


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Set all layers without running statistics to evaluation mode within the block."""
    layers = [it for it in model.modules() if it.training and not hasattr(it, "running_mean")]
    try:
        for layer in layers:
            layer.training = False
        yield
    finally:
        for layer in layers:
            layer.training = True


def is_compiled(value: object) -> bool:
    """Return True for a function that torch.compile has made."""
    attributes = getattr(value, "__dict__", {})
    is_of_compiler = "_torchdynamo_orig_callable" in attributes
    return is_of_compiler and "_torchdynamo_disable" not in attributes


def _compiled_parts(subject: Subject) -> tuple[list[str], list[object]]:
    """Return the names of what is compiled in the model and the loss, and compiled functions."""
    layers = _compiled_layers(subject.model)
    of_layers = [it for functions in layers.values() for it in functions]
    own_forwards = [vars(type(it)).get("forward") for it in subject.model.modules()]
    functions = [it for it in held_by(own_forwards) if is_compiled(it)]
    names = [f"function {_name_of(it)}" for it in functions]
    of_loss = [it for it in held_by([subject.loss_fn]) if is_compiled(it)]
    if of_loss:
        names.append("the loss function")
    return list(dict.fromkeys([*layers, *names])), of_layers + functions + of_loss


def _compiled_layers(model: nn.Module) -> dict[str, list[object]]:
    """Return the names of compiled layers, without wrappers, and the compiled functions of each."""
    layers: dict[str, list[object]] = {}
    for name, layer in model.named_modules():
        in_place = vars(layer).get("_compiled_call_impl") is not None  # Module.compile
        classes = type(layer).__mro__[: type(layer).__mro__.index(nn.Module)]
        attributes = [vars(layer), *map(vars, classes)]
        functions = [it for them in attributes for it in them.values() if is_compiled(it)]
        if in_place or functions:
            layers.setdefault(describe_layer(without_wrappers(name)), []).extend(functions)
    return layers


def _names_outside(subject: Subject, examined: Sequence[object]) -> Iterator[str]:
    """Yield the names of compiled functions that no pass of the model calls."""
    known = set(map(id, examined))
    own_step = vars(subject.optimizer).get("step")
    values = [*held_by([subject.step, subject.forward, own_step]), *subject.compiled]
    for value in {id(it): it for it in values}.values():
        if is_compiled(value) and id(value) not in known:
            yield _name_of(value)


def _name_of(function: object) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _has_compiled_autograd() -> bool:
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return False
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    is_enabled = getattr(module, "compiled_autograd_enabled", False)
    return bool(is_enabled or dynamo.config.compiled_autograd)


def _findings_of(subject: Subject, parts: Sequence[str]) -> list[Finding]:
    """Compare on this worker alone."""
    inner = subject.inner
    if not inner.training:
        inner.train()  # as the step does, in which the passes were recorded
    # A model that is compiled around its wrapper runs with it.
    model = inner if _compiled_layers(inner) else subject.model
    passes = Passes(subject=subject, model=model, micros=consecutive(subject.micros))
    both = _Both.of(passes)
    graphs = _graphs(parts)
    undrawn = _undrawn(both.compiled, both.eager)
    repeats = not undrawn and _repeats(both.compiled, both.eager)
    compared = both
    if both.is_of_other_draws and not undrawn and not repeats:
        with without_dropout(inner):
            compared = _Both.of(passes)
        undrawn = _undrawn(compared.compiled, compared.eager)
    values = None
    if not compared.is_of_other_draws:
        values = compared.values(passes)
    buffer, moves = _moves(passes, compared)
    evidence = rules.Compiled(
        parts=tuple(parts),
        types=_types(both),
        mutated=_mutated(passes, both),
        undrawn=tuple(sorted(undrawn)),
        repeats=repeats,
        moves=moves,
        moved=buffer,
        is_stale=False,
        cast="",
        in_evaluation=compared is not both,
        values=values,
        repeat=compare(passes, compared.again, compared.eager, compared.eager, compared.wider),
    )
    if evidence.differs and values is not None:
        evidence = replace(evidence, cast=_cast(passes, compared, values))
        torch.compiler.reset()
        fresh = replace(compared, compiled=_compiled(passes)).values(passes)
        evidence = replace(evidence, is_stale=not fresh.beyond)
    return [*examine(evidence, rules.COMPILED), *examine(graphs, rules.GRAPHS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Both:
    """Compiled and eager passes from one state."""

    compiled: list[Numbers]
    eager: list[Numbers]
    again: list[Numbers]
    """The eager passes repeated."""

    wider: list[Numbers] | None
    """Eager passes in a wider type; None if the model has no such pass."""

    @classmethod
    def of(cls, passes: Passes) -> "_Both":
        """Make all passes; the caller has switched compilation off."""
        return cls(
            compiled=_compiled(passes),
            eager=passes.run(passes.half),
            again=passes.run(passes.half),
            wider=passes.run_wider(),
        )

    @property
    def is_of_other_draws(self) -> bool:
        """True if random numbers are drawn, and not the same ones."""
        is_random = any(it.drawn for it in self.eager)
        pairs = zip(self.compiled, self.eager, strict=True)
        return is_random and any(one.states != other.states for one, other in pairs)

    def values(self, passes: Passes) -> rules.Comparison:
        """Return the distances of compiled passes from eager ones."""
        return compare(passes, self.compiled, self.eager, self.again, self.wider)


def _compiled(passes: Passes) -> list[Numbers]:
    with torch.compiler.set_stance("default"):
        passes.run(passes.half)  # compiles, which may draw random numbers
        return passes.run(passes.half)


def _undrawn(compiled: Sequence[Numbers], eager: Sequence[Numbers]) -> set[str]:
    """Return the libraries whose random numbers are drawn in eager passes only."""
    drawn: set[str] = set().union(*(it.drawn for it in eager))
    missing = drawn - set().union(*(it.drawn for it in compiled))
    pairs = zip(compiled, eager, strict=True)
    # Compiled code draws from torch what the model draws from NumPy.
    if any(one.states["torch"] != other.states["torch"] for one, other in pairs):
        missing -= {"NumPy"}
    return missing


def _repeats(compiled: Sequence[Numbers], eager: Sequence[Numbers]) -> bool:
    """Return True if only compiled passes over one batch are equal, though numbers are drawn."""
    return bool(eager[0].drawn) and _are_equal(compiled) and not _are_equal(eager)


def _are_equal(passes: Sequence[Numbers]) -> bool:
    first, second, *_ = passes
    pairs = zip([*first.outputs, first.loss], [*second.outputs, second.loss], strict=True)
    return not any(distance_of(one, other) for one, other in pairs)


def _types(both: _Both) -> tuple[tuple[str, str], ...]:
    names = [
        [str(it.dtype).removeprefix("torch.") for it in numbers[0].outputs]
        for numbers in (both.compiled, both.eager)
    ]
    if len(names[0]) != len(names[1]):
        return ((f"{len(names[0])} tensors", f"{len(names[1])}"),)
    return tuple((own, of_eager) for own, of_eager in zip(*names, strict=True) if own != of_eager)


def _mutated(passes: Passes, both: _Both) -> tuple[int, ...]:
    """Return the places of the arguments that only a compiled pass changes."""
    micro = passes.micros[0]
    given = [it for it in tree_leaves((micro.args, micro.kwargs)) if isinstance(it, torch.Tensor)]
    columns = zip(given, both.compiled[0].inputs, both.eager[0].inputs, strict=True)
    return tuple(
        place
        for place, (before, own, of_eager) in enumerate(columns)
        if distance_of(own, before) and not distance_of(of_eager, before)
    )


def _moves(passes: Passes, both: _Both) -> tuple[str, float]:
    """Return the buffer that moves by another distance in compiled code, and its part of that in
    eager code; NaN if no buffer moves.
    """
    found = ("", math.nan)
    columns = zip(
        passes.buffer_names,
        passes.subject.inner.buffers(),
        both.compiled[0].buffers,
        both.eager[0].buffers,
        strict=True,
    )
    for name, before, own, of_eager in columns:
        if not before.is_floating_point():
            continue
        move = (of_eager - before).double().flatten()
        length = float(move @ move)
        if length <= (1e-3 * float(before.double().norm())) ** 2:  # all rounding
            continue
        part = float((own - before).double().flatten() @ move) / length
        if math.isnan(found[1]) or abs(part - 1) > abs(found[1] - 1):
            found = (name, part)
    return found


def _cast(passes: Passes, both: _Both, values: rules.Comparison) -> str:
    """Return the narrower type that explains a difference of the outputs; empty if none does."""
    if values.beyond != "outputs":
        return ""
    parts: dict[str, float] = {}
    for dtype in (torch.bfloat16, torch.float16):
        if torch.finfo(dtype).eps <= passes.eps:
            continue
        narrow = passes.run(dtype)
        other = compare(passes, narrow, both.eager, both.again, both.wider).outputs.relative
        name = str(dtype).removeprefix("torch.")
        parts[name] = values.outputs.relative / other if other else math.inf
    near = {name: abs(math.log(it)) for name, it in parts.items() if _OF_CAST[0] < it < _OF_CAST[1]}
    return min(near, key=lambda name: near[name], default="")


def _graphs(parts: Sequence[str]) -> rules.Graphs:
    """Return what the compiler did in this process up to now."""
    from torch._dynamo.utils import counters, get_compilation_metrics

    breaks: dict[Any, int] = dict(counters["graph_break"])
    first_break = next(iter(breaks), "")
    reasons = [it.recompile_reason for it in get_compilation_metrics() if it.recompile_reason]
    again = [it for it in reasons if not any(word in it for word in _EXPECTED_AGAIN)]
    first = again[0].partition("#")[0].partition(": ")[2] if again else ""
    return rules.Graphs(
        parts=tuple(parts),
        graphs=counters["stats"]["unique_graphs"],
        breaks=sum(breaks.values()),
        reason_of_break=in_one_line(str(first_break).partition("\n")[0]),
        again=len(again),
        reason=in_one_line(first),
    )
