"""Compilation of a model's forward and backward pass by torch.compile.

Random numbers are those of the uncompiled model, so that dropout draws the same masks. Every batch
shape gets its own graph. All gradients of a graph are ready at its end: their sums over workers no
longer overlap with the backward pass.
"""

import os

import torch
from torch import nn

from largebatch.errors import RecipeError
from largebatch.models import kernels
from largebatch.models.batchnorm import SpanBatchNorm
from largebatch.recipe.choices import Compile

_MOST_GRAPHS = 256
"""Maximum number of graphs of one model, above the 100 image sizes that a recipe may have;
PyTorch's default is 8, after which a model runs uncompiled."""


def compile_model(
    model: nn.Module, mode: Compile, device: torch.device, *, shares_spans: bool
) -> None:
    """Compile the forward pass of the model in place; parameters and buffers keep their names.

    `shares_spans` is True if several workers share a BatchNorm span: these layers exchange moments,
    so they stay uncompiled and divide the model into several graphs.

    Raises RecipeError if there is no compiler for the device.
    """
    if not mode:
        return
    require_compiler(device)
    torch._dynamo.config.recompile_limit = max(_MOST_GRAPHS, torch._dynamo.config.recompile_limit)
    layers = [layer for layer in model.modules() if isinstance(layer, SpanBatchNorm)]
    if layers:
        kernels.works(device)  # a graph does not try them
    if shares_spans:
        for layer in layers:
            layer.leave_graphs()
    # CUDA graphs are ours: they hold the whole update (training/graph.py).
    without = {True: "default", "reduce-overhead": "default"}
    without["max-autotune"] = "max-autotune-no-cudagraphs"
    options = torch._inductor.list_mode_options(without.get(mode, mode))
    # Module.compile does not trace a model that is an nn.Sequential.
    model.forward = torch.compile(
        model.forward, dynamic=False, options={**options, "fallback_random": True}
    )


def require_compiler(device: torch.device) -> None:
    """Raise RecipeError if there is no compiler for the device."""
    import torch._dynamo
    import torch._inductor.cpp_builder
    import torch._inductor.exc
    from torch.utils._triton import has_triton

    if device.type == "cpu":
        try:
            torch._inductor.cpp_builder.get_cpp_compiler()
        except torch._inductor.exc.InvalidCxxCompiler:
            named = os.environ.get("CXX")
            problem = f"CXX={named} does not work" if named else "none was found"
            raise RecipeError(
                f"execution.compile: a CPU needs a C++ compiler; {problem}; install g++ or set CXX"
            ) from None
    elif not has_triton():
        raise RecipeError("execution.compile: a GPU needs Triton; install it, or remove compile")
