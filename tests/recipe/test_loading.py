from pathlib import Path

import pytest

from largebatch.errors import RecipeError
from largebatch.recipe.loading import load_recipe, parse_recipe
from largebatch.recipe.optimizers import LARS
from largebatch.recipe.writing import dump_commented, dump_yaml

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
    assert parse_recipe(dump_yaml(recipe)) == recipe


def test_numbers_are_read_as_yaml_1_2_does() -> None:
    text = DIGITS.read_text().replace("weight_decay: 1e-4", "weight_decay: 1e-4 # a number")
    recipe = parse_recipe(text, ["seed=1_000", "data.train_samples=1437"])
    assert isinstance(recipe.optimizer, LARS)
    assert recipe.optimizer.weight_decay == 1e-4
    assert recipe.seed == 1000
    assert parse_recipe(DIGITS.read_text(), ["name=on"]).name == "on"  # YAML 1.1: true


def test_an_override_can_open_a_section_that_was_null() -> None:
    recipe = load_recipe(DIGITS, ["polish=null", "polish.clean.epochs=2"])
    assert recipe.polish is not None
    assert recipe.polish.clean is not None
    assert recipe.polish.clean.epochs == 2


def test_every_mistake_is_reported_at_once_with_the_nearest_key() -> None:
    message = problems(
        ["schedule.decay.pwer=1", "duration.epochs=0", "optimizer.kind=adam", "speed=1"]
    )
    head, *lines = message.splitlines()
    assert head == "recipe: 4 problems"
    assert [(line.split(":")[0].strip(), line.rpartition(" ")[2]) for line in lines] == [
        ("duration.epochs", "0"),
        ("optimizer.kind", "'adamw'?"),
        ("schedule.decay.pwer", "'power'?"),
        ("speed", "'seed'?"),
    ]


@pytest.mark.parametrize(
    ("overrides", "key", "part"),
    [
        (["optimizer.eta=-1"], "optimizer.eta", "-1"),
        (["optimizer.kind=larz"], "optimizer.kind", "did you mean 'lars'?"),
        (["optimizer.lr=1"], "optimizer.lr", "did you mean 'schedule.peak_lr'?"),
        (["data.aa=rand-m9"], "data.aa", "did you mean 'data.augment.kind'?"),
        (["data.reprob=0.1"], "data.reprob", "did you mean 'data.erase.probability'?"),
        (["data.augment.magnitude=9"], "data.augment.kind", "missing; give one of: rand_augment"),
        (["loss={kind: binary_cross_entropy}"], "loss.kind", "did you mean 'bce'?"),
        (["seed='1'"], "seed", '"1"'),
        (["data.flip=1"], "data.flip", "1"),
        (["optimizer={eta: 1.0}"], "optimizer.kind", "missing"),
        (
            ["schedule={warmup: {epochs: 1}, decay: {kind: constant}}"],
            "schedule.peak_lr",
            "schedule.KEY",
        ),
        (["schedule.warmup={epochs: 1, steps: 1}"], "schedule.warmup", "epochs or steps"),
        (["batch.global_batch=64"], "batch", "multiple of bn_span (48)"),
        (["batch={global_batch: 97, bn_span: 2}"], "batch", "such as 96"),
        (
            ["batch.schedule=[{after: {epochs: 1}, global_batch: 100, lr_factor: 1}]"],
            "batch",
            "schedule.0.global_batch (100)",
        ),
        (["data.crop_area=[1, 0.5]"], "data", "crop_area"),
        (["data.eval_resize=8"], "data", "eval_resize (8)"),
        (["polish={}"], "polish", "at least one"),
        (["polish.affine={epochs: 1}"], "polish.affine.lr", "missing"),
        (["evaluation={offset_epochs: 1}"], "evaluation", "offset_epochs"),
        (["seed=99999999999999999999"], "seed", "less than"),
        (["schedule.peak_lr=.inf"], "schedule.peak_lr", "finite"),
        (["tracking=[aim]"], "tracking.trackers.0", "'wandb'"),
        (["name=a/b"], "name", "pattern"),
        (["execution.cache=disk"], "execution.cache", "'memory'"),
        # Conflicts between sections, whose lines start with the keys.
        (["polish.statistics.samples=2000"], "polish.statistics.samples (2000)", "(1437)"),
        (["batch.bn_span=null"], "polish.statistics", "batch.bn_span"),
        (["polish={swa: {over: {steps: 9}, every: {steps: 3}}}"], "polish.swa", "statistics"),
        (["reduction.dtype=fp16"], "reduction.dtype", "precision"),
        (["loss.label_smoothing=0.95"], "loss.label_smoothing (0.95)", "10 classes"),
        (["data.source=synthetic", "execution.cache=memory"], "execution.cache", "synthetic"),
        (["execution={decoder: dali, cache: memory}"], "execution", "dali"),
        (["execution={reads: 20, cache: memory}"], "execution", "reads"),
        (["data.held_out={samples: 2000}"], "data.held_out.samples (2000)", "(1437)"),
        (["polish.keep=better", "polish.held_out=2000"], "polish.held_out (2000)", "(1437)"),
    ],
)
def test_a_problem_names_its_key_and_what_was_expected(
    overrides: list[str], key: str, part: str
) -> None:
    head, *lines = problems(overrides).splitlines()
    assert head == "recipe: 1 problem"
    assert lines[0].strip().startswith(key)
    assert part in lines[0]


@pytest.mark.parametrize("override", ["seed", "=1", "seed.a=1", "seed=[1"])
def test_an_override_that_is_not_an_assignment_is_named(override: str) -> None:
    assert problems([override]).startswith(f"--set {override}")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a: 1\nb: 2\na: 3\n", 'recipe:3: found duplicate key "a"'),
        ("- 1\n- 2\n", "recipe: "),
        ("# none\n", "recipe: "),
        ("a: [1\n", "recipe:2: "),
        ("a: &a {b: 1}\nc: {<<: *a}\n", "recipe:2: "),
    ],
)
def test_yaml_is_read_strictly(text: str, place: str) -> None:
    assert problems([], text).startswith(place)


def test_a_recipe_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no\.yaml"):
        load_recipe(tmp_path / "no.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9")
    with pytest.raises(RecipeError, match=r"latin\.yaml.*UTF-8"):
        load_recipe(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("overrides", "left_out"),
    [
        (["schedule.decay.kind=cosine"], "power"),
        (["optimizer.kind=sgd"], "convention, eta"),
        (["loss.kind=bce"], "off_target"),
        (
            ["execution.groups={kind: bytes, megabytes: 3}", "execution.groups.kind=cubic"],
            "megabytes",
        ),
        (["schedule.decay.kind=polynomial"], None),
    ],
)
def test_another_kind_leaves_out_what_only_the_one_before_had(
    overrides: list[str], left_out: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = load_recipe(DIGITS, overrides)
    assert parse_recipe(dump_yaml(recipe)) == recipe
    kind = overrides[-1].partition("=")[2]
    said = [f"--set {overrides[-1]}: dropped {left_out}, which {kind} does not use"]
    assert caplog.messages == (said if left_out else [])


def test_a_key_of_neither_kind_stays_an_error() -> None:
    text = DIGITS.read_text().replace("power: 2.0", "pwoer: 2.0")
    assert "schedule.decay.pwoer: unknown key" in problems(["schedule.decay.kind=cosine"], text)


PIECES = ", ".join(
    f"{{length: {{steps: {steps}}}, peak_lr: 0.25, decay: {{kind: exp, gamma: 0.999}}}}"
    for steps in (100, 90, 80, 70)
)
LAST = "{length: null, peak_lr: 0.5, decay: {kind: constant}}"


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param([], id="usual"),
        pytest.param(["name='2024'", "model.name='null'", "tracking=[wandb]"], id="strings"),
        pytest.param(["tracking={trackers: wandb, tags: [a], notes: 'b: c'}"], id="tracking"),
        pytest.param(
            [f"schedule.decay={{kind: piecewise, pieces: [{PIECES}, {LAST}]}}"], id="long value"
        ),
        pytest.param(["data.resolution=[{until: null, image_size: 4}]"], id="lists"),
        pytest.param(["evaluation={}", "execution={}"], id="empty sections"),
    ],
)
def test_a_commented_recipe_is_read_as_it_was(changes: list[str]) -> None:
    recipe = load_recipe(DIGITS, changes)
    comments = {"seed": "one", "schedule": "two: three", "schedule.peak_lr": "# 4", "loss": "5"}
    text = dump_commented(recipe, comments, header=["name: none", ""])
    assert parse_recipe(text) == recipe
    assert all(len(line) <= 140 for line in text.splitlines())


def test_an_installed_recipe_is_found_by_its_name_unless_there_is_such_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe("digits_96") == load_recipe(DIGITS)
    (tmp_path / "digits_96").mkdir()
    assert load_recipe("digits_96", ["seed=3"]).seed == 3
    (tmp_path / "digits_96").rmdir()
    (tmp_path / "digits_96").write_text(DIGITS.read_text().replace("seed: 1", "seed: 2"))
    assert load_recipe("digits_96").seed == 2


def test_a_change_of_the_machine_is_validated_like_a_recipe() -> None:
    recipe = load_recipe(DIGITS, ["protocol={kind: hardsync, learners: 2}"])
    with pytest.raises(ValueError, match="protocol"):
        recipe.with_execution(device_batch=24)


@pytest.mark.parametrize(
    "changes",
    [
        ["tracking=wandb", "tracking.tags=a"],
        ["tracking.tags=[a]", "tracking=[wandb]"],
        ["tracking=[mlflow]", "tracking={trackers: [wandb], tags: [a]}"],
    ],
)
def test_a_list_of_trackers_leaves_the_other_keys_of_the_section(changes: list[str]) -> None:
    tracking = load_recipe(DIGITS, changes).tracking
    assert (tracking.trackers, tracking.tags) == (("wandb",), ("a",))
    assert not tracking.remark


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        (["tracking={trackers: [mlflow], name: a}"], ""),
        (["tracking.name=a"], "tracking.name"),
        (["tracking={trackers: [mlflow], entity: us}"], "tracking.entity"),
        (["tracking.tags=a"], "tracking.tags"),
        (["tracking={trackers: [tensorboard], entity: us}"], "tracking.entity"),
    ],
)
def test_keys_that_no_tracker_reads_are_remarked_on(changes: list[str], key: str) -> None:
    remark = load_recipe(DIGITS, changes).tracking.remark
    assert key in remark
    assert bool(remark) == bool(key)


def test_runs_that_differ_only_in_seed_and_machine_are_one_group() -> None:
    first, *others = (
        load_recipe(DIGITS, [change]).group
        for change in ("seed=1", "seed=2", "execution.device_batch=48", "schedule.peak_lr=0.25")
    )
    assert [group == first for group in others] == [True, True, False]
    assert load_recipe(DIGITS, ["tracking.group=mine"]).group == "mine"
