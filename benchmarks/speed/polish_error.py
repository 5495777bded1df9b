"""Measure the error of the statistics pass of Final Polishing and of its peers.

    [LARGEBATCH_DATA=DIR] python -m benchmarks.speed.polish_error [--orders 5]

The peers, the network and the images are those of polish.py. The error of a running variance is
relative, that of a running mean in standard deviations: the largest of all channels of all layers,
against moments in float64 of what each layer is given in a plain forward pass through the same
batches. PyTorch's `update_bn` averages over batches, whatever their sizes, so its error depends on
how the images are divided: the last 16 of the 144 images of polish.py count as much as 64 others.
Fairer to it are equal batches, and many images, and their order should not be that of the classes:
shuffled ones have several orders.

With two workers of unequal shares ours are two processes over torch; the peers do not communicate,
so that a worker keeps its own statistics or somebody averages them. Writes
benchmarks/results/polish_error_<hardware>_<date>.json.
"""

import argparse
import copy
import importlib.metadata
import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from benchmarks.speed.measuring import on_two_workers, spread, write
from benchmarks.speed.polish import PEERS, PIXELS, Pairs, Pass, images, network, ours, plain, source
from largebatch.polish.statistics import polish

SHARE = 3
"""Number of batches per batch of the second worker."""

State = dict[str, Tensor]
RIVALS: dict[str, Pass] = {"ours": ours, **PEERS}


class Division(NamedTuple):
    """How the images of a pass are divided into batches."""

    number: int
    batch: int
    shuffled: bool


DIVISIONS = {
    "64, 64 and 16 images in the order of their classes": Division(144, 64, shuffled=False),
    "three times 48 images in the order of their classes": Division(144, 48, shuffled=False),
    "64, 64 and 16 shuffled images": Division(144, 64, shuffled=True),
    "three times 48 shuffled images": Division(144, 48, shuffled=True),
    "1,000 shuffled images in batches of 64": Division(1000, 64, shuffled=True),
    "1,000 shuffled images in batches of 50": Division(1000, 50, shuffled=True),
}


def batches_of(division: Division, order: int) -> Pairs:
    """Return the batches of a division, shuffled as the number of an order says."""
    pixels = torch.cat([pixels for pixels, _ in images(division.number, division.batch)])
    if division.shuffled:
        draw = torch.Generator().manual_seed(order)
        pixels = pixels[torch.randperm(len(pixels), generator=draw)]
    return [(part, torch.zeros(len(part)).long()) for part in pixels.split(division.batch)]


@torch.no_grad()
def exact(model: nn.Module, batches: Pairs) -> State:
    """Return the statistics in float64: first all means, then all squared deviations from them."""
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.BatchNorm2d)}
    counts = dict.fromkeys(layers, 0)
    means = {name: torch.zeros(m.num_features).double() for name, m in layers.items()}
    squares = copy.deepcopy(means)

    def add(name: str, values: Tensor) -> None:
        counts[name] += values.numel() // values.shape[1]
        means[name] += values.double().sum((0, 2, 3))

    def deviate(name: str, values: Tensor) -> None:
        squares[name] += (values.double() - means[name].view(-1, 1, 1)).square().sum((0, 2, 3))

    for look in (add, deviate):
        hooks = [
            layer.register_forward_pre_hook(
                lambda _, inputs, look=look, name=name: look(name, *inputs)
            )
            for name, layer in layers.items()
        ]
        plain(model, batches)
        for hook in hooks:
            hook.remove()
        if look is add:
            for name, count in counts.items():
                means[name] /= count
    state = {f"{name}.running_mean": mean for name, mean in means.items()}
    return state | {f"{name}.running_var": squares[name] / (counts[name] - 1) for name in layers}


def statistics(model: nn.Module) -> State:
    return {name: value for name, value in model.state_dict().items() if "running" in name}


def error(found: State, right: State) -> dict[str, float]:
    """Return the largest errors over layers and channels."""
    worst = {"variance, relative": 0.0, "mean, in standard deviations": 0.0}
    for name, var in right.items():
        if not name.endswith("running_var"):
            continue
        mean = name.replace("running_var", "running_mean")
        ratios = ((found[name] - var) / var, (found[mean] - right[mean]) / var.sqrt())
        for what, values in zip(worst, ratios, strict=True):
            worst[what] = max(worst[what], values.abs().max().item())
    return worst


def share(batches: Pairs, rank: int) -> Pairs:
    return [pair for place, pair in enumerate(batches) if (place % SHARE == 0) == (rank == 0)]


def passes(orders: int) -> list[tuple[str, Pairs]]:
    """Return the batches of every pass with the name of their division."""
    return [
        (name, batches_of(division, order))
        for name, division in DIVISIONS.items()
        for order in range(orders if division.shuffled else 1)
    ]


def polish_shares(orders: int, file: Path) -> None:
    """Polish as one of two workers, pass after pass; worker 0 writes the statistics."""
    from largebatch.distributed.torch_distributed import TorchDistributed

    backend = TorchDistributed()
    found = []
    for _, batches in passes(orders):
        model = network()
        polish(model, share(batches, backend.rank), backend)
        found.append({name: value.tolist() for name, value in statistics(model).items()})
    backend.close()
    if backend.rank == 0:
        file.write_text(json.dumps(found))


def errors(batches: Pairs, shared: State) -> dict[str, dict[str, float]]:
    """Measure the error of every rival, on one worker and on two, where ours are `shared`."""
    right = exact(network(), batches)

    def after(rival: Pass, part: Pairs) -> State:
        model = network()
        rival(model, part)
        return statistics(model)

    found = {name: error(after(rival, batches), right) for name, rival in RIVALS.items()}
    found["ours, two workers"] = error(shared, right)
    for name, rival in PEERS.items():
        first, second = (after(rival, share(batches, rank)) for rank in range(2))
        mean = {key: (first[key].double() + second[key]) / 2 for key in first}
        found[f"{name}, worker 0's own"] = error(first, right)
        found[f"{name}, averaged over workers"] = error(mean, right)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--orders", type=int, default=5, help="of the divisions that are shuffled")
    parser.add_argument("--worker", nargs=2, metavar=("TASK", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    worker = vars(args).pop("worker")
    if worker:
        polish_shares(args.orders, Path(worker[1]))
        return
    by_division: dict[str, list[dict[str, dict[str, float]]]] = {name: [] for name in DIVISIONS}
    shared = on_two_workers("polish")
    for (name, batches), values in zip(passes(args.orders), shared, strict=True):
        state = {key: torch.tensor(value) for key, value in values.items()}
        by_division[name].append(errors(batches, state))
    result: dict[str, Any] = {
        "settings": {**vars(args), "images are": source(), "pixels": PIXELS, "model": "resnet18"},
        "peers": {name: importlib.metadata.version(name) for name in PEERS if name != "update_bn"},
        "error": {
            division: {
                rival: {
                    what: {**spread([one[rival][what] for one in found]), "n": len(found)}
                    for what in found[0][rival]
                }
                for rival in found[0]
            }
            for division, found in by_division.items()
        },
    }
    print(json.dumps(result, indent=1))
    print(write("polish_error", result))


if __name__ == "__main__":
    main()
