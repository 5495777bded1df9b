"""The choices of settings that modules outside of the recipe use too."""

from typing import Annotated, Literal

from largebatch.recipe.section import Named
from largebatch.registry import OURS

Convention = Literal["reference", "scaled-momentum", "outside", "fujitsu"]
Compile = Literal[False, True, "reduce-overhead", "max-autotune"]
Kernels = Literal["auto", "torch", "apex"]
DecoderName = Annotated[str, Named("decoders", tuple(OURS["decoders"]))]
Monitor = Annotated[
    str,
    Named(
        "monitors",
        ("noise_scale", "gradient_norm", "trust_ratios", "system", "generalization_gap"),
    ),
]
TrackerName = Annotated[str, Named("trackers", tuple(OURS["trackers"]))]
OffTarget = Literal["all", "others"]
Precision = Literal["fp32", "bf16", "fp16"]
