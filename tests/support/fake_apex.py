"""The kernels of NVIDIA's `amp_C` that LARS uses, with their signatures, in plain torch.

After apex's csrc/amp_C_frontend.cpp and the .cu files beside it. As those do, they walk through
memory: two tensors of one shape in different layouts would be mixed up.
"""

import torch
from torch import Tensor

Lists = list[list[Tensor]]


def multi_tensor_axpby(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, a: float, b: float, arg_to_check: int
) -> None:
    for x, y, out in zip(*checked(noop_flag, tensor_lists, depth=3), strict=True):
        out.copy_(a * x + b * y)


def multi_tensor_scale(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float
) -> None:
    for source, out in zip(*checked(noop_flag, tensor_lists, depth=2), strict=True):
        out.copy_(source * scale)


def multi_tensor_lamb_stage2_cuda(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    per_tensor_param_norm: Tensor,
    per_tensor_update_norm: Tensor,
    lr: float,
    weight_decay: float,
    use_nvlamb_python: bool | None,
) -> None:
    lists = checked(noop_flag, tensor_lists, depth=2)
    norms = zip(per_tensor_param_norm.tolist(), per_tensor_update_norm.tolist(), strict=True)
    for x, y, (p, u) in zip(*lists, norms, strict=True):
        scaled = (use_nvlamb_python or weight_decay != 0) and p != 0 and u != 0
        x.sub_((lr * p / u if scaled else lr) * y)


def checked(noop_flag: Tensor, tensor_lists: Lists, *, depth: int) -> Lists:
    """Refuse what multi_tensor_apply.cuh refuses; return every tensor as its memory in order."""
    assert (noop_flag.dtype, len(tensor_lists)) == (torch.int32, depth)
    assert len(tensor_lists[0]) > 0
    for together in zip(*tensor_lists, strict=True):
        for tensor in together:
            assert tensor.dtype == torch.float32
            assert 0 < tensor.numel() == together[0].numel()
            channels_last = tensor.is_contiguous(memory_format=torch.channels_last)
            assert tensor.is_contiguous() or channels_last, "A tensor was not contiguous."
    return [[tensor.as_strided((tensor.numel(),), (1,)) for tensor in one] for one in tensor_lists]
