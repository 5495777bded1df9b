"""Sums gradients over all workers while the backward pass is still running.

Parameters are divided into static groups counted from the last layer, whose gradients are ready
first. Each group is one flat buffer and one all-reduce. It starts as soon as the group's last
gradient is ready, and never before the previous group, so that all workers send in the same order.
A `Grouping` takes the sizes of the gradients in bytes, in the order of the model, and returns
ranges of their numbers, the first to send in front: small groups start early but cost a latency
each; large groups use the bandwidth well but start late.

A gradient is a view into its buffer, also with a single worker on a GPU, so that its address never
changes: tables of addresses (optim/kernels/table.py) and graphs (training/graph.py) stay valid. The
first backward pass of a step creates new tensors, which are copied there group by group; the later
ones add to the views.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Self

import torch
from torch import Tensor, nn

from largebatch.distributed.backend import Group, Work, in_graphs
from largebatch.errors import UnusedParametersError

Named = tuple[str, nn.Parameter]

Grouping = Callable[[Sequence[int]], list[range]]

_ALIGNMENT = 16
"""Bytes: addresses of gradients are multiples of it."""


def cubic(sizes: Sequence[int]) -> list[range]:
    """Form groups of 3 (k+1)^3 - 3 k^3 tensors (Fujitsu's MLPerf v0.6 entry).

    >>> [len(group) for group in cubic([4] * 161)]
    [3, 21, 57, 80]
    """
    return _cut(len(sizes), (3 * (k + 1) ** 3 - 3 * k**3 for k in count()))


def by_bytes(limit: float) -> Grouping:
    """Form groups of at least `limit` bytes."""
    if limit <= 0:
        raise ValueError(f"a group needs at least 1 byte, got {limit}")

    def group(sizes: Sequence[int]) -> list[range]:
        counts = []
        number = 0
        filled = 0
        # From the last layer, whose gradients are ready first.
        for size in reversed(sizes):
            number += 1
            filled += size
            if filled >= limit:
                counts.append(number)
                number = 0
                filled = 0
        return _cut(len(sizes), [*counts, number])

    return group


def _whole(sizes: Sequence[int]) -> list[range]:
    return [range(len(sizes))] if sizes else []


def _cut(num_tensors: int, counts: Iterable[int]) -> list[range]:
    """Return ranges of `counts` tensors from the end; the last range is the remainder."""
    groups: list[range] = []
    end = num_tensors
    for number in counts:
        if end == 0:
            break
        groups.append(range(max(0, end - number), end))
        end = groups[-1].start
    return groups


@dataclass(slots=True)
class _Group:
    parameters: dict[str, nn.Parameter]
    buffer: Tensor
    views: dict[str, Tensor]
    """Parts of the buffer in the shapes of the parameters: their gradients from `place` on."""

    sent: Tensor
    """Tensor to send: the buffer itself, or one of the same length in a shorter type."""

    first: Tensor
    """Squared norm of the gradients of a step's first backward pass, if measured: 0-d."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of this step: tensors of autograd until all have come, then the views."""

    pending: set[str] = field(default_factory=set)
    """Parameters that still get a gradient in the armed backward pass."""

    @property
    def is_placed(self) -> bool:
        """True if the gradients of this step are in the buffer."""
        return self.gradients is self.views

    def place(self) -> None:
        """Move the gradients from the tensors of autograd into the buffer."""
        self.require_own()  # a gradient that a hook has put in place of autograd's would be lost
        torch._foreach_copy_(list(self.views.values()), [self.gradients[it] for it in self.views])
        self.gradients = self.views
        self.use_views()

    def require_own(self) -> None:
        """Raise ValueError, naming the parameter, if other code has set or removed a gradient."""
        for name, weight in self.parameters.items():
            if weight.grad is not self.gradients.get(name):
                raise _replaced(name)

    def use_views(self) -> None:
        """Make the views the gradients of the parameters, which other code may have replaced."""
        for name, weight in self.parameters.items():
            if weight.grad is not self.views[name]:
                weight.grad = self.views[name]

    def tensors(self) -> list[Tensor]:
        """Return the memory of the gradients: the buffer, or their tensors if they have their own.

        Tensors without elements are left out.
        """
        tensors = [self.buffer] if self.is_placed else list(self.gradients.values())
        return [tensor for tensor in tensors if tensor.numel()]

    def square(self) -> Tensor:
        """Return the squared norm of the gradients: 0-d, on the device, in float32 or longer."""
        # In float16 the square of a norm above 256 is infinite.
        dtype = self.first.dtype
        return torch.stack(torch._foreach_norm(self.tensors(), dtype=dtype)).square().sum()

    def send(self, workers: Group, divisor: float) -> Work:
        if self.sent is not self.buffer:
            torch.div(self.buffer, divisor, out=self.sent)
        return workers.all_reduce(self.sent)


class Reducer:
    """Owns the gradients of a model: zero them, accumulate, and `wait` for the global sum.

    Per optimizer step: `zero`, any number of backward passes, `arm` before the last one, `wait`.
    Every gradient is then the sum over workers and micro-batches; with a loss divided by the global
    batch it is the mean over all samples, and needs no further scaling. After `wait` the gradients
    of every step have the same memory, except with a single worker on a CPU. Other code may remove
    or replace them between `wait` and `zero`; within a step that is an error, which names the
    parameter.

    `dtype` is a shorter type to send. Each worker divides by `divisor` before rounding and
    multiplies the sum by it. The default is the number of workers, so that no sum of representable
    gradients overflows; use 1 if the loss is already divided by the global batch, because dividing
    twice would lose small gradients. A single worker rounds too, so that a recipe computes the same
    on any number. The gradients of `exact` keep their type and are sent last, together. `measure`
    records the squared norms of the gradients before and after the sum, for the noise scale.

    backward(create_graph=True) is an error: gradients with a graph cannot be summed.
    """

    def __init__(  # noqa: PLR0913 -- how gradients are grouped and sent
        self,
        parameters: Iterable[Named],
        workers: Group,
        *,
        grouping: Grouping = cubic,
        dtype: torch.dtype | None = None,
        divisor: float | None = None,
        exact: Collection[nn.Parameter] = (),
        measure: bool = False,
    ) -> None:
        self.workers = workers
        self._measure = measure
        self._divisor = divisor or workers.world_size
        self._sends = workers.world_size > 1 or dtype is not None
        keeps_type = set(exact)
        if not self._sends:
            grouping = _whole  # nothing is sent early, so that one launch can place all gradients
        named = list(parameters)
        self._frozen = {name: weight for name, weight in named if not weight.requires_grad}
        divided = divide(named, grouping=grouping, exact=keeps_type)
        if not divided:
            raise ValueError("the model has no parameter with requires_grad=True")
        self.device = divided[0][0][1].device
        # A single worker on a CPU sends nothing and has no graphs: there the tensors of autograd
        # stay the gradients, for a copy would take 1 to 3 % of an update.
        self._places = self._sends or self.device.type != "cpu"
        self._groups: list[_Group] = []
        for members in divided:
            kinds = _by_kind(members)
            if len(kinds) > 1 and workers.world_size > 1:
                raise ValueError(
                    f"parameters of different types or devices in one group: {kinds.keys()}"
                )
            sent_as = None if members[0][1] in keeps_type else dtype
            make = _with_buffer if self._places else _without_buffer
            for alike in kinds.values():
                self._groups.append(make(alike, dtype=sent_as))
        self.parameters = [weight for group in self._groups for weight in group.parameters.values()]
        """The parameters whose gradients are summed."""

        self._armed = False
        self.in_passes = False
        """True while a step computes gradients, before the optimizer changes weights."""

        self._under_way: list[Work] = []
        self.squares: Tensor | None = None
        """With `measure`, after `wait`: squared norm of this worker's gradients in the step's first
        backward pass, and of the sum. Two numbers on the device."""

        self._hooks = [
            weight.register_post_accumulate_grad_hook(self._on_gradient(group, name))
            for group in self._groups
            for name, weight in group.parameters.items()
        ]

    def zero(self) -> None:
        """Clear all gradients; the buffers stay allocated.

        Raises ValueError, naming the parameter, if one was frozen when the reducer was created and
        is trained now: its gradient would never be summed, nor cleared.
        """
        for name, weight in self._frozen.items():
            if weight.requires_grad:
                raise ValueError(
                    f"{name} was frozen when this reducer was created, and requires a gradient "
                    "now; create the reducer and the step again after requires_grad is set"
                )
        # Sums that are left of a step that an error has ended read the buffers written next.
        for work in self._under_way:
            work.wait()
        self.cancel()
        # Autograd writes the first gradient of a step to a new tensor, without reading zeros, and
        # `place` moves those of a group together: one launch instead of one for each parameter.
        for group in self._groups:
            group.gradients = {}
            for weight in group.parameters.values():
                weight.grad = None

    @property
    def sent_sizes(self) -> list[int]:
        """Numbers of elements of the tensors that are sent, in this order; empty if none is."""
        return [group.sent.numel() for group in self._groups] if self._sends else []

    def refusal(self) -> str | None:
        """Return why a graph cannot repeat the sums; None if it can."""
        return None if in_graphs(self.workers) else "only NCCL's sums can be recorded"

    def reads(self) -> object:
        """Return what a graph has fixed: which weights get a gradient. The buffers never move."""
        return [weight.requires_grad for weight in (*self.parameters, *self._frozen.values())]

    def refresh(self) -> None:
        """Make the buffers the gradients again: before a graph repeats the passes of a step."""
        for group in self._groups:
            group.gradients = group.views
            group.use_views()

    def cancel(self) -> None:
        """Forget what is left of a step that did not end, or was only recorded."""
        self._armed = False
        self._under_way = []

    @property
    def is_placed(self) -> bool:
        """True if every parameter got a gradient in this step, which is now in its buffer."""
        return all(group.is_placed for group in self._groups)

    def arm(self, *, complete: bool = False) -> None:
        """Announce the last backward pass of a step, which sends each group when it is complete.

        With `complete` that pass is over, and all groups are sent now.

        Raises ValueError, naming the parameter, if other code has set or removed a gradient.
        """
        for group in self._groups:
            group.require_own()
            group.pending = set() if complete else set(group.parameters)
        assert not self._under_way
        self._armed = True
        if complete and self._sends:
            self._send_complete_groups()

    def wait(self) -> None:
        """Block until every gradient is the sum over all workers.

        Raises UnusedParametersError, naming the parameters that the armed backward pass did not
        reach, and ValueError if `arm` was not called.
        """
        if not self._armed:
            raise ValueError("wait comes after arm and one backward pass")
        self._armed = False
        under_way = self._under_way
        self._under_way = []
        # If a gradient is missing, its group and those behind it were not sent.
        for group, work in zip(self._groups, under_way, strict=False):
            work.wait()
            if group.sent is not group.buffer:
                group.buffer.copy_(group.sent).mul_(self._divisor)
        missing = [name for group in self._groups for name in sorted(group.pending)]
        if missing:
            raise UnusedParametersError(
                f"no gradient reached {', '.join(missing)}, on which the loss does not depend; "
                "train a model without these (in a recipe: another model.name, or model.arguments "
                "that leave them out), or set requires_grad=False on them"
            )
        assert not self._sends or len(under_way) == len(self._groups)
        for group in self._groups:
            group.require_own()  # hooks of other code may have run after those of the reducer
        if self._measure:
            firsts = torch.stack([group.first for group in self._groups])
            wholes = torch.stack([group.square() for group in self._groups])
            self.squares = torch.stack([firsts.sum(), wholes.sum()])

    @torch.no_grad()
    def scale(self, factor: Tensor) -> None:
        """Multiply every gradient by a number on the device, after `wait`.

        The factor must be the same on all workers; the host does not wait for it.
        """
        alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for group in self._groups:
            for tensor in group.tensors():
                alike.setdefault((tensor.device, tensor.dtype), []).append(tensor)
        for (device, dtype), tensors in alike.items():
            torch._foreach_mul_(tensors, factor.to(device, dtype))

    def finite(self) -> Tensor:
        """Return True if every gradient is finite, after `wait`: 0-d, bool, on the device."""
        tensors = [tensor for group in self._groups for tensor in group.tensors()]
        if self.device.type != "cpu":  # one launch for many tensors
            return _all_finite(torch._foreach_norm(tensors, ord=math.inf))
        finite = _all_finite(torch._foreach_norm(tensors))  # 20 times as fast on the CPU
        if not finite:  # or a square overflowed
            finite = _all_finite([end for tensor in tensors for end in torch.aminmax(tensor)])
        return finite

    def close(self) -> None:
        """Remove the hooks from the parameters and release the gradients."""
        for hook in self._hooks:
            hook.remove()
        for weight in self.parameters:
            weight.grad = None
        self._hooks.clear()
        self._groups.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_gradient(self, group: _Group, name: str) -> Callable[[Tensor], None]:
        """Return the hook of a parameter, which runs after autograd has added to its gradient."""

        def note(weight: Tensor) -> None:
            assert weight.grad is not None
            if torch.is_grad_enabled():  # in a hook of backward(create_graph=True), and only there
                raise ValueError(
                    f"{name} got a gradient from backward(create_graph=True), which cannot be "
                    "summed over workers; take inner gradients by torch.autograd.grad(..., "
                    "create_graph=True)"
                )
            if self._armed and name not in group.pending:
                raise ValueError(
                    f"{name} got a second gradient after arm, while the first is being summed; arm "
                    "announces the last backward pass of a step"
                )
            if name not in group.gradients:
                group.gradients[name] = weight.grad
                if len(group.gradients) == len(group.parameters):
                    if self._places:
                        group.place()
                    if self._measure:  # before later passes add, and before it is sent
                        group.first.copy_(group.square())
            elif weight.grad is not group.gradients[name]:
                raise _replaced(name)
            if self._armed:
                group.pending.discard(name)
                if self._sends:
                    self._send_complete_groups()

        return note

    def _send_complete_groups(self) -> None:
        while (sent := len(self._under_way)) < len(self._groups) and not self._groups[sent].pending:
            self._under_way.append(self._groups[sent].send(self.workers, self._divisor))


def divide(
    parameters: Iterable[Named], *, grouping: Grouping, exact: Collection[nn.Parameter] = ()
) -> list[list[Named]]:
    """Divide the trained parameters into groups, the first to send in front, `exact` ones last.

    Raises ValueError if two parameters have the same name, or one has two names.
    """
    named = list(parameters)
    weights: dict[str, nn.Parameter] = {}
    names: dict[nn.Parameter, str] = {}
    for name, weight in named:
        if name in weights:
            raise ValueError(f"two parameters are named {name}: give each its own name")
        if weight in names:
            raise ValueError(f"one parameter is named {names[weight]} and {name}: list it once")
        weights[name] = weight
        names[weight] = name
    trained = [(name, weight) for name, weight in named if weight.requires_grad]
    keeps_type = set(exact)
    first = [(name, weight) for name, weight in trained if weight not in keeps_type]
    last = [(name, weight) for name, weight in trained if weight in keeps_type]
    sizes = [weight.numel() * weight.element_size() for _, weight in first]
    groups = [first[numbers.start : numbers.stop] for numbers in grouping(sizes)]
    return [*groups, last] if last else groups


def _by_kind(members: Iterable[Named]) -> dict[tuple[torch.dtype, torch.device], list[Named]]:
    """Divide parameters by type and device, for a buffer has one of each."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Named]] = {}
    for name, weight in members:
        kinds.setdefault((weight.dtype, weight.device), []).append((name, weight))
    return kinds


def _with_buffer(members: list[Named], *, dtype: torch.dtype | None) -> _Group:
    weights = [weight for _, weight in members]
    # Every view begins at a multiple of 16 bytes, like a tensor with memory of its own: kernels
    # then load several elements at once. The gaps are zeros, which change no sum and no norm.
    unit = max(1, _ALIGNMENT // weights[0].element_size())
    sizes = [-(-weight.numel() // unit) * unit for weight in weights]
    buffer = torch.zeros(sum(sizes), dtype=weights[0].dtype, device=weights[0].device)
    views = {}
    for (name, weight), part in zip(members, buffer.split(sizes), strict=True):
        if torch.ops.aten.is_non_overlapping_and_dense(weight):
            # In the memory layout of the weight, such as channels_last.
            views[name] = part.as_strided(weight.size(), weight.stride(), part.storage_offset())
        else:
            views[name] = part[: weight.numel()].view_as(weight)
    sent = buffer if dtype in {None, buffer.dtype} else torch.zeros_like(buffer, dtype=dtype)
    return _Group(dict(members), buffer, views, sent, first=_zero_square(buffer))


def _without_buffer(members: list[Named], *, dtype: torch.dtype | None) -> _Group:
    assert dtype is None, "a group that is sent has a buffer"
    empty = torch.empty(0)
    return _Group(dict(members), empty, {}, empty, first=_zero_square(members[0][1]))


def _zero_square(gradient: Tensor) -> Tensor:
    """Return a squared norm of 0, in a type that has the squares of a gradient's norms."""
    exact = torch.promote_types(gradient.dtype, torch.float32)
    return torch.zeros((), dtype=exact, device=gradient.device)


def _all_finite(numbers: Sequence[Tensor]) -> Tensor:
    finite: Tensor = torch.linalg.vector_norm(torch.stack(tuple(numbers)), math.inf) < math.inf
    return finite


def _replaced(name: str) -> ValueError:
    return ValueError(
        f"the gradient of {name} is no longer the reducer's: other code has removed or replaced it "
        "within a step; use Reducer.zero, not zero_grad, and change gradients in place"
    )
