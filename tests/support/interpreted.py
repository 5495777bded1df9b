"""BatchNorm's kernels without a GPU: Triton's interpreter runs them."""

import pytest
import torch

from largebatch import proof
from largebatch.models import kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(name="kernels_run")
def run_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use the kernels; for tensors of the CPU in small parts, so that there are several."""
    pytest.importorskip("triton", reason="Triton, whose interpreter runs the kernels")
    monkeypatch.setitem(proof.KERNEL_DEVICES, proof.BATCHNORM, {"cpu", "cuda"})
    monkeypatch.setitem(proof.DECISIONS, (proof.BATCHNORM, DEVICE), None)
    fused = kernels.batchnorm()
    for name, number in (("PARTS", 8), ("TILE", 1024), ("CHUNK", 4)) * (DEVICE.type == "cpu"):
        monkeypatch.setattr(fused, name, number)
    assert kernels.take(torch.zeros(1, 1, device=DEVICE))


@pytest.fixture(name="kernels_in_graphs")
def wrap_kernels(kernels_run: None) -> None:
    """Skip a test whose kernels are interpreted and in a graph if torch refuses that."""
    try:
        torch.library.wrap_triton(kernels.batchnorm().kernels.statistics)
    except RuntimeError as problem:
        pytest.skip(f"torch {torch.__version__}: {problem}")
