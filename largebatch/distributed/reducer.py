"""Sums gradients over all workers while the backward pass is still running.

Parameters are divided into static groups counted from the last layer, whose gradients are ready
first. Each group is one flat buffer and one all-reduce. It starts as soon as the group's last
gradient is ready, and never before the previous group, so that all workers send in the same order.
A `Grouping` takes the sizes of the gradients in bytes, in the order of the model, and returns
ranges of their numbers, the first to send in front: small groups start early but cost a latency
each; large groups use the bandwidth well but start late.

A gradient is a view into its buffer. The first backward pass of a step creates a new tensor, which
is copied there; the later ones add to the view. A single worker needs no buffers.
"""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Self

import torch
from torch import Tensor, nn

from largebatch.distributed.backend import Group, Work
from largebatch.errors import UnusedParametersError

Named = tuple[str, nn.Parameter]

Held = list[tuple[dict[str, Tensor], Tensor | None]]
"""Gradients of each group by name, and the squared norm after the first backward pass."""

Grouping = Callable[[Sequence[int]], list[range]]


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
        counts, number, filled = [], 0, 0
        for size in reversed(sizes):
            number, filled = number + 1, filled + size
            if filled >= limit:
                counts.append(number)
                number = filled = 0
        return _cut(len(sizes), [*counts, number])

    return group


def _cut(num_tensors: int, counts: Iterable[int]) -> list[range]:
    """Return ranges of `counts` tensors from the end; the last range is the remainder."""
    groups, end = [], num_tensors
    for taken in counts:
        if end == 0:
            break
        groups.append(range(max(0, end - taken), end))
        end = groups[-1].start
    return groups


@dataclass(slots=True)
class _Group:
    parameters: dict[str, nn.Parameter]
    buffer: Tensor
    views: dict[str, Tensor]
    """Storage of the gradients: views of the buffer in the shape of the parameters."""

    sent: Tensor
    """Tensor to send: the buffer itself, or one of the same length in a shorter type."""

    held: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of this step."""

    pending: set[str] = field(default_factory=set)
    """Parameters that still get a gradient in the armed backward pass."""

    first: Tensor | None = None
    """Squared norm of the gradients of a step's first backward pass, if measured."""

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the gradients: the buffer, or the gradients one by one."""
        return [self.buffer] if self.views else list(self.held.values())

    def square(self) -> Tensor:
        """Return the squared norm of the gradients: 0-d, on the device."""
        return torch.stack(torch._foreach_norm(self.tensors())).square().sum()

    def send(self, workers: Group, divisor: float) -> Work:
        if self.sent is not self.buffer:
            torch.div(self.buffer, divisor, out=self.sent)
        return workers.all_reduce(self.sent)


class Reducer:
    """Owns the gradients of a model: zero them, accumulate, and `wait` for the global sum.

    Per optimizer step: `zero`, any number of backward passes, `arm` before the last one, `wait`.
    Every gradient is then the sum over workers and micro-batches; with a loss divided by the global
    batch it is the mean over all samples, and needs no further scaling.

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
        self.workers, self._measure = workers, measure
        self._divisor = divisor or workers.world_size
        self._alone = workers.world_size == 1 and dtype is None
        apart = set(exact)
        self._groups = [
            _Group(dict(members), torch.empty(0), {}, torch.empty(0))
            if self._alone
            else _with_buffer(dict(members), dtype=None if members[0][1] in apart else dtype)
            for members in divide(parameters, grouping=grouping, exact=apart)
        ]
        if not self._groups:
            raise ValueError("the model has no parameter with requires_grad=True")
        self.device = next(iter(self._groups[0].parameters.values())).device
        self._armed = False
        self.in_passes = False
        """True while train() computes gradients, before the optimizer changes weights."""

        self._under_way: list[Work] = []
        self._held: Held | None = None
        """Result of `held`, until the gradients are others."""

        self.squares: Tensor | None = None
        """With `measure`, after `wait`: squared norm of this worker's gradients in the step's first
        backward pass, and of the sum. Two numbers on the device."""

        self._hooks = [
            weight.register_post_accumulate_grad_hook(self._on_gradient(group, name))
            for group in self._groups
            for name, weight in group.parameters.items()
        ]

    def zero(self) -> None:
        """Clear all gradients; the buffers stay allocated."""
        self._held = None
        for group in self._groups:
            group.held = {}
            group.first = None
            for weight in group.parameters.values():
                weight.grad = None

    def held(self) -> Held:
        """Return the gradients of this step so far, for `hold`."""
        if self._held is None:
            self._held = [(dict(group.held), group.first) for group in self._groups]
        return self._held

    def hold(self, held: Held) -> None:
        """Use the memory of these gradients, which a graph has written; nothing is armed."""
        self._armed, self._under_way = False, []
        if held is self._held:
            return
        self._held = held
        for group, (gradients, first) in zip(self._groups, held, strict=True):
            group.held, group.first = dict(gradients), first
            for name, weight in group.parameters.items():
                weight.grad = gradients.get(name)

    def arm(self, *, complete: bool = False) -> None:
        """Announce the last backward pass of a step, which sends each group when it is complete.

        With `complete` that pass is over, and all groups are sent now.

        Raises ValueError, naming the parameter, if other code has set or removed a gradient.
        """
        for group in self._groups:
            for name, weight in group.parameters.items():
                if weight.grad is not group.held.get(name):
                    raise _not_ours(name)
            group.pending = set() if complete else set(group.parameters)
        assert not self._under_way
        self._armed = True
        if complete and not self._alone:
            self._send_complete_groups()

    def wait(self) -> None:
        """Block until every gradient is the sum over all workers.

        Raises UnusedParametersError, naming the parameters that the armed backward pass did not
        reach, and ValueError if `arm` was not called.
        """
        if not self._armed:
            raise ValueError("wait comes after arm and one backward pass")
        self._armed = False
        under_way, self._under_way = self._under_way, []
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
        assert self._alone or len(under_way) == len(self._groups)
        if self._measure:
            firsts = [group.first for group in self._groups if group.first is not None]
            wholes = [group.square() for group in self._groups]
            self.squares = torch.stack([torch.stack(firsts).sum(), torch.stack(wholes).sum()])

    def finite(self, examine: Callable[[Iterable[Tensor]], Tensor | None] | None = None) -> Tensor:
        """Return True if every gradient is finite, after `wait`: 0-d, bool, on the device.

        `examine` may find that of the parameters in a cheaper way, or return None.
        """
        weights = chain.from_iterable(group.parameters.values() for group in self._groups)
        if examine is not None and (known := examine(weights)) is not None:
            return known
        held = [tensor for group in self._groups for tensor in group.tensors() if tensor.numel()]
        if self.device.type != "cpu":  # one launch for many tensors
            return _all_finite(torch._foreach_norm(held, ord=math.inf))
        finite = _all_finite(torch._foreach_norm(held))  # 20 times as fast on the CPU
        if not finite:  # or a square overflowed
            finite = _all_finite([end for tensor in held for end in torch.aminmax(tensor)])
        return finite

    def close(self) -> None:
        """Remove the hooks from the parameters and release the gradients."""
        for hook in self._hooks:
            hook.remove()
        for group in self._groups:
            for weight in group.parameters.values():
                weight.grad = None
        self._hooks.clear()
        self._groups.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_gradient(self, group: _Group, name: str) -> Callable[[Tensor], None]:
        view = group.views.get(name)

        def note(weight: Tensor) -> None:
            gradient, held = weight.grad, group.held.get(name)
            assert gradient is not None
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
            if held is None:
                if view is not None:
                    weight.grad = gradient = view.copy_(gradient)
                self._held = None
                group.held[name] = gradient
                if self._measure and len(group.held) == len(group.parameters):
                    group.first = group.square()  # before later passes add, and before it is sent
            elif gradient is not held:
                raise _not_ours(name)
            if self._armed:
                group.pending.discard(name)
                if not self._alone:
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
        weights[name], names[weight] = weight, name
    trained = [(name, weight) for name, weight in named if weight.requires_grad]
    apart = set(exact)
    first = [(name, weight) for name, weight in trained if weight not in apart]
    last = [(name, weight) for name, weight in trained if weight in apart]
    sizes = [weight.numel() * weight.element_size() for _, weight in first]
    groups = [first[numbers.start : numbers.stop] for numbers in grouping(sizes)]
    return [*groups, last] if last else groups


def _with_buffer(parameters: dict[str, nn.Parameter], *, dtype: torch.dtype | None) -> _Group:
    kinds = {(weight.dtype, weight.device) for weight in parameters.values()}
    if len(kinds) > 1:
        raise ValueError(f"parameters of different types or devices in one group: {kinds}")
    own_dtype, device = kinds.pop()
    sizes = [weight.numel() for weight in parameters.values()]
    buffer = torch.zeros(sum(sizes), dtype=own_dtype, device=device)
    parts = zip(parameters.items(), buffer.split(sizes), strict=True)
    views = {
        name: part.as_strided(weight.size(), weight.stride(), part.storage_offset())
        if torch.ops.aten.is_non_overlapping_and_dense(weight)
        else part.view_as(weight)
        for (name, weight), part in parts
    }
    sent = buffer if dtype in {None, own_dtype} else torch.zeros_like(buffer, dtype=dtype)
    return _Group(parameters, buffer, views, sent)


def _all_finite(numbers: Sequence[Tensor]) -> Tensor:
    finite: Tensor = torch.linalg.vector_norm(torch.stack(tuple(numbers)), math.inf) < math.inf
    return finite


def _not_ours(name: str) -> ValueError:
    return ValueError(
        f"the gradient of {name} is no longer the reducer's; use Reducer.zero, not "
        "zero_grad(set_to_none=True)"
    )
