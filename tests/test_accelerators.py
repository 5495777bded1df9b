"""Accelerators of any vendor, behind one module."""

import re
from pathlib import Path

import accelerator as simulated
import torch
from on_forked_workers import on_forked_workers

import largebatch
from largebatch import accelerator

CUDA_ALONE = {
    "accelerator.py",
    "data/decoders/dali.py",
    "optim/kernels/apex.py",
}
"""Modules of what only CUDA has, and the one that asks for devices."""


def test_no_other_module_names_a_vendor() -> None:
    package = Path(largebatch.__file__).parent
    named = re.compile(r"""torch\.(cuda|xpu|hip)\b|["'](cuda|xpu)\b|\.is_cuda\b""")
    found = {
        str(file.relative_to(package))
        for file in package.rglob("*.py")
        if named.search(file.read_text(encoding="utf-8"))
    }
    assert found <= CUDA_ALONE, found - CUDA_ALONE


def asked() -> dict[str, object]:
    """Return every property of a simulated accelerator."""
    device = simulated.simulate()
    kind = accelerator.kind()
    assert kind is not None
    with accelerator.on(accelerator.stream(device)):
        accelerator.event(device, enable_timing=True).synchronize()
    accelerator.seed(3, device)
    accelerator.synchronize(device)
    return {
        "kind": kind.type,
        "count": accelerator.count(),
        "current": str(accelerator.current()),
        "chosen": str(accelerator.choose(0)),
        "names": accelerator.names(),
        "remote": accelerator.is_remote(device),
        "memory": accelerator.memory_bytes(),
        "peak": accelerator.peak_memory_bytes(device),
        "seeded": simulated.SEEDS[3],
        "drawn": torch.rand(1).item() == torch.rand(1, generator=generator(3)).item(),
    }


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_an_accelerator_of_any_vendor_is_used() -> None:
    assert on_forked_workers(asked, workers=1) == {
        "kind": "sim",
        "count": simulated.NUM_DEVICES,
        "current": "sim:0",
        "chosen": "sim:0",
        "names": ["simulated"] * simulated.NUM_DEVICES,
        "remote": True,
        "memory": simulated.MEMORY,
        "peak": 0,
        "seeded": 1,
        "drawn": True,
    }


def test_a_machine_without_one_computes_on_the_cpu() -> None:
    if torch.accelerator.is_available():
        return
    assert accelerator.kind() is None
    assert accelerator.count() == 0
    assert accelerator.names() == []
    assert accelerator.current() == accelerator.CPU
    assert accelerator.stream(accelerator.CPU) is None
    with accelerator.on(None):
        accelerator.synchronize(accelerator.CPU)
