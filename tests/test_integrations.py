"""Parts of largebatch.integrations that need no other library than timm; the rest: examples."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from polish_reference import assert_right, one_pass
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Dataset

from largebatch.integrations import polished
from largebatch.integrations.accelerate import audit_loop
from largebatch.optional import require_timm

require_timm()

from timm import data  # noqa: E402
from timm.utils import ModelEmaV3  # noqa: E402


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)),
        *(nn.Flatten(), nn.LazyLinear(2)),
    )


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 3, 8, 8, generator=generator), torch.arange(n) % 2) for n in (8, 5)]


def test_a_model_holds_the_polished_average_in_a_block_only() -> None:
    model = network()
    model(batches()[0][0])
    averaged = AveragedModel(model)
    with torch.no_grad():
        for parameter in averaged.module.parameters():
            parameter.mul_(1.5)
    before, average = copy.deepcopy(model.state_dict()), copy.deepcopy(averaged.module)
    with polished(model, averaged, batches()):
        assert all(map(torch.equal, model.parameters(), average.parameters()))
        assert_right(model, one_pass(average, batches()), rel=1e-6)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert_right(averaged.module, one_pass(average, batches()), rel=1e-6)


def test_a_model_is_exchanged_back_after_an_error() -> None:
    model = network()
    model(batches()[0][0])
    averaged, before = AveragedModel(model), copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="images"), polished(model, averaged, ["no"]):
        pass
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())


class Images(Dataset[tuple[Tensor, int]]):
    """Images with the attributes that timm's loaders set."""

    transform = None

    def __len__(self) -> int:
        return 12

    def __getitem__(self, item: int) -> tuple[Tensor, int]:
        pixels = np.random.default_rng(item).integers(0, 256, (40, 40, 3), dtype=np.uint8)
        assert self.transform is not None
        return self.transform(Image.fromarray(pixels)), item % 2


def test_timm_polishes_an_average_on_clean_images_in_its_first_pass_after_an_update(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from largebatch.integrations.timm import polish_averages

    for owner, name in ((data, "create_loader"), (ModelEmaV3, "update")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # restored after the test
    polish_averages()
    words = {"input_size": (3, 32, 32), "use_prefetcher": False, "num_workers": 0}
    images, size = Images(), {"batch_size": 5, "device": torch.device("cpu")}
    augmented = data.create_loader(images, is_training=True, **words, **size)
    validation = data.create_loader(Images(), **words, **size)
    model = network()
    next_batch = next(iter(augmented))[0]
    model(next_batch)
    expected = one_pass(model, list(validation))
    ema = ModelEmaV3(model, decay=0.5)
    ema.eval()
    for _ in range(2):
        model(next_batch)
        ema.update(model)
        assert not np.allclose(ema.module[1].running_mean, expected["1"][0], rtol=0.01)
        ema.module(next_batch)
        assert_right(ema.module, expected, rel=1e-6)
    assert "RandomResizedCrop" in str(images.transform)  # training is as before


def test_a_loop_of_accelerate_is_audited_with_its_clipping(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = network()
    model(batches()[0][0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accelerator = SimpleNamespace(
        accumulate=lambda _: torch.enable_grad(),
        backward=lambda loss: loss.backward(),
        sync_gradients=True,
        clip_grad_norm_=nn.utils.clip_grad_norm_,
    )
    loader = data_loader()
    findings = audit_loop(
        accelerator, model, loader, nn.functional.cross_entropy, optimizer, max_norm=0.01
    )
    assert findings.ok
    (clipping,) = findings.named("clipping")
    assert "maximum 0.01" in clipping.text
    assert "no fault" in capsys.readouterr().out


def data_loader() -> torch.utils.data.DataLoader[tuple[Tensor, ...]]:
    images, labels = (torch.cat(it) for it in zip(*batches(), strict=True))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, labels), 4)
    loader.set_epoch = lambda _: None  # as Accelerate's
    return loader


def test_transformers_evaluates_the_average_and_trains_on_its_own_weights() -> None:
    pytest.importorskip("transformers")
    from largebatch.integrations.transformers import PolishedAverage

    model = network()
    model(batches()[0][0])
    weight, evaluated = next(model.parameters()), list[Tensor]()
    prefixes = list[str]()

    def evaluation_loop(metric_key_prefix: str = "eval") -> SimpleNamespace:
        evaluated.append(weight.clone())
        prefixes.append(metric_key_prefix)
        return SimpleNamespace(metrics={f"{metric_key_prefix}_loss": float(weight.sum())})

    trainer = SimpleNamespace(model=model, evaluation_loop=evaluation_loop)
    callback = PolishedAverage(trainer, batches(), decay=0.5)
    args, state = SimpleNamespace(load_best_model_at_end=True), SimpleNamespace(global_step=0)
    with pytest.raises(ValueError, match="load_best"):
        callback.on_train_begin(args, state, None, model=model)
    args, state = SimpleNamespace(load_best_model_at_end=False), SimpleNamespace(global_step=3)
    with pytest.raises(ValueError, match="resume"):
        callback.on_train_begin(args, state, None, model=model)
    state = SimpleNamespace(global_step=0)
    callback.on_train_begin(args, state, None, model=model)
    for _ in range(2):  # the first one starts the average
        with torch.no_grad():
            weight.mul_(3)
        callback.on_optimizer_step(args, state, None, model=model)
    raw = weight.clone()
    for _ in range(2):  # as for several evaluation sets
        result = trainer.evaluation_loop()
    torch.testing.assert_close(evaluated, [raw, raw * 2 / 3] * 2)
    assert prefixes == ["eval", "eval_average"] * 2
    assert set(result.metrics) == {"eval_loss", "eval_average_loss"}
    assert weight.equal(raw)  # as a checkpoint saves it
    callback.on_train_end(args, state, None, model=model)
    trainer.evaluation_loop()
    assert weight.equal(evaluated[1])
    assert weight.equal(evaluated[4])
