"""Compile the Triton kernels for an architecture of NVIDIA's, which needs no GPU.

python compile_kernels.py 90
"""

import re
import subprocess
import sys
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import torch
import triton
from torch import Tensor
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from largebatch import accelerator, proof
from largebatch.data.decoders import pixel_cache
from largebatch.data.types import Request, View
from largebatch.models.kernels import batchnorm_launches as launches_of_batchnorm
from largebatch.optim.kernels import GroupRule
from largebatch.optim.kernels.table import TensorTable

_TYPES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.uint8: "*u8",
}


def compiled(kernel: Any, target: GPUTarget, args: tuple[object, ...], constants: Any) -> str:  # noqa: ANN401 -- Triton is untyped
    """Return the PTX that a launch with these arguments would compile."""
    names = kernel.arg_names
    signature: dict[str, str] = dict.fromkeys(names, "constexpr")
    values = {(names.index(name),): value for name, value in constants.items()}
    attributes: dict[tuple[int], object] = {}
    for number, value in enumerate(args):
        if kernel.params[number].do_not_specialize:
            signature[names[number]] = "i32"
            continue
        if isinstance(value, int) and value == 1:
            values[(number,)] = 1
            continue
        if isinstance(value, Tensor):
            signature[names[number]] = _TYPES[value.dtype]
        else:
            signature[names[number]] = "fp64" if isinstance(value, float) else "i32"  # inductor's
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[(number,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, values, attributes)
    binary = triton.compile(source, target=target, options={"num_warps": 8}).asm
    ptx: str = binary["ptx"]
    most = 168 if constants.get("WHOLE") else 128  # 128: a multiprocessor runs two programs
    assert registers(binary["cubin"]) <= most, f"{kernel.__name__} takes too many registers"
    return ptx


def registers(binary: bytes) -> int:
    """Return the registers of a thread."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"REG:(\d+)", found)[0])


def main() -> None:
    """Compile what a bfloat16 layer with a sum and a ReLU launches, an update of LARS, a crop."""
    launches: dict[str, tuple[Any, tuple[object, ...], dict[str, object]]] = {}

    def launch(kernel: Any, grid: object, *args: object, **constants: object) -> None:  # noqa: ANN401 -- Triton is untyped
        name = kernel.__name__ + (" of whole spans" if constants.get("WHOLE") else "")
        launches[name] = kernel, args, constants

    accelerator.launch = launch
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    launches_of_batchnorm.PARTS = 1
    x = torch.randn(4, 72, 16, 16).bfloat16().to(memory_format=torch.channels_last)
    affine = torch.rand(2, 72).requires_grad_()
    sums = torch.zeros(2, 72)
    for launches_of_batchnorm.WHOLE in (True, False):
        for other in (None, x.clone()):
            leaf = x.clone().requires_grad_()
            out, _ = launches_of_batchnorm.normalise(
                leaf, other, *affine, eps=1e-5, span=2, relu=True, sums=sums
            )
            out.backward(x)
    launches_of_batchnorm.moments(x, 2)
    weight = torch.ones(64)
    short = torch.ones(64).bfloat16()
    rule = GroupRule(
        momentum=0.9,
        decay=0.1,
        ratio_decay=0.1,
        eta=1.0,
        eps=0.0,
        into=1.0,
        out=1.0,
        ratio="inside",
    )
    table = TensorTable([weight], [short], [weight.clone()], [short], [0])
    table.norms(torch.ones(()))
    table.update([rule], torch.ones(()), torch.zeros(()))
    proof.KERNEL_DEVICES[proof.CROPS] = {"cpu"}
    proof.decide(torch.device("cpu"), {proof.CROPS: None})
    uploaded = pixel_cache.Uploaded(np.arange(2), torch.zeros(2, 32, 32, 3).byte())
    view = View(image_size=32, mean=(0.5,) * 3, std=(0.2,) * 3, interpolation="bilinear")
    request = Request(np.arange(2), np.array([[0, 0, 32, 32]] * 2), np.zeros(2, dtype=np.bool_))
    list(pixel_cache.decode_on_device(uploaded, view, [request]))
    code = {
        name: compiled(kernel, target, args, constants)
        for name, (kernel, args, constants) in launches.items()
    }
    rows = {name for name in code if name.startswith(("normalise_rows", "gradient_rows"))}
    assert len(rows) == 4
    for name in {"statistics", "gradient_sums", "norms", "update", *rows}:
        assert "ld.global.v4" in code[name], f"{name} does not read 16 bytes at once"
    for name in {"update", *rows}:
        assert "cvt.rn.bf16" in code[name], f"{name} does not round to nearest"
    divides = re.search(r"div\.rn(\.ftz)?\.f32", code["cut_out"])
    assert divides, "cut_out does not divide as PyTorch does"
    print(len(code), "kernels")


if __name__ == "__main__":
    main()
