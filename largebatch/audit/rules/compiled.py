"""What can be wrong with code that is not the plain eager one, in tables of rules.

Compiled code is compared with eager code, channels_last with contiguous tensors, and autocast with
the model's own type. Differences are in units of the arithmetic's rounding, which
`audit/passes.py` measures.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from largebatch.errors import shorten
from largebatch.formatting import percent, plural, three_digits
from largebatch.rules import Rule

_UNITS = 16
"""Largest distance in units that is taken for rounding; another order of the same sums gives 1 to
2, approximations of functions in compiled code a few."""

_UNITS_IF_LARGE = 4
"""The same where that is a tenth of the values or more, as in half types: such units are the mean
of very many roundings, so they vary little."""

_LARGE = 0.1

_SMALL_GRADIENT = 0.01
"""Relative difference of a gradient that rounding can make, whatever the unit: one activation near
zero that ends on the other side of a ReLU changes it by about one over the root of their number."""

_UNITS_OF_AUTOCAST = 64
"""Largest distance of the outputs under autocast in roundings of its type: half of the values
in bfloat16, a sixteenth in float16."""


class Distance(NamedTuple):
    """Distance of a tensor from that of plain code."""

    name: str
    relative: float
    """Length of the difference over the length of the tensor."""

    units: float
    """Length of the difference in units of the arithmetic's rounding."""

    place: int
    """Number of the pass; 0 and 1 have one batch, 2 has another."""

    @property
    def is_rounding(self) -> bool:
        """True if rounding can make this difference."""
        limit = _UNITS_IF_LARGE if self.relative >= _LARGE else _UNITS
        return self.units <= limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Largest distances over all passes, by what is compared."""

    outputs: Distance
    loss: Distance
    gradients: Distance
    statistics: Distance
    has_wider: bool
    """True if the unit is measured by a pass in a wider type; else it is the type's rounding."""

    @property
    def all(self) -> dict[str, Distance]:
        """Distances by what is compared, causes before what follows from them."""
        return {
            "outputs": self.outputs,
            "loss": self.loss,
            "gradients": self.gradients,
            "statistics": self.statistics,
        }

    @property
    def beyond(self) -> str:
        """What differs by more than rounding, the cause first; empty if nothing does."""
        for kind, distance in self.all.items():
            is_small = kind == "gradients" and distance.relative <= _SMALL_GRADIENT
            if not distance.is_rounding and not is_small:
                return kind
        return ""

    @property
    def is_surely_beyond(self) -> bool:
        """True for a difference that does not depend on how well the unit is known."""
        return bool(self.beyond) and (
            self.has_wider or self.all[self.beyond].relative > _SMALL_GRADIENT
        )

    @property
    def is_equal(self) -> bool:
        """True if all values are equal, bit for bit."""
        return not any(it.relative for it in self.all.values())

    @property
    def words(self) -> str:
        """The differences in words."""
        if self.is_equal:
            return "outputs, loss, gradients and statistics are equal bit for bit"
        parts = [f"{kind} {three_digits(it.units)}" for kind, it in self.all.items()]
        unit = "its distance from a wider type" if self.has_wider else "the rounding of its type"
        return f"by rounding only: {', '.join(parts)} units ({unit})"


# Compiled code.


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """Passes of compiled code beside passes of eager code from the same state."""

    parts: tuple[str, ...]
    """What is compiled."""

    types: tuple[tuple[str, str], ...]
    """Types of outputs, compiled and eager, that differ."""

    mutated: tuple[int, ...]
    """Numbers of the model's arguments that only compiled code changes."""

    undrawn: tuple[str, ...]
    """Libraries whose random numbers eager code draws and compiled code does not."""

    repeats: bool
    """True if compiled passes repeat their random numbers, and eager ones do not."""

    moves: float
    """How far running statistics move in a compiled pass, over the same in an eager one, for the
    layer where that is furthest from 1; NaN without running statistics."""

    moved: str
    """Name of that buffer."""

    is_stale: bool
    """True if code that is compiled again agrees."""

    cast: str
    """Type that the outputs are rounded to, and those of eager code are not; else empty."""

    in_evaluation: bool
    """True if values were compared with all layers but BatchNorm in evaluation mode."""

    values: Comparison | None
    """None if both draw random numbers in different ways, in evaluation mode too."""

    repeat: Comparison
    """The eager passes repeated, beside themselves."""

    @property
    def is_frozen(self) -> bool:
        """True if random numbers explain other values."""
        return bool(self.undrawn) or self.repeats

    @property
    def differs(self) -> str:
        """What differs by more than rounding, unless a fault above explains it."""
        is_explained = self.types or self.mutated or self.is_frozen
        if self.values is None or is_explained or self.repeat.beyond:
            return ""
        return self.values.beyond if self.values.is_surely_beyond else ""

    @property
    def what(self) -> str:
        """What is compiled, in words."""
        return shorten(list(self.parts))


def _place_text(e: Compiled) -> str:
    assert e.values is not None
    place = e.values.all[e.differs].place
    return {
        1: "; the first pass agrees, so a number that the model changes is frozen in the graph",
        2: "; for another batch only, so a number of the first batch is frozen in the graph",
    }.get(place, "")


def _difference_text(e: Compiled) -> str:
    assert e.values is not None
    distance = e.values.all[e.differs]
    name = f"the gradient of {distance.name}" if e.differs == "gradients" else distance.name
    return (
        f"{e.what}: {name} differs from that of eager code by {percent(distance.relative)} % "
        f"({three_digits(distance.units)} units of rounding)"
    )


_NARROW = (
    "run the script with TORCH_COMPILE_DEBUG=1, or with backend='eager', then 'aot_eager', "
    "which shows the stage that differs"
)

COMPILED: tuple[Rule[Compiled], ...] = (
    Rule(
        check="compiled code",
        level="fault",
        when=lambda e: bool(e.types),
        text=lambda e: (
            f"{e.what}: it returns {e.types[0][0]} where eager code returns {e.types[0][1]}"
        ),
        remedy="remove the cast from what only the compiler runs: a backend, a pass, a custom "
        "operator",
    ),
    Rule(
        check="compiled code",
        level="fault",
        when=lambda e: bool(e.mutated),
        text=lambda e: (
            f"{e.what}: it changes tensor {e.mutated[0] + 1} of the model's arguments in place, "
            "and eager code does not"
        ),
        remedy="pass a clone, or mark the argument as mutated where the operator is registered "
        "(mutates_args of torch.library.custom_op)",
    ),
    Rule(
        check="compiled code",
        level="fault",
        when=lambda e: bool(e.undrawn),
        text=lambda e: (
            f"{e.what}: eager code draws random numbers (of {shorten(list(e.undrawn))}) in each "
            "pass, compiled code draws none: they are frozen in the graph"
        ),
        remedy="draw them with torch inside the model; torch.compiler.assume_constant_result and "
        "values that are computed once keep the first draw",
    ),
    Rule(
        check="compiled code",
        level="fault",
        when=lambda e: e.repeats and not e.undrawn,
        text=lambda e: (
            f"{e.what}: two compiled passes over a batch are equal bit for bit, two eager ones "
            "are not: dropout or other random numbers repeat"
        ),
        remedy="find the seed that is set or kept in the graph, or exclude that layer with "
        "torch.compiler.disable",
    ),
    Rule(
        check="compiled code",
        level="fault",
        when=lambda e: abs(e.moves) < 0.5,
        text=lambda e: f"{e.what}: running statistics are not updated: {e.moved} stays",
        remedy="exclude BatchNorm with torch.compiler.disable, or correct the backend, which must "
        "write buffers back",
        figure=lambda e: e.moves,
    ),
    Rule(
        check="compiled code",
        level="fault",
        when=lambda e: abs(e.moves) > 1.5,
        text=lambda e: (
            f"{e.what}: running statistics move {three_digits(e.moves)} times as far as in eager "
            f"code: {e.moved} is updated more than once a pass"
        ),
        remedy="update them in one place: in the graph, or outside of it",
        figure=lambda e: e.moves,
    ),
    Rule(
        check="compiled code",
        level="fault",
        when=lambda e: e.is_stale and bool(e.differs),
        text=lambda e: f"{_difference_text(e)}; compiled again it agrees: its guards are stale",
        remedy="call torch.compiler.reset() after the change, or let the compiler see it: no "
        "guard_filter_fn, skip_guard_eval_unsafe or assume_constant_result",
        figure=lambda e: e.values.all[e.differs].units if e.values else None,
    ),
    Rule(
        check="compiled code",
        level="fault",
        when=lambda e: bool(e.cast) and bool(e.differs),
        text=lambda e: (
            f"{_difference_text(e)}, about as much as a cast to {e.cast}, which eager code does "
            "not have"
        ),
        remedy="look for a cast in what only the compiler runs (a backend, a pass, a custom "
        f"operator; for inductor try emulate_precision_casts); else {_NARROW}",
        figure=lambda e: e.values.all[e.differs].units if e.values else None,
    ),
    Rule(
        check="compiled code",
        level="fault",
        # That statistics do not move, or too far, is said above.
        when=lambda e: (
            bool(e.differs)
            and not e.cast
            and not e.is_stale
            and not (e.differs == "statistics" and not 0.5 <= e.moves <= 1.5)
        ),
        text=lambda e: _difference_text(e) + _place_text(e),
        remedy=_NARROW,
        figure=lambda e: e.values.all[e.differs].units if e.values else None,
    ),
    Rule(
        check="compiled code",
        level="unknown",
        unless=frozenset({"compiled code"}),
        when=lambda e: bool(e.repeat.beyond),
        text=lambda e: (
            f"{e.what}: not compared: two eager passes from one state differ in "
            f"{e.repeat.all[e.repeat.beyond].name} by "
            f"{percent(e.repeat.all[e.repeat.beyond].relative)} %"
        ),
        remedy="remove what is random, or counts, outside of the model and its generators",
    ),
    Rule(
        check="compiled code",
        level="unknown",
        unless=frozenset({"compiled code"}),
        when=lambda e: e.values is None,
        text=lambda e: (
            f"{e.what}: not compared: it draws other random numbers than eager code, in "
            "evaluation mode too"
        ),
        remedy="for the audit set torch._inductor.config.fallback_random = True before compiling",
    ),
    Rule(
        check="compiled code",
        level="unknown",
        unless=frozenset({"compiled code"}),
        when=lambda e: (
            e.values is not None
            and not e.repeat.beyond
            and bool(e.values.beyond)
            and not e.values.is_surely_beyond
        ),
        text=lambda e: (
            f"{e.what}: {e.values.beyond if e.values else ''} differ by more than the type's "
            "rounding; the model does not run in a wider type, which would measure it"
        ),
        remedy="make the model accept float64: no fixed types in it and in its operators",
    ),
    Rule(
        check="compiled code",
        level="fine",
        unless=frozenset({"compiled code"}),
        when=lambda e: e.values is not None and not e.values.beyond and not e.repeat.beyond,
        text=lambda e: (
            f"{e.what} beside eager code, of which the other rows are: "
            f"{e.values.words if e.values else ''}"
            + ", with dropout in evaluation mode"
            * e.in_evaluation
        ),
        figure=lambda e: max(it.units for it in e.values.all.values()) if e.values else None,
    ),
)


class Graphs(NamedTuple):
    """What the compiler did in this process."""

    parts: tuple[str, ...]
    graphs: int
    breaks: int
    reason_of_break: str
    again: int
    """Number of graphs compiled again because a guard failed."""

    reason: str
    """First guard that failed."""


GRAPHS: tuple[Rule[Graphs], ...] = (
    Rule(
        check="compiled code",
        level="note",
        when=lambda e: e.graphs == 0,
        text=lambda e: f"{shorten(list(e.parts))}: no graph was made, so eager code runs",
        remedy="compile the network inside of wrappers, as a class of your own, without "
        "suppress_errors or TORCHDYNAMO_DISABLE",
        figure=lambda e: float(e.graphs),
    ),
    Rule(
        check="compiled code",
        level="note",
        when=lambda e: e.breaks > 0,
        text=lambda e: (
            f"{plural(e.breaks, 'graph break')} in {plural(e.graphs, 'graph')}, the first: "
            f"{e.reason_of_break}"
        ),
        remedy="compile with fullgraph=True, which raises an error at each, or accept the time",
        figure=lambda e: float(e.breaks),
    ),
    Rule(
        check="compiled code",
        level="note",
        when=lambda e: e.again > 0,
        text=lambda e: f"compiled again {plural(e.again, 'time')}, first because {e.reason}",
        remedy="mark sizes that vary with torch._dynamo.mark_dynamic, drop the last batch, or keep "
        "numbers that change in tensors",
        figure=lambda e: float(e.again),
    ),
)


class Unexamined(NamedTuple):
    """Compiled code outside of the model, which an audit runs eagerly."""

    functions: tuple[str, ...]
    is_autograd: bool
    """True if compiled autograd is on."""

    is_run: bool
    """False if something is compiled in the model, and no pass of it was seen."""


UNEXAMINED: tuple[Rule[Unexamined], ...] = (
    Rule(
        check="compiled code",
        level="unknown",
        when=lambda e: bool(e.functions),
        text=lambda e: (
            f"only eager code was examined of {shorten(list(e.functions))}, compiled outside of "
            "the model"
        ),
        remedy="for the audit compile the model or its layers instead of the step",
    ),
    Rule(
        check="compiled code",
        level="unknown",
        when=lambda e: e.is_autograd,
        text="only the eager backward pass was examined: compiled autograd is on",
        remedy="for the audit set torch._dynamo.config.compiled_autograd = False",
    ),
    Rule(
        check="compiled code",
        level="unknown",
        when=lambda e: not e.is_run,
        text="not examined: no pass with gradients of the model was seen before an update",
        remedy="correct what the other checks name, and audit again",
    ),
)

# Memory formats and types.


class ChannelsLast(NamedTuple):
    """Passes with channels last beside passes with contiguous tensors."""

    values: Comparison
    repeat: Comparison
    is_random: bool
    """True if random numbers are drawn in evaluation mode too."""


CHANNELS_LAST: tuple[Rule[ChannelsLast], ...] = (
    Rule(
        check="channels last",
        level="unknown",
        when=lambda e: bool(
            e.is_random or e.repeat.beyond or (e.values.beyond and not e.values.is_surely_beyond)
        ),
        text="not compared: the model draws random numbers in evaluation mode too, or rounding "
        "could not be measured",
        remedy="remove random numbers from the model, and make it accept float64",
    ),
    Rule(
        check="channels last",
        level="fault",
        when=lambda e: bool(e.values.beyond),
        text=lambda e: (
            f"{e.values.beyond} differ from those of contiguous tensors by "
            f"{percent(e.values.all[e.values.beyond].relative)} % in "
            f"{e.values.all[e.values.beyond].name} "
            f"({three_digits(e.values.all[e.values.beyond].units)} units of rounding)"
        ),
        remedy="find the layer or operator that reads memory in the order of channels first "
        "(as_strided, kernels of one's own), and call contiguous() before it",
        figure=lambda e: e.values.all[e.values.beyond].units,
    ),
    Rule(
        check="channels last",
        level="fine",
        text=lambda e: f"beside contiguous tensors, {e.values.words}",
        figure=lambda e: max(it.units for it in e.values.all.values()),
    ),
)


class Autocast(NamedTuple):
    """Passes under autocast beside passes in the model's own type."""

    dtype: str
    values: Comparison
    """Units are roundings of the type of autocast."""

    not_finite: str
    """What is not finite under autocast only; else empty."""

    is_random: bool
    """True if both draw random numbers in different ways."""


def _autocast_text(e: Autocast) -> str:
    outputs = e.values.outputs
    gradients = e.values.gradients
    text = (
        f"{e.dtype} beside the model's own type: outputs differ by {percent(outputs.relative)} % "
        f"({three_digits(outputs.units)} roundings)"
    )
    if math.isinf(gradients.relative):  # with this check's loss scale, not the script's
        return text
    return f"{text}, gradients by up to {percent(gradients.relative)} % ({gradients.name})"


AUTOCAST: tuple[Rule[Autocast], ...] = (
    Rule(
        check="autocast",
        level="fault",
        when=lambda e: bool(e.not_finite),
        text=lambda e: f"{e.dtype}: {e.not_finite} not finite, and finite without autocast",
        remedy="use bfloat16, or leave the layer out: torch.autocast(device, enabled=False)",
    ),
    Rule(
        check="autocast",
        level="unknown",
        when=lambda e: e.is_random,
        text=lambda e: f"{e.dtype}: not compared: it draws other random numbers",
        remedy="audit the model without its random layers",
    ),
    Rule(
        check="autocast",
        level="fault",
        when=lambda e: e.values.outputs.units > _UNITS_OF_AUTOCAST,
        text=_autocast_text,
        remedy="leave out the layer that loses the digits (a difference of large numbers, a sum of "
        "many): torch.autocast(device, enabled=False)",
        figure=lambda e: e.values.outputs.units,
    ),
    Rule(
        check="autocast",
        level="fine",
        text=_autocast_text,
        figure=lambda e: e.values.outputs.units if math.isfinite(e.values.outputs.units) else None,
    ),
)
