from pathlib import Path

import pytest

from largebatch.errors import RecipeError
from largebatch.recipe.loading import load_recipe, parse_recipe
from largebatch.recipe.optimizers import LARS
from largebatch.recipe.writing import dump_recipe

RECIPES = sorted((Path(__file__).parents[2] / "recipes").rglob("*.yaml"))
DIGITS = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"


def problems(overrides: list[str], text: str | None = None) -> str:
    """Return the message about the digits recipe with these changes."""
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text or DIGITS.read_text(), overrides)
    return str(caught.value)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_and_survives_being_written_out(path: Path) -> None:
    recipe = load_recipe(path)
    assert parse_recipe(dump_recipe(recipe)) == recipe


def test_there_are_the_recipes_the_readme_names() -> None:
    names = {path.stem for path in RECIPES}
    assert names >= {"digits_96", "resnet50_86016_fujitsu", "resnet50_32768_mlperf"}


def test_numbers_are_read_as_yaml_1_2_does() -> None:
    text = DIGITS.read_text().replace("weight_decay: 1e-4", "weight_decay: 1e-4 # a number")
    recipe = parse_recipe(text, ["seed=1_000", "data.train_samples=1437"])
    assert isinstance(recipe.optimizer, LARS)
    assert recipe.optimizer.weight_decay == 1e-4
    assert recipe.seed == 1000
    assert parse_recipe(DIGITS.read_text(), ["name=on"]).name == "on"  # YAML 1.1: true


def test_an_override_is_judged_like_the_file() -> None:
    assert load_recipe(DIGITS, ["optimizer.eta=0.5"]).optimizer.eta == 0.5  # type: ignore[union-attr]  # lars
    assert problems(["optimizer.eta=-1"]) == (
        "recipe: 1 problem\n  optimizer.eta: input should be greater than 0, got -1"
    )


def test_an_override_can_open_a_section_that_was_null() -> None:
    recipe = load_recipe(DIGITS, ["polish=null", "polish.clean.epochs=2"])
    assert recipe.polish is not None
    assert recipe.polish.clean is not None
    assert recipe.polish.clean.epochs == 2


KINDS = "'lars', 'sgd', 'shampoo', 'schedule-free', 'lamb', 'adamw', 'muon'"


def test_every_mistake_is_reported_at_once_with_the_nearest_key() -> None:
    message = problems(
        ["schedule.decay.pwer=1", "duration.epochs=0", "optimizer.kind=adam", "speed=1"]
    )
    assert message.splitlines() == [
        "recipe: 4 problems",
        "  duration.epochs: input should be greater than 0, got 0",
        f"  optimizer.kind: expected one of {KINDS}, got 'adam'; did you mean 'adamw'?",
        "  schedule.decay.pwer: unknown key; did you mean 'power'?",
        "  speed: unknown key; did you mean 'seed'?",
    ]


@pytest.mark.parametrize(
    ("override", "meant"),
    [
        ("optimizer.kind=larz", "'lars'"),
        ("precision=bf1", "'bf16'"),
        ("optimizer.convention=refrence", "'reference'"),
        ("schedule.decay.kind=cosin", "'cosine'"),
    ],
)
def test_a_wrong_word_is_answered_with_the_nearest_choice(override: str, meant: str) -> None:
    assert problems([override]).endswith(f"; did you mean {meant}?")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed='1'"], 'seed: input should be a valid integer, got "1"'),
        (["data.flip=1"], "data.flip: input should be true, false or 'alternating', got 1"),
        (["optimizer={eta: 1.0}"], "optimizer.kind: missing"),
        (["schedule.warmup={}"], "schedule.warmup: give either epochs or steps"),
        (["schedule.warmup={epochs: 1, steps: 1}"], "give either epochs or steps"),
        (
            ["batch.global_batch=64"],
            "batch: global_batch (64) must be a multiple of bn_span (48); bn_span: 32 divides it",
        ),
        (["batch.global_batch=106"], "must be a multiple of bn_span (48); the nearest one is 96"),
        (["batch.global_batch=61"], "must be a multiple of bn_span (48); the nearest one is 48"),
        (
            ["batch={global_batch: 97, bn_span: 2}"],
            "multiple of bn_span (2); the nearest one is 96",
        ),
        (["batch.global_batch=7"], "must be a multiple of bn_span (48); the nearest one is 48"),
        (
            ["batch.schedule=[{after: {epochs: 1}, global_batch: 100, lr_factor: 1}]"],
            "schedule.0.global_batch (100) must be a multiple of bn_span (48); the nearest one is",
        ),
        (["data.crop_area=[1, 0.5]"], "crop_area: the first bound must not exceed the second"),
        (["data.eval_resize=8"], "eval_resize (8) must be at least image_size (32)"),
        (
            ["polish={}"],
            "polish: give at least one of clean, ema, swa, affine and statistics",
        ),
        (["polish.statistics.samples=2000"], "(2000) must not exceed data.train_samples (1437)"),
        (
            ["polish.statistics_samples=9"],
            "polish.statistics_samples: unknown key; did you mean 'st",
        ),
        (["polish.affine={epochs: 1}"], "polish.affine.lr: missing"),
        (["polish.affine={lr: 1}"], "polish.affine: give either epochs or steps"),
        (["polish.ema=1"], "polish.ema: input should be less than 1, got 1"),
        (["batch.bn_span=null"], "polish is for models with BatchNorm"),
        (["reduction.dtype=fp16"], "reduction.dtype: fp16 needs precision: fp16"),
        (["loss.label_smoothing=0.95"], "makes the labelled one of 10 classes the least likely"),
        (
            ["schedule={peak_lr: 1, warmup: null, start_lr: 1, decay: {kind: constant}}"],
            "give warmup",
        ),
        (["evaluation={offset_epochs: 1}"], "offset_epochs shifts every_epochs: give that too"),
        (["seed=99999999999999999999"], "seed: input should be less than"),
        (["schedule.peak_lr=1e999"], "schedule.peak_lr: input should be a finite number"),
        (
            ["tracking=[aim]"],
            "tracking.0: input should be 'wandb', 'tensorboard', 'mlflow' or 'mlperf', got",
        ),
        (["monitor=[noise_scale, loss]"], "monitor.1: input should be 'noise_scale', 'gradient_n"),
        (["name=a/b"], "name: string should match pattern"),
        (["schedule.peak_lr=.inf"], "schedule.peak_lr: input should be a finite number, got Inf"),
        (["workers=2"], "workers: unknown key"),
        (["seed"], "--set seed: expected KEY=VALUE, such as optimizer.eta=0.002"),
        (["=1"], "--set =1: expected KEY=VALUE"),
        (["seed.a=1"], "--set seed.a=1: seed is 1, not a section"),
        (["seed=[1"], "--set seed=[1:1: expected ',' or ']'"),
    ],
)
def test_the_message_says_what_is_wrong(overrides: list[str], message: str) -> None:
    assert message in problems(overrides)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", 'recipe:3: found duplicate key "a"'),
        (
            "- 1\n- 2\n",
            "recipe: a recipe is a mapping of sections, found list; `largebatch recipes",
        ),
        (
            "# none\n",
            "recipe: a recipe is a mapping of sections, found nothing; `largebatch recipes",
        ),
        ("a: [1\n", "recipe:2: expected ',' or ']'"),
        ("? [1]\n: 2\n", "recipe:1: key [1] is not a word"),
        ("a: &a {b: 1}\nc: {<<: *a}\n", "recipe:2: write << out"),
        ("a: &a [*a]\n", "or a section contains itself"),
        ("1: 2\n", "recipe:1: key 1 is not a word"),
        ("a: !!python/object:os.system 1\n", "could not determine a constructor"),
    ],
)
def test_yaml_is_read_strictly(text: str, message: str) -> None:
    assert message in problems([], text)


def test_a_recipe_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no.yaml: cannot read the recipe: No such file"):
        load_recipe(tmp_path / "no.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9")
    with pytest.raises(RecipeError, match="latin.yaml: a recipe is UTF-8 text"):
        load_recipe(tmp_path / "latin.yaml")


def test_a_recipe_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_recipe(DIGITS).seed = 2  # type: ignore[misc]  # wrong on purpose


@pytest.mark.parametrize(
    ("overrides", "left_out"),
    [
        (["schedule.decay.kind=cosine"], "power"),
        (["optimizer.kind=sgd"], "convention, eta"),
        (
            ["execution.groups={kind: constant, tensors: 3}", "execution.groups.kind=cubic"],
            "tensors",
        ),
        (["schedule.decay.kind=polynomial"], None),
    ],
)
def test_another_kind_leaves_out_what_only_the_one_before_had(
    overrides: list[str], left_out: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = load_recipe(DIGITS, overrides)
    assert parse_recipe(dump_recipe(recipe)) == recipe
    kind = overrides[-1].partition("=")[2]
    said = [f"--set {overrides[-1]}: dropped {left_out}, which {kind} does not use"]
    assert caplog.messages == (said if left_out else [])


def test_a_key_of_neither_kind_stays_an_error() -> None:
    text = DIGITS.read_text().replace("power: 2.0", "pwoer: 2.0")
    assert "schedule.decay.pwoer: unknown key" in problems(["schedule.decay.kind=cosine"], text)
