"""The LSTM of studies of servers: its windows, and its updates against plain PyTorch."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from short_studies import SERVERS, Json, cells_in, needs_hosts, write_study
from torch.nn import functional as F

from largebatch.data.order import samples_at
from largebatch.errors import DataError, RecipeError
from largebatch.lab.studies.hosts import HostsCell
from largebatch.lab.studies.runner import study
from largebatch.lab.studies.study import StudyMachine, load_study
from largebatch.lab.studies.words import FILE, LSTM, open_words, read_words, windows_of
from largebatch.runs.options import Options
from largebatch.training.stages import STAGES

LENGTH, WORDS, WINDOWS = 4, 7, 14

LSTM_STUDY: Json = {
    **SERVERS,
    "recipes": {
        "lstm": {
            "recipe": "fashion_mnist_resnet9_128",
            "set": {
                "model": {"name": "lstm", "arguments": {"units": 5, "layers": 2, "words": LENGTH}},
                "data.classes": WORDS,
                "data.train_samples": WINDOWS,
                "duration": {"steps": 40},
                "batch": {"global_batch": 4, "bn_span": None},
                "polish": None,
                "optimizer": {"kind": "sgd", "momentum": 0.0, "weight_decay": 0.0},
                "schedule": {"peak_lr": 0.5, "warmup": None, "decay": {"kind": "constant"}},
                "loss.label_smoothing": 0.0,
                "execution": {},
            },
            "on_hosts": {"mini_batch": 4, "workers": [2], "warm_up": 1, "updates": 4},
        }
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a text of 12 sentences of 5 words, of 7 different words with the end."""
    lines = [" ".join("abcdef"[(row + place) % 6] for place in range(4)) for row in range(12)]
    (tmp_path / FILE).write_text("\n".join(lines) + "\n")
    return tmp_path


def cell_of(folder: Path, **changes: Any) -> HostsCell:  # noqa: ANN401 -- parts of a study
    cell = cells_in(folder, LSTM_STUDY, **changes)[0]
    assert isinstance(cell, HostsCell)
    return cell


def test_a_word_is_its_place_by_frequency_and_a_line_ends_with_a_word(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text("b a a\na c\n")
    assert read_words(tmp_path, num_words=4).tolist() == [2, 0, 0, 1, 0, 3, 1]


def test_updates_are_those_of_plain_pytorch_on_the_same_windows(folder: Path) -> None:
    """The loss is the mean over all words of the batch."""
    recipe, updates = cell_of(folder).recipe, 3
    words = read_words(folder, num_words=WORDS)
    inputs, targets = windows_of(words, length=LENGTH)
    torch.manual_seed(recipe.seed)
    model = LSTM(WORDS, units=5, layers=2)
    for update in range(updates):
        positions = range(4 * update, 4 * update + 4)
        samples = samples_at(positions, seed=recipe.seed, num_samples=WINDOWS, trained=None)
        logits = model(inputs[samples])
        loss = F.cross_entropy(logits.reshape(-1, WORDS), targets[samples].reshape(-1))
        model.zero_grad()
        loss.backward()
        with torch.no_grad():
            for weight in model.parameters():
                assert weight.grad is not None
                weight.sub_(weight.grad, alpha=0.5)
    (folder / "run").mkdir()
    with open_words(recipe, Options(out=folder / "run", data=folder)) as session:
        STAGES[0].run(session, range(session.plan.train_steps), updates)
        torch.testing.assert_close(
            dict(session.state.model.named_parameters()), dict(model.named_parameters())
        )


def test_a_text_in_another_encoding_is_refused_by_its_file(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes("käse\n".encode("latin-1"))
    with pytest.raises(DataError, match=FILE):
        read_words(tmp_path, num_words=2)


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        pytest.param("data.classes", 9, DataError, id="vocabulary"),
        pytest.param("data.train_samples", 15, DataError, id="windows"),
        pytest.param("model.arguments.dropout", 0.5, RecipeError, id="unknown argument"),
        pytest.param("model.arguments.units", 0, RecipeError, id="no units"),
        pytest.param("loss.class_weights", "balanced", RecipeError, id="weights of classes"),
        pytest.param(
            "data.erase", {"probability": 1, "fill": "constant"}, RecipeError, id="erased boxes"
        ),
    ],
)
def test_what_does_not_fit_the_text_is_refused(
    folder: Path, key: str, value: object, error: type[Exception]
) -> None:
    cell = cell_of(folder, **{f"recipes__lstm__set__{key}": value})
    options = Options(out=folder / "run", data=folder)
    *_, last = key.split(".")
    with pytest.raises(error, match=last), open_words(cell.recipe, options):
        pass


def test_the_preset_has_the_windows_of_the_treebank() -> None:
    if "LARGEBATCH_DATA" not in os.environ:
        pytest.skip("LARGEBATCH_DATA is not set: it names the folder of real data sets")
    entry = load_study("jaeger").recipes["lstm"]
    folder = Path(os.environ["LARGEBATCH_DATA"]) / "ptb"
    words = read_words(folder, num_words=entry.set["data.classes"])
    inputs, _ = windows_of(words, length=entry.set["model"]["arguments"]["words"])
    assert len(inputs) == entry.set["data.train_samples"]


@pytest.mark.long
@needs_hosts
def test_a_start_on_hosts_records_times_traffic_and_rates(folder: Path) -> None:
    """Two workers of a ring send and receive the bytes of the model once each in an update.

    The rate falls to a quarter after five updates, on both in the same one.
    """
    wide = {"name": "lstm", "arguments": {"units": 50, "layers": 2, "words": LENGTH}}
    falling = {"kind": "steps", "at": [{"steps": 5}], "gamma": 0.25}
    schedule = {"peak_lr": 0.5, "warmup": None, "decay": falling}
    cells = cells_in(
        folder,
        LSTM_STUDY,
        recipes__lstm__set__model=wide,
        recipes__lstm__set__schedule=schedule,
    )
    (cell,) = [cell for cell in cells if cell.variant == "ring-2"]
    assert isinstance(cell, HostsCell)
    found = cell.carry_out(cell.slots[0], {}, Options(out=folder / "run", data=folder))
    (model,) = found["shares"]
    assert model == 4 * (7 * 50 + 2 * (4 * 50 * 100 + 2 * 4 * 50) + 7 * 50 + 7)
    assert len(found["seconds"]) == 4
    # 1 to warm up, 1, and 1 before the 4 timed
    assert found["rates"] == [[(0.5).hex()] * 5 + [(0.125).hex()] * 2] * 2
    for counted in (*found["sent"], *found["received"]):
        assert model <= counted < 1.1 * model  # the loss and messages of the library besides


@pytest.mark.long
@needs_hosts
def test_the_lstm_is_started_in_each_layout(folder: Path) -> None:
    path, lines = write_study(folder, LSTM_STUDY), list[str]()
    machine = StudyMachine(data={"lstm": folder})
    assert study(path, out=folder / "out", machine=machine, report=lines.append)
    text = lines[-2]  # before the line about the folder for a paper
    for layout in ("central", "beside", "ring"):
        assert f"lstm/{layout}-2" in text
