"""The device that computes: everything that is asked of a GPU, of any vendor, is asked here.

`torch.accelerator` serves NVIDIA's, AMD's and Intel's GPUs by the same calls. Only what CUDA alone
has is asked elsewhere: DALI, apex and NCCL.
"""

from contextlib import AbstractContextManager, nullcontext, suppress

import torch

CPU = torch.device("cpu")


def kind() -> torch.device | None:
    """Return the kind of accelerator of this machine, without an index; None where there is none.

    Apple's GPUs are not counted: they have no float64, which moments and norms are summed in.
    """
    found = torch.accelerator.current_accelerator(check_available=True)
    return None if found is None or found.type == "mps" else found


def count() -> int:
    """Return how many accelerators this process sees."""
    return 0 if kind() is None else torch.accelerator.device_count()


def current() -> torch.device:
    """Return the accelerator that this process uses at present, else the CPU."""
    found = kind()
    if found is None:
        return CPU
    return torch.device(found.type, torch.accelerator.current_device_index())


def choose(number: int) -> torch.device:
    """Make accelerator `number` the current one and return it."""
    torch.accelerator.set_device_index(number)
    return current()


def names() -> list[str]:
    """Return the name of each accelerator that this process sees."""
    found = kind()
    if found is None:
        return []
    module = torch.get_device_module(found)
    return [str(module.get_device_name(number)) for number in range(count())]


def memory_bytes() -> int:
    """Return how much memory the first accelerator has."""
    found = kind()
    assert found is not None
    return int(torch.get_device_module(found).get_device_properties(0).total_memory)


def uuid(device: torch.device) -> str | None:
    """Return what tells an accelerator from all others of all machines; None: nothing does."""
    if not is_remote(device):
        return None
    properties = torch.get_device_module(device).get_device_properties(device)
    found = getattr(properties, "uuid", None)
    return None if found is None else str(found)


def visible_devices_variable() -> str:
    """Return the environment variable that chooses what a process sees of a machine's GPUs.

    AMD's GPUs obey CUDA's too.
    """
    found = kind()
    is_intel = found is not None and found.type == "xpu"
    return "ZE_AFFINITY_MASK" if is_intel else "CUDA_VISIBLE_DEVICES"


def is_remote(device: torch.device) -> bool:
    """Return whether a device has memory of its own, and works while the host goes on."""
    return device.type != "cpu"


def stream(device: torch.device) -> torch.Stream | None:
    """Return a new stream of an accelerator; None for a CPU, which has none."""
    return torch.Stream(device) if is_remote(device) else None


def on(stream: torch.Stream | None) -> AbstractContextManager[object]:
    """Return a context that queues operations on `stream`; on the current one if it is None."""
    return stream or nullcontext()


def event(device: torch.device, *, enable_timing: bool = False) -> torch.Event:
    """Return an event, recorded in the current stream of an accelerator."""
    made = torch.Event(device, enable_timing=enable_timing)
    made.record()
    return made


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all that was asked of it. For measurements and disasters."""
    if is_remote(device):
        torch.accelerator.synchronize(device)


def seed(number: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of one device.

    torch.manual_seed takes half a millisecond without a GPU: for every kind of device that is not
    there it notes the call with the whole stack.
    """
    torch.default_generator.manual_seed(number)
    if is_remote(device):
        torch.get_device_module(device).manual_seed(number)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory of an accelerator that tensors have taken so far."""
    return int(torch.get_device_module(device).max_memory_allocated(device))


def usage(device: torch.device) -> tuple[float, float]:
    """Return percent of the time in which a GPU worked, and its memory in use, in bytes.

    NaN for what its vendor's library, such as NVML, does not tell.
    """
    found = [float("nan")] * 2
    if is_remote(device):
        module = torch.get_device_module(device)
        for place, name in enumerate(("utilization", "device_memory_used")):
            with suppress(Exception):  # no library, or no such number of a part of a GPU
                found[place] = float(getattr(module, name)(device))
    return found[0], found[1]
