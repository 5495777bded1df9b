"""A recipe on a cluster: its parts by hand, what limits it, and what is refused."""

import json
import re
from pathlib import Path

import pytest
from short_runs import a_recipe, log

from largebatch import load_recipe, run
from largebatch.cli.main import DONE, main
from largebatch.data.decoders.pixel_cache import LIMIT
from largebatch.errors import LargebatchError, PlanError
from largebatch.lab.planner.cluster import (
    Cluster,
    ClusterError,
    Measured,
    load_cluster,
    parse_cluster,
)
from largebatch.lab.planner.prediction import (
    CACHED_BYTES,
    Prediction,
    describe,
    predict,
    workload,
)
from largebatch.recipe.installed import installed
from largebatch.recipe.model import RESNET50
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.writing import dump_yaml

FUJITSU = "resnet50_86016_fujitsu"
FILES = Path(__file__).parents[3] / "largebatch" / "lab" / "planner" / "clusters"
A100 = (FILES / "dgx-a100.yaml").read_text(encoding="utf-8")

PLANTED = Measured(
    settings={},
    device="cpu",
    seconds_per_image=1e-3,
    seconds_per_pass=2e-3,
    seconds_per_update=3e-3,
    gradient_bytes=1e6,
    messages=3,
    norm_layers=13,
    exchange_seconds=1e-4,
    exchange_gigabytes_per_second=1.0,
    images_per_second_read=2000.0,
)
DIGITS = load_recipe("digits_96")
HERE = Cluster(
    name="here",
    measured=PLANTED.model_copy(update={"settings": workload(DIGITS, workers=1).settings}),
    gpus_per_node=2,
    nodes=1,
    cpu_cores=2,
)


def predicted(recipe: Recipe, cluster: Cluster, *, workers: int) -> Prediction:
    return predict(workload(recipe, workers=workers), cluster)


def test_fujitsus_entry_took_the_time_that_is_predicted() -> None:
    """70.4 s on ABCI, MLPerf v0.6; and 90 % of such runs should lie in the interval."""
    found = predicted(load_recipe(FUJITSU), load_cluster("abci-v100"), workers=2048)
    assert found.steps == 1350
    assert found.low < 70.42 < found.high
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert found.images_per_second == pytest.approx(1350 * 86016 / found.seconds)
    assert not found.extrapolates


def test_the_command_fits_a_screen_and_names_what_limits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["plan", FUJITSU, "--cluster", "abci-v100", "--workers"]
    assert main([*words, "2048"]) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    rows = {line[:15].strip(): line[17:] for line in lines}
    assert rows["time"].startswith("69.7 s, 90% of such runs within 62.8 s to 77.4 s")
    assert rows["limited by"] == "compute"
    assert rows["what helps"].startswith("against launch, 18%")
    assert main([*words, "2048", "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert (found["steps"], round(found["seconds"], 1)) == (1350, 69.7)
    batch = ["--set", "batch.global_batch=4096", "--set", "batch.bn_span=512"]
    assert main([*words, "8", *batch]) == DONE  # in more than a GPU's memory
    assert "limited by  memory" in capsys.readouterr().out


def test_every_installed_recipe_of_resnet50_is_predicted() -> None:
    """On two hosts of eight A100s."""
    names = [name for name in installed() if name.startswith("resnet50_")]
    recipes = [load_recipe(name, ["precision=fp16"]) for name in names]
    # Drop path and blurred convolutions cost time that no published run tells.
    recipes = [
        recipe
        for recipe in recipes
        if recipe.model.name in RESNET50 and "drop_path_rate" not in recipe.model.arguments
    ]
    assert len(recipes) > 30
    for recipe in recipes:
        found = predicted(recipe, load_cluster("dgx-a100"), workers=16)
        assert found.low < found.seconds < found.high
        images = found.steps * recipe.batch.global_batch / found.seconds
        assert found.steps > 500
        side = min([224, *(part.image_size for part in recipe.data.resolution)])
        most = 3400 * (224 / side) ** 2  # as many as a large device batch lets an A100 compute
        assert images < 16 * most


@pytest.mark.parametrize(
    ("workers", "expected"),
    [
        pytest.param(1, 96e-3 + 2e-3 + 3e-3 + 96 / 2000, id="one"),
        pytest.param(2, 48e-3 + 2e-3 + 3e-3 + 48 / 2000 + 3e-4 + 1e-3, id="two"),
        pytest.param(
            4,
            # two on a core; rings of four send 3/2 of the bytes, in twice as many rounds; two
            # workers share the statistics of 13 layers, forward and backward
            2 * (24e-3 + 2e-3 + 3e-3 + 24 / 2000 + 2 * 3e-4 + 1.5e-3 + 26 * 1e-4),
            id="four, two on a core",
        ),
    ],
)
def test_a_measured_machine_is_predicted_from_its_measurements(
    workers: int, expected: float
) -> None:
    found = predicted(load_recipe("digits_96"), HERE, workers=workers)
    assert sum(found.step.values()) == pytest.approx(expected)


def test_too_few_cores_for_torchvision_limit_the_input_and_dali_does_not() -> None:
    cluster = load_cluster("dgx-h100").model_copy(update={"cpu_cores": 16})
    on_cpu, on_gpu, cached = (
        predicted(load_recipe(FUJITSU, overrides), cluster, workers=64)
        for overrides in (
            ["execution.decoder=torchvision"],
            [],
            ["execution.decoder=null", "execution.cache=memory", "data.train_samples=90000"],
        )
    )
    assert on_cpu.help.startswith("against input")
    assert on_cpu.images_per_second == pytest.approx(64 * 2 * 300, rel=0.05)
    assert on_gpu.parts["input"] == cached.parts["input"] == 0
    assert cached.read_bytes_per_second == 0
    assert on_gpu.read_bytes_per_second == pytest.approx(on_gpu.images_per_second * 110_000)


def test_a_generation_without_published_runs_is_named_and_less_certain() -> None:
    recipe = load_recipe(FUJITSU)
    known = predicted(recipe, load_cluster("dgx-a100"), workers=512)
    unknown = predicted(recipe, load_cluster("dgx-b200"), workers=512)
    assert "blackwell" in unknown.extrapolates[0]
    assert unknown.high / unknown.low > 1.15 * known.high / known.low


def test_the_cost_is_of_whole_nodes() -> None:
    cluster = load_cluster("dgx-a100").model_copy(update={"price_per_gpu_hour": 2.0})
    found = predicted(load_recipe(FUJITSU), cluster, workers=2048)
    hours = found.seconds / 3600
    assert found.cost == pytest.approx(2048 * 2.0 * hours)


@pytest.mark.parametrize(
    ("cluster", "workers", "overrides", "message"),
    [
        pytest.param("abci-v10", 8, [], "'abci-v100'", id="unknown"),
        pytest.param("abci-v100", 6144, [], "4,352", id="too many"),
        pytest.param("dgx-a100", 12, [], "8 or 16", id="no whole nodes"),
        pytest.param("dgx-a100", 2000, [], "2,000 workers", id="no division"),
        pytest.param("dgx-a100", 8, ["precision=fp32", "reduction.dtype=fp32"], "fp16", id="fp32"),
        pytest.param("dgx-a100", 8, ["model.name=vgg16"], "--calibrate", id="another model"),
        pytest.param(
            "dgx-a100", 8, ["model.arguments={layers: [3, 8, 36, 3]}"], "layers", id="deeper"
        ),
        pytest.param("/nowhere/a.yaml", 8, [], "/nowhere/a.yaml", id="no file"),
    ],
)
def test_what_cannot_be_predicted_is_refused(
    cluster: str, workers: int, overrides: list[str], message: str
) -> None:
    with pytest.raises(LargebatchError, match=message):
        predicted(load_recipe(FUJITSU, overrides), load_cluster(cluster), workers=workers)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        pytest.param("model.arguments", {"layers": [1, 1, 1, 1]}, id="another depth"),
        pytest.param("data.classes", 1000, id="another classifier"),
        pytest.param("precision", "bf16", id="another type"),
        pytest.param("execution.groups", {"kind": "constant"}, id="other groups"),
    ],
)
def test_another_measurement_than_of_this_recipe_is_refused(key: str, value: object) -> None:
    assert HERE.measured is not None
    changed = HERE.measured.model_copy(
        update={"settings": {**workload(DIGITS, workers=1).settings, key: value}}
    )
    with pytest.raises(ClusterError, match=f"{key}.*--calibrate"):
        predicted(DIGITS, HERE.model_copy(update={"measured": changed}), workers=1)


def test_more_nodes_of_measured_cores_are_refused() -> None:
    two = HERE.model_copy(update={"nodes": 2, "network_gigabytes_per_second": 1.0})
    with pytest.raises(ClusterError, match="measured on CPUs"):
        parse_cluster(dump_yaml(two), source="here.yaml")


@pytest.mark.parametrize(
    ("overrides", "workers", "text"),
    [
        pytest.param(["precision=bf16", "reduction.dtype=bf16"], 2048, "fp16", id="bf16"),
        pytest.param(["data.image_size=128"], 2048, "224 x 224", id="images"),
        pytest.param(["execution.device_batch=21"], 2048, "28 to 208", id="small"),
        pytest.param([], 64, "one micro-batch", id="accumulation"),
        pytest.param(["optimizer={kind: lamb, weight_decay: 0.1}"], 2048, "of lamb", id="LAMB"),
    ],
)
def test_what_no_published_run_has_is_named(overrides: list[str], workers: int, text: str) -> None:
    found = predicted(load_recipe(FUJITSU, overrides), load_cluster("abci-v100"), workers=workers)
    assert any(text in line for line in found.extrapolates)


@pytest.mark.parametrize(
    ("groups", "overlaps"),
    [
        pytest.param("{kind: cubic}", True, id="cubic"),
        pytest.param("{kind: bytes, megabytes: 103}", False, id="all bytes"),
        pytest.param("{kind: bytes, megabytes: 50}", True, id="half of the bytes"),
    ],
)
def test_one_group_of_gradients_is_not_hidden_by_backward(groups: str, overlaps: bool) -> None:
    recipe = load_recipe(FUJITSU, [f"execution.groups={groups}"])
    cluster = load_cluster("dgx1-v100")
    assert (predicted(recipe, cluster, workers=8).step["exchange"] == 0) == overlaps


def test_a_cache_that_the_pipeline_refuses_is_refused() -> None:
    assert CACHED_BYTES == LIMIT
    imagenet = ["execution.decoder=null", "execution.cache=device"]
    with pytest.raises(PlanError, match="193 GB.*69 GB"):
        predicted(load_recipe(FUJITSU, imagenet), load_cluster("dgx-a100"), workers=8)


@pytest.mark.parametrize(
    "stages",
    [
        pytest.param(["clean: {steps: 2}", "statistics: {samples: 480}"], id="clean, statistics"),
        pytest.param(["ema: 0.5", "affine: {steps: 2, lr: 0.05}"], id="EMA, affine"),
        pytest.param(
            ["swa: {over: {steps: 4}, every: {steps: 2}}", "statistics: {samples: 480}"], id="SWA"
        ),
    ],
)
def test_as_many_evaluations_are_counted_as_a_run_makes(stages: list[str], tmp_path: Path) -> None:
    """Against the log; the ends of stages are points on the way as well."""
    recipe = a_recipe(*stages, changes=("evaluation={every_epochs: 0.2}",))
    run(recipe, out=tmp_path / "run")
    made = len(log(tmp_path / "run", "evaluation"))
    assert made > 3
    assert workload(recipe, workers=1).forward[0][1] == made


def test_the_page_has_the_times_and_intervals_that_plan_prints() -> None:
    text = (Path(__file__).parents[3] / "docs" / "planner.md").read_text(encoding="utf-8")
    cluster = load_cluster("abci-v100")

    def printed(recipe: str, workers: int) -> list[str]:
        time = describe(predicted(load_recipe(recipe), cluster, workers=workers))["time"]
        return re.findall(r"[\d.]+ s", time)

    first = re.search(r"prints ([\d.]+ s), 90 % of such runs within ([\d.]+ s) to ([\d.]+ s)", text)
    assert first is not None
    assert list(first.groups()) == printed(FUJITSU, 2048)
    rows = re.findall(r"\| `(\w+)`, ([\d,]+) \|.*\| ([\d.]+ s) \(([\d.]+) to ([\d.]+)\) \|", text)
    assert len(rows) == 2
    for recipe, workers, seconds, low, high in rows:
        expected = printed(recipe, int(workers.replace(",", "")))
        assert [seconds, f"{low} s", f"{high} s"] == expected
