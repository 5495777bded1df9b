"""The update of all tensors of a GPU in two launches: norms, if any ratio needs them, and update.

A table of the tensors' addresses is on the device, and so are the numbers of their groups (rates,
momentum, ...), so that a CUDA graph can replay both launches. Weights are float32; a float16 or
bfloat16 weight is updated through its float32 master, and its copy is written in the same pass.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from largebatch import accelerator
from largebatch.optim.kernels import GroupRule, Tensors
from largebatch.optim.kernels.numbers import Numbers, pinned

CHUNK = 4096
"""Elements of a program, of which a multiprocessor of an H100 runs two at the same time or more."""

SUMS = 256
"""Most sums of squares of a tensor, because each of its programs adds them all."""

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_PLACES = {"none": 0.0, "inside": 1.0, "outside": 2.0}
_ALIGNMENT = 16  # bytes of a load of several elements; its address and length must be multiples


class TensorTable:
    """Tensors that are updated together, on one device.

    Each of `rounded` is the float16 or bfloat16 copy of a weight, or the weight itself, and has the
    type of its gradient. All tensors of a weight have its shape and strides, without gaps; `groups`
    has the number of its rule.
    """

    def __init__(
        self,
        weights: Tensors,
        grads: Tensors,
        buffers: Tensors,
        rounded: Tensors,
        groups: Sequence[int],
    ) -> None:
        sizes = [weight.numel() for weight in weights]
        counts = [-(-size // CHUNK) for size in sizes]
        # A tensor of more than SUMS chunks has one sum for every few of them, because each program
        # of the update reads all sums of its tensor.
        steps = [-(-count // SUMS) for count in counts]
        sums = [-(-count // step) for count, step in zip(counts, steps, strict=True)]
        firsts = list(accumulate(sums, initial=0))
        kinds = [_KINDS[copy.dtype] for copy in rounded]
        columns = [
            [tensor.data_ptr() for tensor in tensors]
            for tensors in (weights, buffers, rounded, grads)
        ]
        self._device = weights[0].device
        self._num = len(weights)
        self._num_chunks = sum(counts)
        self._aligned = _are_aligned(chain(*columns[:3], (2 * size for size in sizes)))
        chunks = [[i, j * CHUNK] for i, count in enumerate(counts) for j in range(count)]
        rows = [list(row) for row in zip(sizes, kinds, groups, steps, firsts, strict=False)]
        self._chunks = self._send(chunks)
        self._tensors = self._send(rows)
        self._addresses = self._send(columns)
        self._grads: Sequence[int] = columns[3]
        self._grads_are_aligned = _are_aligned(self._grads)
        self._squares = torch.empty(firsts[-1], 2, dtype=torch.float64, device=self._device)
        self._num_groups = max(groups) + 1
        self._numbers = Numbers(self._device)
        self._ratios = torch.empty(self._num, dtype=torch.float64, device=self._device)

    def use_grads(self, addresses: Sequence[int]) -> None:
        """Read the gradients from these addresses from now on."""
        # A graph would copy this list at every replay, after its memory is gone.
        if addresses != self._grads and not accelerator.is_recording():
            source = pinned(addresses, self._device, torch.int64)
            self._addresses[3].copy_(source, non_blocking=True)
            self._grads = addresses
            self._grads_are_aligned = _are_aligned(addresses)

    def use(self, rules: Sequence[GroupRule]) -> Tensor:
        """Take the numbers of these rules from now on, and return them; see Numbers."""
        # later groups have no tensors
        return self._numbers.use([_numbers(rule) for rule in rules[: self._num_groups]])

    def norms(self, scale: Tensor | None = None) -> Tensor:
        """Compute the norms for `update`, and return all sums of squares of gradients / `scale`."""
        from largebatch.optim.kernels import triton_lars

        self._run(triton_lars.norms, scale)
        return self._squares[:, 1]

    def update(
        self,
        rules: Sequence[GroupRule],
        scale: Tensor | None = None,
        found_inf: Tensor | None = None,
    ) -> Tensor:
        """Update weights and buffers, and return the ratio of each weight, 1 if its rule has none.

        The ratios are those of the last `norms`, and in the same memory after every update.
        Gradients are divided by `scale`. Nothing else changes if `found_inf` is not 0.
        """
        from largebatch.optim.kernels import triton_lars

        numbers = self.use(rules)
        skips = found_inf is not None
        pointer = found_inf if skips else numbers  # a kernel takes no None; it does not read this
        self._run(triton_lars.update, scale, numbers, self._ratios, pointer, SUMS=SUMS, SKIPS=skips)
        return self._ratios

    def _run(self, kernel: object, scale: Tensor | None, *more: object, **constants: int) -> None:
        accelerator.launch(
            kernel,
            (self._num_chunks,),
            *(self._chunks, self._tensors, self._addresses, self._squares, self._num),
            *(self._squares if scale is None else scale, *more),
            SCALED=scale is not None,
            ALIGNED=self._aligned and self._grads_are_aligned,
            CHUNK=CHUNK,
            **constants,
        )

    def _send(self, numbers: list[list[int]]) -> Tensor:
        return pinned(numbers, self._device, torch.int64).to(self._device, non_blocking=True)


def _are_aligned(addresses: Iterable[int]) -> bool:
    return all(address % _ALIGNMENT == 0 for address in addresses)


def _numbers(rule: GroupRule) -> list[float]:
    return [
        *(rule.momentum, rule.decay, rule.ratio_decay, rule.eta, rule.eps, rule.into, rule.out),
        _PLACES[rule.ratio],
        math.inf if rule.clip_ratio is None else rule.clip_ratio,
        math.inf if rule.clip_gradient is None else rule.clip_gradient,
        float(rule.nesterov),
    ]
