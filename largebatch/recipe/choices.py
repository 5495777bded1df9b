"""The choices of settings that modules outside of the recipe use too."""

from typing import Literal

Convention = Literal["reference", "scaled-momentum", "outside", "fujitsu"]
Compile = Literal[False, True, "reduce-overhead", "max-autotune"]
Kernels = Literal["auto", "torch", "apex"]
Monitor = Literal["noise_scale", "gradient_norm", "trust_ratios", "system", "generalization_gap"]
TrackerName = Literal["wandb", "tensorboard", "mlflow", "mlperf"]
OffTarget = Literal["all", "others"]
Precision = Literal["fp32", "bf16", "fp16"]
