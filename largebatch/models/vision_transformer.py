"""ViT-S/16 as big_vision has it (Beyer et al. 2022, "Better plain ViT baselines").

Its report is arXiv:2205.01580; this follows google-research/big_vision, models/vit.py, with
`rep_size`, `pool_type="gap"` and `posemb="sincos2d"`. timm's VisionTransformer has no fixed
positions and no layer with a tanh before the classifier. The blocks are timm's, so that whatever is
done to those (compiling, kernels of attention) is done to these.
"""

from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from largebatch.errors import RecipeError
from largebatch.optional import require_timm

require_timm()

from timm.layers import lecun_normal_  # noqa: E402
from timm.models.vision_transformer import Block  # noqa: E402

_TEMPERATURE = 10_000.0
"""Ratio of the longest wavelength of the positions to the shortest."""

_EPS = 1e-6  # of flax's LayerNorm; torch's is 1e-5


class BigVisionViT(nn.Module):
    """A vision transformer with fixed positions, the mean of all patches and a tanh layer.

    H and W are multiples of `patch`; positions are those of the patches of the given images, so a
    model takes images of every such size; of others it raises RecipeError. The defaults are
    ViT-S/16, with 22,122,472 parameters for 1,000 classes. Raises ValueError for a width that heads
    or positions cannot divide.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        patch: int = 16,
        width: int = 384,
        depth: int = 12,
        heads: int = 6,
    ) -> None:
        super().__init__()
        if width % heads or width % 4 or width < 8:
            raise ValueError(
                f"width ({width}) must be a multiple of heads ({heads}) and of 4, and 8 or more"
            )
        self.patch = patch
        self.patch_embed = nn.Conv2d(3, width, patch, stride=patch)
        self.blocks = nn.Sequential(
            *(
                Block(
                    dim=width,
                    num_heads=heads,
                    qkv_bias=True,
                    norm_layer=partial(nn.LayerNorm, eps=_EPS),
                    # flax's gelu is the approximation by tanh, unless it is told otherwise.
                    act_layer=partial(nn.GELU, approximate="tanh"),
                )
                for _ in range(depth)
            )
        )
        self.norm = nn.LayerNorm(width, eps=_EPS)
        self.pre_logits = nn.Linear(width, width)
        self.head = nn.Linear(width, num_classes)
        self._init_weights()

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        if any(side % self.patch for side in images.shape[2:]):
            # The convolution would leave out the last rows and columns.
            height, width = images.shape[2:]
            raise RecipeError(
                f"data.image_size: images of {height} x {width} pixels are not whole patches; give "
                f"a multiple of {self.patch}, or another model.arguments.patch"
            )
        maps = self.patch_embed(images)
        height, width = maps.shape[2:]
        tokens = maps.flatten(2).transpose(1, 2)
        positions = fixed_positions(height, width, tokens.shape[-1], device=tokens.device)
        tokens = tokens + positions.to(tokens.dtype)
        tokens = self.norm(self.blocks(tokens))
        logits: Tensor = self.head(torch.tanh(self.pre_logits(tokens.mean(1))))
        return logits

    def group_matcher(self, *, coarse: bool = False) -> dict[str, object]:  # noqa: ARG002 -- timm's
        """Return the layers by the names of their parameters, as timm's models do."""
        blocks = [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))]
        return {"stem": r"^patch_embed", "blocks": blocks}

    @torch.no_grad()
    def _init_weights(self) -> None:
        """Draw the weights as flax does for big_vision's layers."""
        lecun_normal_(self.patch_embed.weight)
        nn.init.zeros_(cast("Tensor", self.patch_embed.bias))
        for block in self.blocks:
            _init_block(block)
        lecun_normal_(self.pre_logits.weight)
        nn.init.zeros_(self.pre_logits.bias)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)


def _init_block(block: Any) -> None:  # noqa: ANN401 -- attributes of timm's class
    # Queries, keys and values are layers of their own in flax. Drawn as one, with three times the
    # outputs, they would begin smaller by a factor of the root of two.
    for weight in block.attn.qkv.weight.chunk(3):
        nn.init.xavier_uniform_(weight)
    nn.init.zeros_(block.attn.qkv.bias)
    nn.init.xavier_uniform_(block.attn.proj.weight)
    nn.init.zeros_(block.attn.proj.bias)
    for layer in (block.mlp.fc1, block.mlp.fc2):
        nn.init.xavier_uniform_(layer.weight)
        nn.init.normal_(layer.bias, std=1e-6)


def fixed_positions(height: int, width: int, size: int, *, device: torch.device) -> Tensor:
    """Return 1 x height*width x size sines and cosines of the columns and of the rows.

    big_vision's `posemb_sincos_2d`, after MoCo v3 (arXiv:2104.02057): a quarter of `size` each for
    the sine and cosine of the column, then of the row. The last wavelength is 10,000 times the
    first, so the exponents go up to 1.
    """
    # In float64: the argument of a sine loses digits as it grows. The result is rounded once.
    exponents = torch.arange(size // 4, dtype=torch.float64, device=device) / (size // 4 - 1)
    frequencies = _TEMPERATURE**-exponents
    rows = torch.arange(height, dtype=torch.float64, device=device)
    columns = torch.arange(width, dtype=torch.float64, device=device)
    of_rows = (rows[:, None] * frequencies)[:, None].expand(height, width, -1)
    of_columns = (columns[:, None] * frequencies)[None].expand(height, width, -1)
    parts = [of_columns.sin(), of_columns.cos(), of_rows.sin(), of_rows.cos()]
    return torch.cat(parts, dim=-1).reshape(1, height * width, size)
