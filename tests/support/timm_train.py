"""Make a model and an optimizer as timm's training script does, and do one update.

That script is in no package. `docs/examples/timm_script.py` runs this one in its place.
"""

import sys

import timm
import torch
from timm.optim import create_optimizer_v2


def main(kind: str) -> None:
    """Check which weights LARS adapts; print its module, the span, and if statistics moved."""
    model = timm.create_model("with_span", of="resnet10t", span=4, num_classes=3)
    optimizer = create_optimizer_v2(model, opt=kind, lr=0.1, weight_decay=1e-4, momentum=0.9)
    for group in optimizer.param_groups:
        for weight in group["params"]:
            assert group["adapt"] == (weight.ndim > 1)
    before = model.bn1.running_mean.clone()
    model(torch.randn(8, 3, 64, 64)).sum().backward()
    optimizer.step()
    moved = not model.bn1.running_mean.equal(before)
    lars = type(optimizer).__mro__[1]
    print(lars.__module__, model.bn1.span, moved)


if __name__ == "__main__":
    _, option, value = sys.argv
    assert option == "--opt"
    main(value)
