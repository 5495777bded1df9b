"""A fake of Horovod for the unit tests of its backend."""

from types import ModuleType

import torch
from torch import Tensor


class FakeHorovod(ModuleType):
    """`horovod.torch` as worker 1 of 2 sees it, worker 0 sending the same tensors.

    It is as strict as the real one: a sum is there only after `synchronize`, a name under way
    twice and a bfloat16 or strided tensor are refused.
    """

    class HorovodInternalError(RuntimeError):
        """The real module's exception for any failure between workers."""

    Sum = 1
    global_process_set: tuple[int, ...] = (0, 1)

    def __init__(self) -> None:
        super().__init__("horovod.torch")
        self.names: list[str] = []
        self.under_way: dict[int, tuple[str, Tensor, int]] = {}
        self.process_sets = {self.global_process_set}
        self.failure: str | None = None
        self.built_for_gpu = False
        self.running = False

    def is_initialized(self) -> bool:
        return self.running

    def init(self, *, process_sets: str | None) -> None:
        assert process_sets in {"dynamic", None}
        self.running = True

    def shutdown(self) -> None:
        self.running = False

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2

    def local_rank(self) -> int:
        return 0

    def local_size(self) -> int:
        return 1

    def cuda_built(self) -> bool:
        return self.built_for_gpu

    def rocm_built(self) -> bool:
        return False

    def add_process_set(self, process_set: list[int]) -> object:
        self._maybe_fail()
        if tuple(process_set) in self.process_sets:
            raise ValueError(f"Attempted to add a duplicate process set: {process_set}")
        self.process_sets.add(tuple(process_set))
        return tuple(process_set)

    def allreduce_async_(
        self, tensor: Tensor, *, name: str, op: int, process_set: tuple[int, ...]
    ) -> int:
        assert op == self.Sum
        self._check(tensor, name, process_set)
        if name in (taken for taken, _, _ in self.under_way.values()):
            raise ValueError("Requested to allreduce a tensor with the same name as another")
        self.under_way[len(self.names)] = (name, tensor, len(process_set))
        return len(self.names)

    def synchronize(self, handle: int) -> Tensor:
        self._maybe_fail()
        _, tensor, workers = self.under_way.pop(handle)
        return tensor.mul_(workers)

    def broadcast_(self, tensor: Tensor, *, root_rank: int, name: str) -> Tensor:
        assert root_rank == 0
        self._check(tensor, name, self.global_process_set)
        return tensor.fill_(7)

    def allgather(self, tensor: Tensor, *, name: str, process_set: tuple[int, ...]) -> Tensor:
        self._check(tensor, name, process_set)
        return torch.cat([tensor] * len(process_set))

    def reducescatter(
        self, tensor: Tensor, *, name: str, op: int, process_set: tuple[int, ...]
    ) -> Tensor:
        assert op == self.Sum
        self._check(tensor, name, process_set)
        mine = tensor.chunk(len(process_set))[process_set.index(self.rank())]
        return mine * len(process_set)

    def barrier(self) -> None:
        self._maybe_fail()

    def _check(self, tensor: Tensor, name: str, process_set: tuple[int, ...]) -> None:
        self._maybe_fail()
        assert process_set in self.process_sets
        assert self.rank() in process_set
        self.names.append(name)
        if tensor.dtype in {torch.bfloat16, torch.bool}:
            raise ValueError(f"Tensor type {tensor.type()} is not supported.")
        if not tensor.is_contiguous():
            raise ValueError("Tensor is required to be contiguous.")

    def _maybe_fail(self) -> None:
        if self.failure:
            raise self.HorovodInternalError(self.failure)
