"""A language model is held against a loop in plain PyTorch, written here, over windows cut by hand.

The order of the windows is the one thing that both share.
"""

import math
from itertools import islice
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from schedules_of import schedule_of
from short_text import BATCH, cut_by_hand, text_recipe, words_of, write_text
from threads import Thread, on_threads
from torch import Tensor, nn
from torch.amp import GradScaler

from largebatch.data.order import sample_ids
from largebatch.data.text.pipeline import open_text, read_corpus
from largebatch.distributed.backend import Backend
from largebatch.distributed.reducer import Reducer
from largebatch.distributed.serial import Serial
from largebatch.models import Spans, build
from largebatch.recipe.arithmetic.plan import make_plan
from largebatch.recipe.text import TEXT
from largebatch.runs.optimizer_of_recipe import build_optimizer
from largebatch.training.evaluation import Metrics, evaluate
from largebatch.training.loop import step_seeds, train
from largebatch.training.loss import cross_entropy

STEPS = 6
State = dict[str, Tensor]
CPU = Serial(torch.device("cpu"))


def a_model(folder: Path, *, tied: bool = False) -> nn.Module:
    torch.manual_seed(5)
    number = len(set(words_of(folder, "train")))
    arguments = {"embedding": 6, "hidden": 6, "tied": tied}
    return build("lstm", num_classes=number, arguments=arguments).double()


def solve(
    backend: Backend, folder: Path, model: nn.Module, *, device_batch: int, smoothing: float = 0.0
) -> tuple[State, Metrics]:
    """Train and evaluate with everything largebatch has, in float64."""
    recipe = text_recipe(folder, f"execution.device_batch={device_batch}")
    plan = make_plan(recipe, workers=backend.world_size)
    pipeline = open_text(recipe, plan, backend, folder=folder)
    optimizer = build_optimizer(recipe, model, CPU)
    with Reducer(model.named_parameters(), backend, divisor=1.0) as reducer:
        updates = train(
            model,
            optimizer,
            pipeline.training(range(STEPS), clean=False),
            schedule_of(recipe),
            cross_entropy(smoothing=smoothing, off_target="all"),
            reducer,
            Spans(model, backend),
            GradScaler("cpu", enabled=False),
            steps=range(STEPS),
            accumulation=plan.accumulation,
            global_batch=BATCH,
            seed=step_seeds(0, backend.rank),
        )
        assert len(list(updates)) == STEPS
    expected = len(words_of(folder, "val"))
    found = evaluate(model, pipeline.validation(), backend, expected=expected)
    return dict(model.state_dict()), found


class Plain(nn.Module):
    """The same network with nothing of ours in it."""

    def __init__(self, state: State) -> None:
        super().__init__()
        words, size = state["embedding.weight"].shape
        self.embedding = nn.Embedding(words, size)
        self.lstm = nn.LSTM(size, size, num_layers=2)
        self.head = nn.Linear(size, words)
        self.double().load_state_dict(state)

    def forward(self, words: Tensor) -> Tensor:
        """Return T x N x K logits of T x N words."""
        logits: Tensor = self.head(self.lstm(self.embedding(words))[0])
        return logits


def plain_pytorch(folder: Path, state: State, *, smoothing: float = 0.0) -> tuple[State, float]:
    """Train by the mean loss over all words of a batch; return the weights and the perplexity."""
    recipe = text_recipe(folder)
    numbers = {word: n for n, word in enumerate(read_corpus(folder).vocabulary)}
    cut = cut_by_hand(words_of(folder, "train"), numbers, circle=True)
    order = sample_ids(range(STEPS * BATCH), seed=recipe.seed, num_samples=len(cut))
    net = Plain(state)
    decayed = [weight for weight in net.parameters() if weight.ndim > 1]
    others = [weight for weight in net.parameters() if weight.ndim == 1]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": 0.01}, {"params": others}]
    optimizer, rate = torch.optim.SGD(groups, momentum=0.9), schedule_of(recipe)
    for step, ids in enumerate(torch.from_numpy(order).split(BATCH)):
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        inputs, targets = (torch.stack([cut[i][side] for i in ids.tolist()], 1) for side in (0, 1))
        optimizer.zero_grad()
        logits = net(inputs)
        F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), label_smoothing=smoothing
        ).backward()
        optimizer.step()
    val = words_of(folder, "val")
    with torch.no_grad():
        losses = [
            F.cross_entropy(net(x.unsqueeze(1)).squeeze(1), y, reduction="sum")
            for x, y in cut_by_hand(val, numbers, circle=False)
        ]
    return dict(net.state_dict()), math.exp(sum(loss.item() for loss in losses) / len(val))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


def assert_alike(ours: tuple[State, Metrics], theirs: tuple[State, float]) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-10, atol=1e-10)
    assert TEXT.metric.value(ours[1]) == pytest.approx(theirs[1], rel=1e-10)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("device_batch", [8, 2])
def test_any_micro_batches_train_and_evaluate_as_plain_pytorch(
    folder: Path, device_batch: int, smoothing: float
) -> None:
    model = a_model(folder)
    start = {name: value.clone() for name, value in model.state_dict().items()}
    ours = solve(CPU, folder, model, device_batch=device_batch, smoothing=smoothing)
    assert_alike(ours, plain_pytorch(folder, start, smoothing=smoothing))
    assert max((ours[0][name] - start[name]).abs().max().item() for name in start) > 0.01


@pytest.mark.parametrize(("workers", "device_batch"), [(2, 4), (4, 1)])
def test_any_number_of_workers_trains_and_evaluates_as_plain_pytorch(
    folder: Path, workers: int, device_batch: int
) -> None:
    """The last window of the validation text is shorter, and one worker alone has it."""
    models = [a_model(folder) for _ in range(workers)]
    start = {name: value.clone() for name, value in models[0].state_dict().items()}

    def work(worker: Thread) -> tuple[State, Metrics]:
        return solve(
            cast("Backend", worker), folder, models[worker.rank], device_batch=device_batch
        )

    theirs = plain_pytorch(folder, start)
    for ours in on_threads(work, workers=workers):
        assert_alike(ours, theirs)


def test_tied_weights_are_one_tensor_with_the_gradients_of_both_uses(folder: Path) -> None:
    model = a_model(folder, tied=True)
    free = Plain({name: value.clone() for name, value in model.state_dict().items()})
    words = torch.randint(20, (4, 6), generator=torch.Generator().manual_seed(1))
    for net, shown, logits in ((model, words, model(words)), (free, words.T, free(words.T))):
        assert shown is not None
        logits.square().sum().backward()
        assert net is not None
    gradients = {name: weight.grad for name, weight in free.named_parameters()}
    assert gradients["embedding.weight"] is not None
    assert gradients["head.weight"] is not None
    tied = model.get_parameter("embedding.weight")
    assert tied.grad is not None
    assert model.get_parameter("head.weight") is tied
    torch.testing.assert_close(tied.grad, gradients["embedding.weight"] + gradients["head.weight"])


def test_what_a_word_comes_to_does_not_depend_on_the_words_after_it(folder: Path) -> None:
    model = a_model(folder).eval()
    words = torch.randint(20, (2, 6), generator=torch.Generator().manual_seed(2))
    changed = words.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 20
    torch.testing.assert_close(model(words)[:, :4], model(changed)[:, :4])
    assert (model(words)[:, 4] != model(changed)[:, 4]).any()


def test_the_small_network_has_the_size_of_zarembas() -> None:
    """Embedding, two layers of four gates with torch's two biases, softmax (arXiv:1409.2329)."""
    with torch.device("meta"):
        model = build("lstm", num_classes=10_000)
    gates = 4 * 200 * (200 + 200) + 2 * 4 * 200
    found = sum(weight.numel() for weight in model.parameters())
    assert found == 10_000 * 200 + 2 * gates + 200 * 10_000 + 10_000


def test_dropout_leaves_an_evaluation_alone_and_zeroes_its_share_in_training() -> None:
    model = build("lstm", num_classes=50, arguments={"dropout": 0.5})
    words = torch.randint(50, (3, 7))
    assert torch.equal(model.eval()(words), model(words))
    assert not torch.equal(model.train()(words), model(words))


def test_several_labels_a_sample_count_each_and_have_no_confidences() -> None:
    logits = torch.randn(3, 4, 7, dtype=torch.float64)
    labels = torch.randint(7, (3, 4))

    class Fixed(nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            return logits[rows[..., 0]] if rows.ndim > 1 else logits[rows, 0]

    rows = torch.arange(3)
    of_words = evaluate(Fixed(), [(rows[:, None].expand(3, 4), labels)], CPU, expected=12)
    mean = F.cross_entropy(logits.flatten(0, 1), labels.flatten()).item()
    assert TEXT.metric.value(of_words) == pytest.approx(math.exp(mean), rel=1e-12)
    assert of_words.top1 == (logits.argmax(-1) == labels).double().mean().item()
    assert math.isnan(of_words.average_confidence)
    assert of_words.classes_never_correct is None
    of_images = evaluate(Fixed(), [(rows, labels[:, 0])], CPU, expected=3)
    assert of_images.classes_never_correct is not None
    assert of_images.samples == len(list(islice(rows, 3)))
