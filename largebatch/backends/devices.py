"""Which device a worker computes on."""

import torch

from largebatch.errors import BackendError


def pick_device(local_rank: int, local_size: int) -> torch.device:
    """Return this worker's own GPU, or the CPU where there is none, and make it the current one.

    Raises BackendError where a machine has GPUs, but fewer than workers.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_size > torch.cuda.device_count():
        raise BackendError(
            f"{local_size} workers on a machine with {torch.cuda.device_count()} GPU; start as "
            "many workers as GPUs, or set CUDA_VISIBLE_DEVICES= to compute on the CPU"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device
