"""`make bench-gpu` at tiny sizes on the CPU: what it writes, and what becomes of its parts."""

import fcntl
import json
import os
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import accelerator as accelerator_of_tests
import pytest
import torch
from on_forked_workers import on_forked_workers

from benchmarks.speed import gpu, measuring, resnet50, roofline, table, with_apex
from largebatch import accelerator

ROOT = measuring.ROOT
PARTS = {part.name: part for part in gpu.PARTS}


def measured(name: str, words: str, folder: Path, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a benchmark in this process; return what it wrote."""
    words = words.removeprefix(name)
    script = ROOT / "benchmarks" / "speed" / f"{name}.py"
    patch.setattr(measuring, "RESULTS", folder)
    patch.setattr(torch.backends.cudnn, "benchmark", False)  # it is put back in the end
    patch.setattr(sys, "argv", [str(script), *words.split()])
    runpy.run_path(str(script), run_name="__main__")
    return written(name, folder)


def written(name: str, folder: Path) -> dict[str, Any]:
    (file,) = folder.glob(f"{name}_*.json")
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result


@pytest.mark.long
def test_resnet50_names_a_failing_rival_and_measures_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler for turbo")

    monkeypatch.setattr("largebatch.models.compiled.compile_model", fail)
    with pytest.raises(SystemExit, match="compiled: turbo"):
        measured("resnet50", f"{PARTS['resnet50'].tiny} turbo", tmp_path, monkeypatch)
    result = written("resnet50", tmp_path)
    assert set(result) >= {
        "command",
        "machine",
        "date",
        "commit",
        "versions",
        "sources",
        "settings",
    }
    compiled = {"timm, compiled: turbo", "ours, compiled: turbo", "ours, compiled: turbo, graph"}
    assert set(result["failed"]) == compiled
    assert all("turbo" in error for error in result["failed"].values())
    rivals = {"plain", "plain, graph", "floor", "timm", "ours", "ours, graph"}
    assert set(result["images a second"]) == rivals
    assert result["images a second"]["ours"]["median"] > 0
    assert {name: ratio["n"] for name, ratio in result["ratios"].items()} == {
        "ours / timm": 2,
        "ours / plain": 2,
        "timm / plain": 2,
        "ours, graph / ours": 2,
        "ours, graph / plain": 2,
        "ours, graph / plain, graph": 2,
    }
    assert set(result["share of the peak"]) == rivals
    assert result["peak memory in bytes"] == {}  # the CPU's is not counted
    assert not any(result["device"].values())


@pytest.mark.long
def test_the_roofline_compares_layers_with_a_copy_of_their_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = measured("roofline", PARTS["roofline"].tiny, tmp_path, monkeypatch)
    for kind in ("BatchNorm", "+ ReLU", "+ sum + ReLU"):
        layer = result[f"4x64x8 {kind}"]
        assert set(layer["milliseconds"]) == {"copy", "PyTorch", "ours", "ours, span 2"}
        assert set(layer["ratios"]) == {"ours / PyTorch", "ours, span 2 / ours"}
        assert layer["share of the bandwidth"]["copy"]["median"] == 1
        assert not layer["failed"]
    layer = {"ratios": {"ours / PyTorch": {"median": 1, "low": 1, "high": 1, "n": 3}}}
    rows = [row for row in table.ROWS if row.benchmark == "roofline" and row.target == "<= 0.45"]
    assert all(
        table._cell(
            {row.path.split(" > ")[0]: layer, "sources": {}, "command": ""}, row
        ).startswith("1.000")
        for row in rows
    )
    device = torch.device("cpu")
    sizes = [roofline.Layer(4, "64x8", kind, device).bytes for kind in roofline.KINDS]
    assert sizes == [8 * 2 * 4 * 64 * 64, 8 * 2 * 4 * 64 * 64, 11 * 2 * 4 * 64 * 64]


def on_the_simulated_device(name: str, folder: Path) -> dict[str, Any]:
    accelerator_of_tests.simulate()
    with pytest.MonkeyPatch.context() as patch:
        return measured(name, PARTS[name].tiny, folder, patch)


@pytest.mark.long
@pytest.mark.parametrize("name", ["resnet50", "roofline"])
def test_a_benchmark_runs_on_an_accelerator(name: str, tmp_path: Path) -> None:
    result = on_forked_workers(on_the_simulated_device, name, tmp_path, workers=1)
    assert result["machine"].endswith(" x simulated")
    if name == "resnet50":
        assert not result["failed"]
        assert set(result["peak memory in bytes"]) >= {"plain, graph", "ours", "ours, graph"}


def test_no_round_starts_after_the_time_limit(capsys: pytest.CaptureFixture[str]) -> None:
    times = measuring.take_turns({"a": list, "b": dict}, rounds=5, steps=2, seconds=0)
    assert {name: len(values) for name, values in times.items()} == {"a": 1, "b": 1}
    assert capsys.readouterr().out == "cut: 1 of 5 rounds in 0 seconds\n"
    times = measuring.take_turns({"a": list}, rounds=5, steps=2)
    assert len(times["a"]) == 5


def test_the_operations_of_resnet50_are_those_of_its_layers() -> None:
    """4.089e9 multiply-adds forward; twice as many backward, but none for the image's gradient."""
    images = torch.empty(2, 3, 224, 224, device="meta")
    found = resnet50.operations_per_image(resnet50.network("resnet50", images.device), images)
    first = 64 * 3 * 7 * 7 * 112 * 112
    assert found == pytest.approx(2 * (3 * 4.089e9 - first), rel=1e-3)


SLEEPER = """
import fcntl, os, time
with open(os.environ["NOTE"], "w") as note:
    fcntl.flock(note, fcntl.LOCK_EX)
    print("locked", file=note, flush=True)
    time.sleep(3600)
"""


@pytest.mark.usefixtures("ends")
def test_a_command_above_its_time_limit_is_stopped_with_its_children(
    tmp_path: Path,
) -> None:
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SLEEPER!r}])"
    path = tmp_path / "note"
    outcome = gpu.run([sys.executable, "-c", child], 5, {**os.environ, "NOTE": str(path)})
    assert outcome == "stopped, for it had not ended in 5 seconds"
    with path.open() as note:
        fcntl.flock(note, fcntl.LOCK_EX)  # for as long as it lives, it holds the lock
        assert note.read() == "locked\n"


def test_a_failed_command_is_reported_as_failed() -> None:
    assert gpu.run([sys.executable, "-c", "exit(3)"], 60, dict(os.environ)).startswith(
        "failed with 3 in "
    )


def test_the_scripts_and_tests_of_every_part_are_there() -> None:
    for part in gpu.PARTS:
        for rehearse in (False, True):
            _, _, module, *words = part.command(rehearse=rehearse, share=part.share)
            tests = [word for word in words if word.endswith(".py")]
            assert bool(tests) == (module == "pytest")
            scripts = [f"{module.replace('.', '/')}.py"] if module != "pytest" else []
            assert all((ROOT / file).is_file() for file in (*tests, *scripts))


def test_every_word_that_selects_tests_selects_one() -> None:
    commands = [shlex.split(part.words) for part in gpu.PARTS if " -k " in part.words]
    commands.append(with_apex.TESTS)
    files = {word for words in commands for word in words if word.endswith(".py")}
    collect = [sys.executable, "-m", "pytest", "--collect-only", "-q", *files]
    found = subprocess.run(collect, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    for words in commands:
        for term in words[-1].split(" or "):
            parts = term.split(" and ")
            assert any(all(part in line for part in parts) for line in found.split()), term


def test_parts_that_do_not_fit_the_time_are_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    named = (("a", 8), ("b", 90), ("c", 12), ("d", 4))
    parts = [gpu.Part(name, share, "x --seconds 6", "x") for name, share in named]
    monkeypatch.setattr(gpu, "PARTS", parts)
    monkeypatch.setenv("BENCHMARK_RESULTS", str(tmp_path))
    monkeypatch.setattr(accelerator, "count", lambda: 1)
    shares: list[tuple[float, float]] = []

    def run(command: list[str], share: float, environment: dict[str, str]) -> str:
        shares.append((round(share), round(float(command[-1]))))
        return "done in 1 of 1 seconds"

    monkeypatch.setattr(gpu, "run", run)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--seconds", str(10 + gpu.AROUND)])
    with pytest.raises(SystemExit) as end:
        gpu.main()
    assert not end.value.code
    assert shares == [(8, 6), (10, 5), (4, 6)]
    assert f"b: {gpu.NO_TIME}" in capsys.readouterr().out


def test_what_comes_first_and_the_graphs_each_fit_the_time() -> None:
    shares = {part.name: part.share for part in gpu.PARTS}
    first = list(shares)[: list(shares).index("tests")]
    assert {"norm", "lars", "resnet50", "resnet50_28", "polish", "roofline"} <= set(first)
    for group in (first, [part.name for part in gpu.GRAPH]):
        assert sum(shares[name] for name in group) <= 660 - gpu.AROUND


def test_an_unknown_part_is_named() -> None:
    part = gpu.Part("x", 1, "", "", packages=("json", "no_such_package"))
    assert part.missing() == "not run, not installed: no_such_package"
    assert gpu.Part("x", 1, "", "", packages=("json",)).missing() is None


def test_without_a_gpu_the_error_names_the_rehearsal_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    monkeypatch.setattr(accelerator, "count", lambda: 0)
    with pytest.raises(SystemExit, match="--rehearse"):
        gpu.main()


@pytest.mark.long
def test_every_part_runs_at_tiny_sizes(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--rehearse"])
    with pytest.raises(SystemExit) as end:
        gpu.main()
    assert not end.value.code
    last = capfd.readouterr().out.splitlines()[-len(gpu.PARTS) :]
    assert [line.split(":")[0].strip() for line in last] == list(PARTS)
    assert all(": done in " in line for line in last)
