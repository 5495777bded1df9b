"""Kernels and graphs of a run: tried before its first update, decided by all workers, switched off.

The simulated accelerator computes them; a fork of its process stands for a process of trials.
"""

import json
import os
import platform
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TextIO
from unittest import mock

import accelerator
import late_group
import pytest
import torch
from on_forked_workers import on_forked_workers
from short_runs import a_recipe, log
from torch import Tensor

from largebatch import proof, run
from largebatch.cli.doctor import examine_kernels
from largebatch.errors import RecipeError
from largebatch.models import kernels
from largebatch.optim.kernels import table
from largebatch.proof import BATCHNORM, GRAPH, OPTIMIZER, TrialsResult
from largebatch.recipe.recipe import Recipe
from largebatch.runs import proving
from largebatch.tracking.environment import versions

TINY = (
    *("batch.global_batch=8", "batch.bn_span=4", "execution.device_batch=4", "data.image_size=16"),
    *("model.name=cifar_resnet9", "model.arguments={width: 2}"),
    *("execution.cache=none", "execution.compare_every=1", "duration={steps: 3}"),
    "polish=null",
)
SHORTCUTS = (
    *(*TINY, "model.name=resnet18", "data.image_size=8"),
    "model.arguments={layers: [1, 1, 1, 1], channels: [8, 8, 8, 8]}",
)
"""With a BatchNorm before a sum."""


PROVE = proof.prove
"""As it is before the simulated accelerator stands for what was proven."""


def prepare() -> torch.device:
    device = accelerator.simulate()
    accelerator.use_graphs()
    accelerator.use_kernels(of_models=False)
    late_group.register()
    return device


def launches_of_tables() -> int:
    lines = accelerator.COUNTS.launches.items()
    return sum(number for line, number in lines if line.startswith("optim/kernels/table.py"))


def with_unlike_workers(recipe: Recipe, folder: Path) -> tuple[int, int]:
    """Train where worker 1 has no compiler; return launches of tables, and those of an update."""
    device = prepare()
    reasons = {OPTIMIZER: "Failed to find C compiler"} if os.environ["RANK"] == "1" else {}

    def prove(_: str, parts: Sequence[str], *__: object, **___: object) -> dict[str, TrialsResult]:
        return {part: TrialsResult(refused=reasons.get(part), variants=1) for part in parts}

    with (
        mock.patch.object(proof, "prove", prove),
        mock.patch.object(platform, "node", return_value=os.environ["RANK"]),
    ):
        run(recipe, out=folder)
    assert proof.refusal(OPTIMIZER, device) is not None
    assert proof.uses(GRAPH, device)
    return launches_of_tables(), accelerator.COUNTS.launches.total()


def test_workers_use_what_all_of_them_can_use(tmp_path: Path) -> None:
    """Otherwise their weights would differ after the first update, and the run would end."""
    recipe = a_recipe(changes=TINY)
    tables, _ = on_forked_workers(with_unlike_workers, recipe, tmp_path / "run", workers=2)
    assert tables == 0
    (line,) = (it["text"] for it in log(tmp_path / "run", "note") if "C compiler" in it["text"])
    assert "(worker 1)" in line
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["kernels"] == line


def on_one_host(recipe: Recipe, folder: Path) -> tuple[list[str], list[float]]:
    """Train; return the workers that made trials, by the names of files, and their time."""
    device = prepare()
    given: list[float] = []

    def prove(
        _: str, parts: Sequence[str], *__: object, seconds: float, **___: object
    ) -> dict[str, TrialsResult]:
        given.append(seconds)
        folder.with_name(f"tried by {os.environ['RANK']}").touch()
        return {part: TrialsResult(refused="planted" if part == GRAPH else None) for part in parts}

    with mock.patch.object(proof, "prove", prove):
        run(recipe, out=folder, timeout=60.0)
    assert proof.refusal(GRAPH, device) == "planted"  # on the other too, so no worker is named
    assert proof.uses(OPTIMIZER, device)
    return sorted(path.name for path in folder.parent.glob("tried by *")), given


def test_one_worker_of_a_host_tries_for_all_while_the_others_wait(tmp_path: Path) -> None:
    recipe = a_recipe(changes=TINY)
    tried, seconds = on_forked_workers(on_one_host, recipe, tmp_path / "run", workers=2)
    assert tried == ["tried by 0"]
    assert seconds == [180.0]  # half of what they wait before the first update


def switched(recipe: Recipe, folder: Path, variable: str | None) -> tuple[int, list[bool]]:
    """Train; return the launches of tables, and whether each part is used."""
    device = prepare()
    if variable is not None:
        os.environ[proof.VARIABLE] = variable
    run(recipe, out=folder)
    return launches_of_tables(), [proof.uses(part, device) for part in (OPTIMIZER, GRAPH)]


@pytest.mark.parametrize(
    ("change", "variable", "uses"),
    [
        pytest.param((), "auto", [True, True], id="nothing"),
        pytest.param(("execution.kernels=torch",), None, [False, False], id="the key"),
        pytest.param((), "torch", [False, False], id="the variable"),
    ],
)
def test_one_key_and_one_variable_switch_everything_off(
    change: tuple[str, ...], variable: str | None, uses: list[bool], tmp_path: Path
) -> None:
    recipe = a_recipe(changes=(*TINY, *change))
    found = on_forked_workers(switched, recipe, tmp_path / "run", variable, workers=1)
    assert (found[0] > 0, found[1]) == (uses[0], uses)
    notes = " ".join(note["text"] for note in log(tmp_path / "run", "note"))
    assert ("CUDA graph" in notes) == uses[1]
    assert ("torch" in notes) == (not uses[0])


def required(recipe: Recipe, folder: Path) -> None:
    prepare()
    os.environ[proof.VARIABLE] = "torch"
    with pytest.raises(RecipeError, match="execution.graph"):
        run(recipe, out=folder)
    os.environ[proof.VARIABLE] = "none"
    with pytest.raises(RecipeError, match=proof.VARIABLE):
        run(recipe, out=folder)
    assert not folder.exists()


def test_a_required_graph_that_is_switched_off_is_refused(tmp_path: Path) -> None:
    recipe = a_recipe(changes=(*TINY, "execution.graph=true"))
    on_forked_workers(required, recipe, tmp_path / "run", workers=1)


def print_line(file: TextIO, **line: object) -> None:
    file.write(json.dumps(line) + "\n")


def run_in_fork(job: Mapping[str, Any], _: float) -> tuple[list[dict[str, Any]], str | None]:
    """Make the trials of a job in a fork of this process, which has the simulated device."""
    source, target = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            device = torch.device(job["device"], job["index"])
            with os.fdopen(target, "w", buffering=1) as lines:
                write = partial(print_line, lines)
                code = proof.make_trials(job, device, write)
        finally:
            os._exit(code)
    os.close(target)
    with os.fdopen(source) as lines:
        found = [json.loads(line) for line in lines]
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return found, None if status >= 0 else signal.Signals(-status).name


@contextmanager
def trials_in_forks(seconds: tuple[float, float]) -> Iterator[None]:
    """Make trials of runs on the simulated device, which takes `seconds` for both sides."""
    with (
        mock.patch.object(proof, "prove", PROVE),
        mock.patch.object(proof, "run_apart", run_in_fork),
        mock.patch.object(proof, "_seconds", return_value=seconds),
        mock.patch.object(proving, "_UPDATES", 4),
        mock.patch.object(proving, "_both_seconds", return_value=seconds),
    ):
        yield


def crash(*_: object, **__: object) -> Tensor:
    os.abort()


def with_a_kernel_that_crashes(recipe: Recipe, folder: Path) -> tuple[int, bool]:
    device = prepare()
    with trials_in_forks((1.0, 2.0)), mock.patch.object(table.TensorTable, "update", crash):
        run(recipe, out=folder)
    return launches_of_tables(), proof.uses(GRAPH, device)


def test_a_kernel_that_crashes_is_found_and_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    recipe = a_recipe(changes=TINY)
    found = on_forked_workers(with_a_kernel_that_crashes, recipe, tmp_path / "run", workers=1)
    assert found == (0, True)
    (line,) = (it["text"] for it in log(tmp_path / "run", "note") if "SIGABRT" in it["text"])
    assert "graph: 2.00 times as fast, the same bits" in line


def settings_of(recipe: Recipe) -> dict[str, object]:
    return {
        "recipe": recipe.model_dump(mode="json"),
        "workers": 1,
        "sizes": [[4, recipe.data.image_size]],
        "pixels": [8, 8],
        "imports": [],
    }


def findings(recipe: Recipe, parts: list[str], device: torch.device) -> dict[str, TrialsResult]:
    """Return the findings of trials in this process."""
    found: dict[str, TrialsResult] = {}

    def write(**line: Any) -> None:  # noqa: ANN401 -- any JSON
        if "finding" in line:
            found[line["part"]] = TrialsResult(**line["finding"])

    job = {"module": proving.__name__, "parts": parts, "known": {}}
    with (
        mock.patch.object(proof, "_seconds", return_value=(1.0, 2.0)),
        mock.patch.object(proving, "_UPDATES", 4),
    ):
        proof.make_trials({**job, "settings": settings_of(recipe)}, device, write)
    return found


def with_a_wrong_sum(recipe: Recipe) -> TrialsResult:
    """Multiply a kernel's result where there is a sum, by less than a rounding of bf16 is large."""
    device = accelerator.simulate()
    accelerator.use_kernels()
    fused = kernels.batchnorm()
    real = fused.normalise

    def wrong(x: Tensor, other: Tensor | None, *args: Any, **settings: Any) -> Any:  # noqa: ANN401 -- as the original
        out, stat = real(x, other, *args, **settings)
        return out if other is None else out * 1.001, stat

    with mock.patch.object(fused, "normalise", wrong):
        return findings(recipe, [BATCHNORM], device)[BATCHNORM]


def test_every_variant_of_a_network_is_tried() -> None:
    """The first ones of these layers are right; the one with the shortcut is wrong."""
    recipe = a_recipe(changes=SHORTCUTS)
    found = on_forked_workers(with_a_wrong_sum, recipe, workers=1)
    assert found.variants > 2
    assert found.refused is not None
    assert "with a sum" in found.refused


def with_a_wrong_graph(recipe: Recipe) -> TrialsResult:
    """Try updates in a graph that computes them, and moves some results besides."""
    device = accelerator.simulate()
    accelerator.use_graphs()
    real = accelerator.Graph.replay

    def wrong(graph: accelerator.Graph) -> None:
        real(graph)
        for result in graph._results:  # most of them are not read any more; the statistics are
            if result.is_floating_point():
                result.mul_(1.001)

    with mock.patch.object(accelerator.Graph, "replay", wrong):
        return findings(recipe, [GRAPH], device)[GRAPH]


def test_a_graph_that_computes_something_else_is_refused() -> None:
    recipe = a_recipe(changes=TINY)
    found = on_forked_workers(with_a_wrong_graph, recipe, workers=1)
    assert found.refused is not None
    assert "wrong" in found.refused


def examined() -> list[tuple[str, str]]:
    """Return what doctor prints of a GPU whose kernel is wrong, and whose graph is slow."""
    device = prepare()
    results = {
        OPTIMIZER: TrialsResult(refused="wrong: error 1"),
        GRAPH: TrialsResult(refused="not faster: 0.9 times", is_slow=True),
    }

    def run_apart(job: Mapping[str, Any], _: float) -> tuple[list[dict[str, Any]], None]:
        assert job["parts"] == [OPTIMIZER, GRAPH]
        return [{"part": part, "finding": asdict(it)} for part, it in results.items()], None

    with mock.patch.object(proof, "prove", PROVE), mock.patch.object(proof, "run_apart", run_apart):
        found = [*examine_kernels(device)]
        results |= dict.fromkeys(results, TrialsResult(variants=3))
        found += examine_kernels(device)  # tried again
        os.environ[proof.VARIABLE] = "torch"
        return [*found, *examine_kernels(device)]


def test_doctor_tries_each_kernel_and_a_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = on_forked_workers(examined, workers=1)
    statuses = [(name, text.partition("  ")[0]) for name, text in found]
    assert statuses == [
        *((OPTIMIZER, "BROKEN"), (GRAPH, "works")),
        *((OPTIMIZER, "works"), (GRAPH, "works")),
        ("kernels", "absent"),
    ]


def test_triton_belongs_to_the_packages_that_workers_compare() -> None:
    pytest.importorskip("triton", reason="Triton, whose version is compared")
    assert "triton" in versions()
