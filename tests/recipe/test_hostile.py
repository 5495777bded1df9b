"""Hostile recipes: each gives one short message, soon, from every command that reads it."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from schedules_of import schedule_of

from largebatch.cli.main import USER, main
from largebatch.errors import LargebatchError, RecipeError
from largebatch.recipe.arithmetic.plan import MAX_EVALUATIONS, make_plan
from largebatch.recipe.loading import parse_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.section import MAX_UPDATES, Section, sections_of

DIGITS = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"
TEXT = DIGITS.read_text()

LIMIT = 2_000
"""Characters of a message."""

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)


def message(text: str, overrides: list[str] | None = None) -> str:
    """Return the message about a recipe that must be refused."""
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, overrides or [], source="r.yaml")
    assert len(str(caught.value)) < LIMIT
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(BOMB, "r.yaml:2: ", id="ten levels of aliases"),
        pytest.param("a: &a [*a]\n", "r.yaml:1: ", id="itself"),
        pytest.param("b: 1\na: " + "[" * 2_000, "r.yaml:2: nested", id="2,000 brackets"),
        pytest.param("a: !!float a\n", "r.yaml:1: ", id="tag"),
        pytest.param("a: !!python/object:os.system 1\n", "r.yaml:1: ", id="object"),
        pytest.param("seed: 2001-09-09\n", "seed: ", id="date"),
        pytest.param(f"seed: {'9' * 5_000}\n", "r.yaml: ", id="5,000 digits"),
        pytest.param('name: "\\ud800"\n', "r.yaml: ", id="half a character"),
        pytest.param(f"? {'k' * 30_000}\n: 1\n", "(30,000 characters)", id="long key"),
        pytest.param("? [1]\n: 2\n", "r.yaml: ", id="a key that is a list"),
        pytest.param(f"name: [{'long, ' * 9_000}]\n", "characters)", id="long value"),
        pytest.param("".join(f"k{n}: 1\n" for n in range(1_000)), "r.yaml: 1,0", id="1,000 keys"),
        pytest.param("%YAML 1.1\n---\nname: on\n", "name: ", id="YAML 1.1"),
    ],
)
def test_a_hostile_recipe_is_one_short_message(text: str, expected: str, ends: None) -> None:
    assert expected in message(text)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("batch.global_batch=18446744073709551616", "less than or equal to 16777216"),
        ("duration={steps: 1000000000000}", "less than or equal to 2000000"),
        ("data.image_size=100000000", "less than or equal to 4096"),
        ("data.train_samples=1000000000000", "less than or equal to 33554432"),
        ("data.crop_aspect=[1.0e-300, 1.0e300]", "greater than or equal to 0.01"),
        ("schedule.peak_lr=1.0e300", "less than or equal to 3e+38"),
        (f"name={'x' * 300}", "name: "),
        (f"a{'.a' * 1_000}=1", "nested"),
        (f"seed={'9' * 5_000}", "--set seed="),
        (f"name={'x' * 70_000}", "--set: "),
        ("model.arguments.a=[&a [x], *a]", "--set model.arguments.a="),
    ],
    ids=lambda text: text[:24],
)
def test_a_hostile_override_is_one_short_message(change: str, expected: str, ends: None) -> None:
    assert expected in message(TEXT, [change])


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


@pytest.mark.parametrize(
    "words",
    [["check"], ["train"]],
    ids=["check", "train"],
)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(pipe, id="pipe"),
        pytest.param(lambda _: Path("/dev/zero"), id="device"),
        pytest.param(lambda path: path.parent, id="folder"),
        pytest.param(lambda _: Path("x" * 5_000), id="long bare name"),
        pytest.param(lambda _: Path("\x1b[2J\u202e.yaml"), id="escapes"),
    ],
)
def test_a_path_that_is_not_a_recipe_is_one_short_printable_message_from_every_command(
    words: list[str],
    make: Callable[[Path], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    ends: None,
) -> None:
    assert main([*words, str(make(tmp_path / "r.yaml"))]) == USER
    shown = capsys.readouterr().err
    assert len(shown) < LIMIT
    assert shown.replace("\n", "").isprintable()


def test_a_recipe_at_the_bounds_is_planned(ends: None) -> None:
    """The most updates there may be, and the most evaluations."""
    changes = [
        *("batch={global_batch: 16777216, bn_span: 16777216}", "data.train_samples=33554432"),
        *(f"duration={{steps: {MAX_UPDATES}}}", "evaluation={every_epochs: 10}"),
        *("polish=null", "schedule.warmup=null", "data.source=synthetic", "data.image_size=4096"),
        "data.eval_resize=null",
    ]
    plan = make_plan(parse_recipe(TEXT, changes), workers=1)
    assert plan.evaluate_after == tuple(range(20, MAX_UPDATES + 1, 20))
    assert len(plan.evaluate_after) == MAX_EVALUATIONS


def judged(text: str, overrides: list[str]) -> None:
    """Check a recipe as the commands do; whatever is wrong with it is the user's to mend."""
    try:
        recipe = parse_recipe(text, overrides)
        make_plan(recipe, workers=1)
        schedule_of(recipe)(0)
    except LargebatchError as error:
        assert 10 < len(str(error)) < LIMIT  # noqa: PT017 -- either outcome is right


def keys_of(section: type[Section], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a recipe."""
    for name, field in section.model_fields.items():
        yield prefix + name
        for below in sections_of(field.annotation):
            yield from keys_of(below, f"{prefix}{name}.")


KEYS = sorted(set(keys_of(Recipe)))
WORDS = sorted({key.rpartition(".")[2] for key in KEYS})


def flow(value: object) -> str:
    """Write a value as JSON does, numbers as YAML does."""
    text = json.dumps(value, ensure_ascii=False)
    return text.replace("Infinity", ".inf").replace("NaN", ".nan")


FUZZ = settings(suppress_health_check=[HealthCheck.too_slow])

YAML = st.text(
    st.sampled_from("abe019 .:-_,'\"\\\n\t[]{}&*!|>%@?#~=+<\x00\x1b\x85\u2028\ufeff\ud800"),
    max_size=60,
)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["lars", "sgd", "tri", "piecewise", 0, 1e-320, 1e308, -0.0, 2**63, 1e16])
)


@FUZZ
@given(YAML)
@example("!!float a")
@example("2001-99-99")
@example("? [a]\n: b")
@example("&a [*a]")
@example("!!str {a: 1}")
@example("! a: 1")
@example("%TAG ! a\n--- !b c")
@example("--- a\n--- b")
@example("a: |99\n b")
@example("\ufeff\ufeff")
@example("<<: 1")
@example("!<tag:yaml.org,2002:int> 0x")
def test_any_text_is_a_recipe_or_one_message(text: str) -> None:
    judged(text, [])
    judged(TEXT, [f"model.arguments.a={text}", f"{text}=1"])
    judged(f"{TEXT}{text}", [])


@FUZZ
@given(st.data())
def test_any_value_under_any_key_is_a_recipe_or_one_message(data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.sampled_from(KEYS), min_size=1, max_size=4))
    values = st.recursive(
        SCALARS,
        lambda below: (
            st.lists(below, max_size=3) | st.dictionaries(st.sampled_from(WORDS), below, max_size=3)
        ),
        max_leaves=6,
    )
    judged(TEXT, [f"{key}={flow(data.draw(values))}" for key in keys])
