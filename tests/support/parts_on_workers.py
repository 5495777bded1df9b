"""Polish and evaluate on each of two workers, with models and batches in every form.

    horovodrun -np 2 --gloo python parts_on_workers.py FOLDER

Each worker writes its results to FOLDER/<rank>.pt, by the name of the case. The connection of the
workers is opened and closed here, as in a user's program: no backend of the package is named.
"""

import faulthandler
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from documents import blocks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, update_bn

from largebatch.models import with_span
from largebatch.optional import require_torchvision
from largebatch.polish import polish
from largebatch.training import evaluate

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "parts.md"
SIZES = (4, 3, 1, 5, 7)
"""Images in each batch. Worker 0 holds the first four batches, worker 1 the last."""

SPAN = 2
Pairs = list[tuple[Tensor, Tensor]]


Case = dict[str, Any]


class Network(nn.Sequential):
    """The compiler skips a forward that is torch's own."""

    def forward(self, values: Tensor) -> Tensor:
        for layer in self:
            values = layer(values)
        return values


def network() -> Network:
    torch.manual_seed(0)
    body = [nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout()]
    return Network(*body, nn.Flatten(), nn.Linear(36, 7)).double()


def data() -> Pairs:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(sum(SIZES), 3, 5, 5, dtype=torch.float64, generator=generator)
    images = images * torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1) + torch.arange(len(images)).view(
        -1, 1, 1, 1
    )
    labels = torch.arange(len(images)) % 7
    return list(zip(images.split(SIZES), labels.split(SIZES), strict=True))


def share() -> Pairs:
    return data()[:4] if rank() == 0 else data()[4:]


def rank() -> int:
    """Return the rank that either launcher sets in the environment."""
    return int(os.environ.get("RANK", os.environ.get("HOROVOD_RANK", "0")))


def train(model: nn.Module, optimizer: Any, *, steps: int = 2) -> None:  # noqa: ANN401 -- Schedule-Free is one by shape
    """Make some updates on this worker's own images, so that running statistics differ."""
    images, labels = share()[-1]
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


class ScheduleFree:
    """Schedule-Free SGD (Defazio et al. 2024, arXiv:2405.15682, equations 2 to 4), lr constant."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, beta: float = 0.9) -> None:
        self.weights = list(parameters)
        self.lr = lr
        self.beta = beta
        self.steps = 0
        self.x = [weight.detach().clone() for weight in self.weights]
        self.z = [weight.detach().clone() for weight in self.weights]

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        for weight, x, z in zip(self.weights, self.x, self.z, strict=True):
            assert weight.grad is not None
            z.sub_(weight.grad, alpha=self.lr)
            x.lerp_(z, 1 / self.steps)
        self.train()

    @torch.no_grad()
    def train(self) -> None:
        for weight, x, z in zip(self.weights, self.x, self.z, strict=True):
            weight.copy_(torch.lerp(z, x, self.beta))

    @torch.no_grad()
    def eval(self) -> None:
        for weight, x in zip(self.weights, self.x, strict=True):
            weight.copy_(x)


def own_statistics(model: nn.Module) -> nn.Module:
    """Return a model with statistics of this worker's images and the common weights."""
    with torch.no_grad():
        model(share()[0][0])
    return model


def parallel() -> DistributedDataParallel:
    model = DistributedDataParallel(network())
    train(model, sgd(model))
    return model


def compiled(model: nn.Module) -> nn.Module:
    """Return the model compiled in one graph, and used, so that the compiler has seen it."""
    whole: Any = torch.compile(model, backend="eager", fullgraph=True)
    own_statistics(whole)
    return whole  # type: ignore[no-any-return]  # torch's stubs


def compiled_in_place() -> nn.Module:
    model = network()
    model.compile(backend="eager", fullgraph=True)
    return own_statistics(model)


def averaged(*, wrapped: bool) -> nn.Module:
    """Train a parallel model; return the average of it, or of the module inside."""
    model = DistributedDataParallel(network())
    source = model if wrapped else model.module
    average = AveragedModel(source)
    for _ in range(2):
        train(model, sgd(model), steps=1)
        average.update_parameters(source)
    return average


def averaged_by_timm() -> nn.Module:
    require_torchvision()
    from timm.utils.model_ema import ModelEmaV3

    model = parallel().module
    average: nn.Module = ModelEmaV3(network(), decay=0.5)
    average.update(model)  # type: ignore[operator]  # timm has no types
    return average


def schedule_free() -> nn.Module:
    model = DistributedDataParallel(network())
    optimizer = ScheduleFree(model.parameters(), lr=0.01)
    train(model, optimizer, steps=3)
    trained = next(model.parameters()).clone()
    optimizer.eval()
    assert not trained.equal(next(model.parameters()))
    return model


def compiled_parallel() -> nn.Module:
    model = torch.compile(DistributedDataParallel(network()), backend="eager")
    assert isinstance(model, nn.Module)
    train(model, sgd(model))
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: own_statistics(network()),
    "SyncBatchNorm": lambda: nn.SyncBatchNorm.convert_sync_batchnorm(network()),
    "span": lambda: with_span(network(), SPAN),
    "compiled": lambda: compiled(network()),
    "compiled in place": compiled_in_place,
    "averaged": lambda: AveragedModel(own_statistics(network())),
    "compiled averaged": lambda: compiled(AveragedModel(network())),
}
"""What needs no process group of torch.distributed."""

HOROVOD = ["plain", "span", "averaged"]

PARALLEL: dict[str, Callable[[], nn.Module]] = {
    "parallel": parallel,
    "parallel compiled": lambda: DistributedDataParallel(compiled(network())),
    "compiled parallel": compiled_parallel,
    "average of parallel": lambda: averaged(wrapped=True),
    "average of what is inside": lambda: averaged(wrapped=False),
    "timm's average": averaged_by_timm,
    "Schedule-Free": schedule_free,
}


def reshaped(kind: str, batches: Pairs) -> list[Any]:
    """Return the batches as other loaders give them."""
    match kind:
        case "lists with more":
            return [
                [images, labels, torch.arange(len(labels)), "path"] for images, labels in batches
            ]
        case "image, label":
            return [{"path": "x", "label": labels, "image": images} for images, labels in batches]
        case "pixel_values, labels":
            return [{"pixel_values": images, "labels": labels} for images, labels in batches]
        case "images alone":
            return [images for images, _ in batches]
        case _:
            return batches if rank() == 0 else []


BATCHES = [
    "lists with more",
    "image, label",
    "pixel_values, labels",
    "images alone",
    "worker 0's, and none",
]


def measured(model: nn.Module, batches: list[Any] | None = None, **how: Any) -> Case:  # noqa: ANN401
    """Polish with these batches, then evaluate; return what either found and left."""
    batches = share() if batches is None else batches
    modes = [module.training for module in model.modules()]
    layers = [layer.name for layer in polish(model, batches, **how)]
    state = plain_state(model)
    labelled = share() if batches and isinstance(batches[0], Tensor) else batches
    found = evaluate(model, labelled)
    metrics = {key: getattr(found, key) for key in ("top1", "top5", "loss", "samples")}
    assert modes == [module.training for module in model.modules()]
    return {"state": state, "layers": layers, "metrics": metrics}


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors under the names of the plain network, without the wrappers'."""
    names = {
        name: name.replace("_orig_mod.", "").replace("module.", "") for name in model.state_dict()
    }
    state = {names[name]: value.clone() for name, value in model.state_dict().items()}
    state.pop("n_averaged", None)
    return state


def polished_after_update_bn() -> tuple[dict[str, Tensor], Case]:
    """What PyTorch's own pass leaves on this worker, and what ours makes of it."""
    model = AveragedModel(parallel().module)
    update_bn((images for images, _ in share()), model)
    return plain_state(model), measured(model)


def refusals_of_sharded_models() -> list[str]:
    """Return what polish and evaluate raise for FSDP1, FSDP2 and tensor parallelism."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    divided = parallelize_module(network(), mesh, {"6": ColwiseParallel()})
    models: list[Any] = [
        FullyShardedDataParallel(network(), device_id=torch.device("cpu")),
        fully_shard(network(), mesh=mesh),
        divided,
    ]
    found = []
    for model in models:
        for use in (polish, evaluate):
            with pytest.raises(ValueError, match="copy") as caught:
                use(model, share())
            found.append(str(caught.value))
    return found


def run_the_page() -> list[str]:
    """Run every block of the page, the first of which opens the process group.

    Return the headings.
    """
    require_torchvision()
    if find_spec("schedulefree") is None:
        stand_in = ModuleType("schedulefree")
        vars(stand_in)["SGDScheduleFree"] = ScheduleFree
        sys.modules["schedulefree"] = stand_in
    headings = []
    sections = PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    for section in sections:
        heading, _, rest = section.partition("\n")
        code = rest.partition("```python\n")[2].partition("\n```")[0]
        assert code.count("\n") <= 12, heading
        exec(compile(code, f"{PAGE}, {heading}", "exec"), names_of_the_page())
        headings.append(heading)
    for block in blocks(ROOT / "README.md", "python"):
        exec(compile(block.text, str(block.page), "exec"), names_of_the_page())
    return headings


def names_of_the_page() -> dict[str, Any]:
    """Return what the page takes for granted; each worker has other clean images."""
    torch.manual_seed(0)
    labels = torch.arange(16) % 10
    loader = list(zip(torch.randn(16, 3, 32, 32).split(8), labels.split(8), strict=True))
    clean = [(images + rank(), labels) for images, labels in loader]

    def update(model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor]) -> None:  # noqa: ANN401
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    def train(model: nn.Module, optimizer: Any) -> None:  # noqa: ANN401
        for batch in loader:
            update(model, optimizer, batch)

    torch.manual_seed(0)
    body = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    names = {"torch": torch, "model": nn.Sequential(*body, nn.Linear(4, 10)), "train": train}
    val_set = torch.utils.data.TensorDataset(torch.zeros(23, 3, 32, 32), torch.arange(23) % 10)
    return names | {
        "update": update,
        "loss_fn": F.cross_entropy,
        "train_loader": loader,
        "clean_loader": clean[rank() :],  # two batches and one
        "val_set": val_set,
        "val_loader": [next(iter(torch.utils.data.DataLoader(val_set, 23)))],
    }


def under_horovod() -> dict[str, Any]:
    """Some of what needs no process group; Horovod stays as it was, and is the user's to end."""
    import horovod.torch as hvd

    hvd.init()
    found: dict[str, Any] = {name: measured(MODELS[name]()) for name in HOROVOD}
    assert hvd.is_initialized()
    assert hvd.allreduce(torch.tensor(rank()), op=hvd.Sum).item() == 1
    hvd.shutdown()
    return found


def under_torch() -> dict[str, Any]:
    """Everything; the process group that the page opened stays as it was until the end."""
    headings = run_the_page()
    found: dict[str, Any] = {name: measured(make()) for name, make in (MODELS | PARALLEL).items()}
    found |= {kind: measured(network(), reshaped(kind, share())) for kind in BATCHES}
    found["update_bn"], found["after update_bn"] = polished_after_update_bn()
    found["sharded"] = refusals_of_sharded_models()
    total = torch.tensor(rank())
    dist.all_reduce(total)
    assert total.item() == 1
    found["page"] = headings
    dist.destroy_process_group()
    return found


def work(folder: Path) -> None:
    """Run this worker's cases and write the results; warnings are errors."""
    faulthandler.dump_traceback_later(240, exit=True)  # workers may deadlock
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    works = under_horovod if "HOROVOD_RANK" in os.environ else under_torch
    torch.save(works(), folder / f"{rank()}.pt")


if __name__ == "__main__":
    work(Path(sys.argv[1]))
