"""The ViT-S/16 of big_vision, and FFCV's ResNet-50, beside transcriptions of their sources."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from largebatch.errors import RecipeError
from largebatch.models import build, layer_depths, param_groups
from largebatch.models.fusion import pair
from largebatch.models.vision_transformer import BigVisionViT, fixed_positions

CPU = torch.device("cpu")
SMALL = {"patch": 4, "width": 16, "depth": 2, "heads": 2}


def posemb_sincos_2d(h: int, w: int, width: int) -> npt.NDArray[np.float64]:
    """Return what big_vision's function of this name does, in NumPy (models/vit.py)."""
    y, x = np.mgrid[:h, :w]
    omega = np.arange(width // 4) / (width // 4 - 1)
    omega = 1.0 / (10_000.0**omega)
    y = np.einsum("m,d->md", y.flatten(), omega)
    x = np.einsum("m,d->md", x.flatten(), omega)
    return np.concatenate([np.sin(x), np.cos(x), np.sin(y), np.cos(y)], axis=1)


@pytest.mark.parametrize(("height", "width"), [(14, 14), (3, 5)])
def test_positions_are_those_of_big_vision(height: int, width: int) -> None:
    positions = fixed_positions(height, width, 384, device=CPU)
    expected = torch.from_numpy(posemb_sincos_2d(height, width, 384))
    torch.testing.assert_close(positions[0], expected, rtol=0, atol=1e-12)


def test_it_has_the_weights_of_vit_s_16() -> None:
    """22.05 million of ViT-S/16 without its positions and class token, and the layer before the
    classifier."""
    with torch.device("meta"):
        model = build("big_vision_vit_s16", num_classes=1000)
        timms: Any = build("vit_small_patch16_224", num_classes=1000)
    total = sum(weight.numel() for weight in timms.parameters())
    total -= timms.pos_embed.numel() + timms.cls_token.numel()
    assert sum(weight.numel() for weight in model.parameters()) == total + 384 * 384 + 384
    assert total == 21_974_632


def encoder(model: Any, images: Tensor) -> Tensor:  # noqa: ANN401 -- attributes of timm's blocks
    """Return the logits by hand: patches, attention and layers written with plain functions."""
    patch, width, heads = SMALL["patch"], SMALL["width"], SMALL["heads"]
    grid = images.shape[-1] // patch
    cut = images.unfold(2, patch, patch).unfold(3, patch, patch)
    cut = cut.permute(0, 2, 3, 1, 4, 5).reshape(len(images), grid * grid, -1)
    x = cut @ model.patch_embed.weight.flatten(1).T + model.patch_embed.bias
    x = x + torch.from_numpy(posemb_sincos_2d(grid, grid, width))
    for block in model.blocks:
        y = F.layer_norm(x, (width,), block.norm1.weight, block.norm1.bias, 1e-6)
        q, k, v = (y @ block.attn.qkv.weight.T + block.attn.qkv.bias).chunk(3, dim=-1)
        parts = []
        for head in range(heads):
            mine = slice(head * width // heads, (head + 1) * width // heads)
            scores = q[..., mine] @ k[..., mine].transpose(1, 2) / (width / heads) ** 0.5
            parts.append(scores.softmax(-1) @ v[..., mine])
        x = x + torch.cat(parts, -1) @ block.attn.proj.weight.T + block.attn.proj.bias
        y = F.layer_norm(x, (width,), block.norm2.weight, block.norm2.bias, 1e-6)
        y = y @ block.mlp.fc1.weight.T + block.mlp.fc1.bias
        # flax: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
        y = 0.5 * y * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (y + 0.044715 * y**3)))
        x = x + y @ block.mlp.fc2.weight.T + block.mlp.fc2.bias
    x = F.layer_norm(x, (width,), model.norm.weight, model.norm.bias, 1e-6).mean(1)
    x = torch.tanh(x @ model.pre_logits.weight.T + model.pre_logits.bias)
    logits: Tensor = x @ model.head.weight.T + model.head.bias
    return logits


def test_logits_are_those_written_by_hand() -> None:
    torch.manual_seed(0)
    model = BigVisionViT(5, **SMALL).double()
    for weight in model.parameters():  # some begin with zeros, which would hide what they do
        nn.init.normal_(weight, std=0.3)
    images = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    torch.testing.assert_close(model(images), encoder(model, images), rtol=0, atol=1e-12)


def test_weights_begin_as_in_flax() -> None:
    """Variances: 1 / inputs of patches and hidden layer, 2 / (inputs + outputs) in the blocks."""
    torch.manual_seed(0)
    model: Any = BigVisionViT(10, patch=8, width=192, depth=1, heads=3)
    inputs = 3 * 8 * 8
    attention = model.blocks[0].attn
    for weight, variance in (
        (model.patch_embed.weight, 1 / inputs),
        (model.pre_logits.weight, 1 / 192),
        (attention.qkv.weight[:192], 2 / (192 + 192)),
        (attention.qkv.weight, 2 / (192 + 192)),
        (attention.proj.weight, 2 / (192 + 192)),
        (model.blocks[0].mlp.fc1.weight, 2 / (192 + 768)),
    ):
        assert weight.var().item() == pytest.approx(variance, rel=0.05)
    assert not model.head.weight.any()
    assert not model(torch.randn(2, 3, 32, 32)).any()


def test_only_matrices_and_filters_are_decayed() -> None:
    """big_vision decays what is called kernel: no bias, no LayerNorm; positions are no weights."""
    model = BigVisionViT(5, **SMALL)
    decayed = {id(weight) for weight in param_groups(model, weight_decay=0.1)[0]["params"]}
    names = {name for name, weight in model.named_parameters() if id(weight) in decayed}
    kernels = {name for name, weight in model.named_parameters() if weight.ndim > 1}
    assert names == kernels
    assert "head.weight" in names


def test_its_layers_are_those_of_timms_vision_transformer() -> None:
    """The layer with the tanh belongs to the head."""
    model = BigVisionViT(5, **SMALL)
    timms = build("vit_small_patch16_224", num_classes=5, arguments={"depth": 2, "embed_dim": 96})
    depths = layer_depths(model)
    expected = dict(
        zip(
            (name for name, _ in timms.named_parameters()),
            layer_depths(timms).values(),
            strict=True,
        )
    )
    for name, weight in model.named_parameters():
        like = name.replace("patch_embed", "patch_embed.proj").replace("pre_logits", "head")
        assert depths[weight] == expected[like], name
    assert set(depths.values()) == {0, 1, 2, 3}


def test_a_width_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"model\.arguments.*width"):
        build("big_vision_vit_s16", num_classes=5, arguments={"width": 100})


def ffcvs(images: Tensor) -> Tensor:
    """Return images blurred as by FFCV's BlurPoolConv2d (train_imagenet.py)."""
    kernel = torch.tensor([[1.0, 2, 1], [2, 4, 2], [1, 2, 1]]) / 16
    padded = F.pad(images, (1, 1, 1, 1))
    height, width = images.shape[2:]
    shifted = [
        kernel[i, j] * padded[:, :, i : i + height, j : j + width]
        for i in range(3)
        for j in range(3)
    ]
    return torch.stack(shifted).sum(0)


def test_six_convolutions_of_resnet50_blur_their_input() -> None:
    torch.manual_seed(0)
    model: Any = build("resnet50_blurred", num_classes=10)
    plain: Any = build("torchvision/resnet50", num_classes=10)
    strided = [
        f"layer{stage}.0.{name}" for stage in (2, 3, 4) for name in ("conv2", "downsample.0")
    ]
    weights = model.state_dict()
    for name in strided:
        weights[f"{name}.weight"] = weights.pop(f"{name}.conv.weight")
        plain.get_submodule(name).register_forward_pre_hook(lambda _, inputs: ffcvs(inputs[0]))
    plain.load_state_dict(weights)
    images = torch.randn(2, 3, 64, 64)
    pair(model)  # as in a run on a GPU
    torch.testing.assert_close(model.eval()(images), plain.eval()(images))


def test_images_that_are_not_whole_patches_are_refused() -> None:
    model = build(
        "big_vision_vit_s16", num_classes=2, arguments={"width": 8, "depth": 1, "heads": 1}
    )
    assert model(torch.zeros(1, 3, 32, 48)).shape == (1, 2)
    with pytest.raises(RecipeError, match=r"data\.image_size.* multiple of 16"):
        model(torch.zeros(1, 3, 32, 40))
