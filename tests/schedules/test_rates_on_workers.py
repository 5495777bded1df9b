"""A change of the rate reaches every worker in the same step."""

import json
from pathlib import Path

import numpy as np
import pytest
from on_forked_workers import on_forked_workers
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from largebatch import load_recipe, run
from largebatch.distributed.environment import launched_rank
from largebatch.recipe.recipe import Recipe

FOLDER = Path(__file__).parents[2] / "recipes"
DELL_IN_SHORT = (
    "{peak_lr: 0.4, warmup: null, decay: {kind: steps, at: [{epochs: 0.5}, {epochs: 3}]}}"
)


def train_and_note_the_rates(recipe: Recipe, folder: Path) -> None:
    """Run one worker, and record the learning rates of its optimizer at every step."""
    noted: list[list[float]] = []

    def note(optimizer: Optimizer, *_: object) -> None:
        noted.append([group["lr"] for group in optimizer.param_groups])

    register_optimizer_step_pre_hook(note)
    run(recipe, out=folder / "run", backend="torch")
    (folder / f"worker{launched_rank()}.json").write_text(json.dumps(noted))


@pytest.mark.long
def test_every_worker_changes_the_rate_in_the_same_step(tmp_path: Path) -> None:
    """Dell saw it change late on some processors; its schedule at a twentieth of the length."""
    recipe = load_recipe(
        FOLDER / "quickstart" / "digits_96.yaml",
        [
            *(f"schedule={DELL_IN_SHORT}", "duration.epochs=4.5", "polish=null", "evaluation={}"),
            *("model={name: lenet5}", "batch.bn_span=null"),
        ],
    )
    on_forked_workers(train_and_note_the_rates, recipe, tmp_path, workers=2)
    first, second = (json.loads((tmp_path / f"worker{rank}.json").read_text()) for rank in (0, 1))
    assert first == second
    assert all(len(set(groups)) == 1 for groups in first)
    rates = [groups[0] for groups in first]
    assert len(rates) == 68
    np.testing.assert_allclose(rates, [0.4] * 7 + [0.04] * 38 + [0.004] * 23, rtol=1e-12)
