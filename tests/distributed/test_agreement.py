"""The comparison of workers before they start, with threads as workers."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from short_runs import DIGITS
from threads import Thread, on_threads
from torch import Tensor, nn

from largebatch import load_recipe, run
from largebatch.distributed import agreement
from largebatch.distributed.agreement import (
    agree,
    checksum,
    require_agreement,
    require_same_bits,
    share_weights,
)
from largebatch.distributed.backend import Backend, Work
from largebatch.errors import DesynchronizedError, MismatchError
from largebatch.runs import build
from largebatch.runs.options import Options
from largebatch.tracking.environment import versions

Facts = Mapping[str, object]

CPU = torch.device("cpu")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda below: st.lists(below) | st.dictionaries(st.text(), below),
    max_leaves=5,
)
INDEX = {"index": {"train": {"samples": 5, "digest": "ab"}, "val": {"samples": 2, "digest": "cd"}}}
OTHER_INDEX = {"index": {**INDEX["index"], "val": {"samples": 2, "digest": "ef"}}}


def compare(*facts: Facts) -> list[str]:
    """Compare facts, one worker each; return each worker's error, or an empty string."""

    def work(worker: Thread) -> str:
        try:
            require_agreement(facts[worker.rank], worker, worker.device)
        except MismatchError as error:
            return str(error)
        return ""

    return on_threads(work, workers=len(facts))


def of_a_run(*overrides: str, command: str = "train", **options: object) -> Facts:
    """Return the facts of a worker that joins a run on the digits."""
    recipe = load_recipe(DIGITS, overrides)
    shared = replace(Options(out=Path()), **cast("Any", options)).shared
    return {"command": command, **recipe.model_dump(mode="json"), **shared}


def test_what_one_worker_refuses_no_worker_uses() -> None:
    own: list[dict[str, str | None]] = [
        {"kernels": None, "graph": None, "crops": "slow"},
        {"kernels": None, "graph": "a hook", "crops": "slow"},
        {"kernels": None, "graph": "another hook", "crops": "slow"},
    ]

    def work(worker: Thread) -> tuple[dict[str, str | None], int]:
        agreed = agree(own[worker.rank], worker, CPU)
        return agreed, worker.calls

    results = on_threads(work, workers=3)
    expected = {"kernels": None, "graph": "a hook (worker 1)", "crops": "slow (worker 0)"}
    assert all(agreed == expected for agreed, _ in results)
    own[1:] = [own[0], own[0]]
    assert on_threads(work, workers=3) == [(own[0], 1)] * 3  # one all-reduce
    own[1] = {"kernels": "no compiler"}  # its images differ, which is found later
    agreed = on_threads(work, workers=3)
    assert agreed[1][0] == {"kernels": "no compiler (worker 1)"}
    assert agreed[0][0] == {
        "kernels": "no compiler (worker 1)",
        "graph": None,
        "crops": "slow (worker 0)",
    }


@settings(max_examples=25)
@given(facts=st.dictionaries(st.text(), JSON))
def test_workers_that_agree_exchange_only_checksums(facts: Facts) -> None:
    class Watched:
        def __init__(self, worker: Thread) -> None:
            self.rank, self.world_size = worker.rank, worker.world_size
            self.worker, self.sent = worker, list[int]()

        def all_reduce(self, tensor: Tensor) -> Work:
            self.sent.append(tensor.nbytes)
            return self.worker.all_reduce(tensor)

        def all_gather(self, tensor: Tensor) -> Tensor:
            raise AssertionError("what every worker receives would grow with their number")

    def work(worker: Thread) -> list[int]:
        watched = Watched(worker)
        require_agreement(facts, watched, CPU)
        return watched.sent

    assert on_threads(work, workers=3) == [[512]] * 3


@pytest.mark.parametrize(
    ("own", "other", "message"),
    [
        pytest.param(
            of_a_run(),
            of_a_run("schedule.peak_lr=1.0"),
            "schedule.peak_lr: 0.5 on worker 0 and 1.0 on worker 1",
            id="rate",
        ),
        pytest.param(
            of_a_run(),
            of_a_run("model.arguments.drop_rate=0.5"),
            "model.arguments.drop_rate: null on worker 0 and 0.5 on worker 1",
            id="a key that one has",
        ),
        pytest.param(of_a_run(), of_a_run(max_steps=3), "--max-steps: null on", id="max steps"),
        pytest.param(
            INDEX,
            OTHER_INDEX,
            'index.val.digest: "cd" on worker 0 and "ef" on worker 1',
            id="images",
        ),
    ],
)
def test_every_worker_reports_the_difference(own: Facts, other: Facts, message: str) -> None:
    told, *others = compare(own, other)
    assert message in told
    assert others == [told]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        pytest.param(
            lambda: nn.Linear(3, 5),
            '0.bias: "float32 [4]" on worker 0 and "float32 [5]"',
            id="shape",
        ),
        pytest.param(
            lambda: nn.Linear(3, 4, bias=False),
            '0.bias: "float32 [4]" on worker 0 and null',
            id="name",
        ),
    ],
)
def test_models_are_compared_before_their_weights_are_sent(
    other: Callable[[], nn.Module], message: str
) -> None:
    """A worker that is a thread has no `broadcast`: asked for one it would fail otherwise."""

    def work(worker: Thread) -> str:
        model = nn.Sequential(other() if worker.rank else nn.Linear(3, 4))
        with pytest.raises(MismatchError) as caught:
            share_weights(model, cast("Backend", worker), facts={})
        return str(caught.value)

    for told in on_threads(work, workers=2):
        assert f"state_dict.{message}" in told


def test_a_run_compares_everything_it_depends_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stated: list[Any] = []
    for module in (build, agreement):
        monkeypatch.setattr(module, "require_agreement", lambda facts, *_: stated.append(facts))
    changes = ["duration={steps: 2}", "schedule.warmup=null", "polish=null"]
    recipe = load_recipe(DIGITS, [*changes, "execution.device_batch=48"])
    run(recipe, out=tmp_path / "run")
    first, second = stated
    assert recipe.model_dump(mode="json").items() <= first.items()
    assert first["command"] == "train"
    assert first["versions"] == versions()
    assert second["plan"]["accumulation"] == 2
    assert second["index"]["train"]["samples"] == 1437
    assert len(second["index"]["val"]["digest"]) >= 32
    assert second["state_dict"]["fc.weight"] == "float32 [10, 128]"


def test_files_with_other_weights_have_another_checksum() -> None:
    state = {"a": torch.zeros(3, dtype=torch.bfloat16), "n": torch.tensor(7)}
    assert checksum(state) == checksum(dict(reversed(state.items())))
    changed = [
        {**state, "n": torch.tensor(8)},
        {**state, "a": torch.zeros(3, dtype=torch.float16)},
        {**state, "a": torch.zeros(1, 3, dtype=torch.bfloat16)},
        {"b": state["a"], "n": state["n"]},
    ]
    assert len({checksum(each) for each in [state, *changed]}) == 5


def test_different_weights_name_the_workers() -> None:
    def work(worker: Thread) -> str:
        weights = [torch.full((2,), float(worker.rank == 1)), torch.zeros(3, dtype=torch.complex64)]
        with pytest.raises(DesynchronizedError) as caught:
            require_same_bits(weights, worker, CPU, when="step 9")
        return str(caught.value)

    for told in on_threads(work, workers=3):
        assert "step 9: 0 on workers 0, 2 and " in told
        assert " on worker 1; " in told
