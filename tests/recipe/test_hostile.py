"""Recipes that were written to do harm: each is one short message, soon, whatever command reads it.

The inputs are those that hung, filled the memory or gave a traceback once, and others like them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from schedules_of import schedule_of

from largebatch.cli.main import DONE, USER, main
from largebatch.errors import LargebatchError, RecipeError
from largebatch.recipe.arithmetic.plan import MAX_EVALUATIONS, make_plan
from largebatch.recipe.loading import MAX_LENGTH, load_recipe, parse_recipe
from largebatch.recipe.recipe import Recipe
from largebatch.recipe.section import MAX_UPDATES, Section, sections_of

DIGITS = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"
TEXT = DIGITS.read_text()

LIMIT = 2_000
"""Characters of a message."""

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)

LARGE_BOMB = f"a: &a {'x' * 60_000}\nb: [{', '.join(['*a'] * 1_000)}]\n"

COMMANDS = pytest.mark.parametrize(
    "words",
    [["check"], ["plan"], ["explain", "--schedule"], ["train"]],
    ids=["check", "plan", "explain", "train"],
)


def message(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what a command prints that must fail for the user's reason."""
    assert main(words) == USER
    shown = capsys.readouterr().err
    assert shown.startswith("largebatch: ")
    assert len(shown) < LIMIT
    assert shown.replace("\n", "").isprintable()
    return shown


@COMMANDS
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(BOMB, "too long for a recipe", id="ten levels of aliases"),
        pytest.param(LARGE_BOMB, "when its aliases are written out", id="a long alias"),
        pytest.param("a: &a [*a]\n", "a section contains itself", id="itself"),
        pytest.param("a: " + "[" * 2_000, "lie in each other", id="2,000 brackets"),
        pytest.param("a: " + "[" * 40 + "]" * 40, "lie in each other", id="40 brackets"),
        pytest.param("a: !!float a\n", ":1: 'a' is no float", id="float"),
        pytest.param("a: !!int ''\n", ":1: '' is no int", id="int"),
        pytest.param("\na: !!bool maybe\n", ":2: 'maybe' is no bool", id="bool"),
        pytest.param("a: !!int [1]\n", "expected a scalar node", id="a list as int"),
        pytest.param("seed: 2001-99-99\n", 'valid integer, got "2001-99-99"', id="date"),
        pytest.param(f"seed: {'9' * 5_000}\n", "is no int", id="5,000 digits"),
        pytest.param(f"seed: 0x{'f' * 5_000}\n", "is no int", id="5,000 hexadecimal digits"),
        pytest.param('"\\e[31m": 1\n', "is no str", id="escape in a key"),
        pytest.param('name: "\\e]0;x\\a"\n', "is no str", id="escape in a value"),
        pytest.param('name: "\\ud800"\n', "is no str", id="half a character"),
        pytest.param("name: \x1b[31m\n", "not YAML: unacceptable character", id="escape"),
        pytest.param("a: !!binary aGk=\n", "could not determine a constructor", id="binary"),
        pytest.param("a: !!set {b}\n", "could not determine a constructor", id="set"),
        pytest.param(f"? {'k' * 30_000}\n: 1\n", "(30,000 characters)", id="long key"),
        pytest.param(f"name: [{'long, ' * 9_000}]\n", "characters)", id="long value"),
        pytest.param("".join(f"k{n}: 1\n" for n in range(1_000)), "problems", id="1,000 keys"),
        pytest.param("#" * (MAX_LENGTH + 1), "at most 65,536 bytes", id="long file"),
        pytest.param("%YAML 1.1\n---\nname: on\n", "name: input should be a valid", id="YAML 1.1"),
    ],
)
def test_a_hostile_recipe_is_one_short_message_from_every_command(
    words: list[str],
    text: str,
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    ends: None,
) -> None:
    path = tmp_path / "r.yaml"
    path.write_text(text)
    assert expected in message([*words, str(path)], capsys)


@COMMANDS
@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("batch.global_batch=18446744073709551616", "less than or equal to 16777216"),
        ("duration={epochs: 1.0e9}", "less than or equal to 1000000"),
        ("duration={epochs: 200000}", "are 2,993,750 updates, expected at most 2,000,000"),
        ("duration={steps: 1000000000000}", "less than or equal to 2000000"),
        ("evaluation={every_epochs: 1, offset_epochs: 1.0e308}", "less than or equal to 1000000"),
        ("data.image_size=100000000", "less than or equal to 4096"),
        ("data.classes=1000000000", "less than or equal to 100000"),
        ("data.train_samples=1000000000000", "less than or equal to 33554432"),
        ("data.crop_aspect=[1.0e-300, 1.0e300]", "greater than or equal to 0.01"),
        ("schedule.peak_lr=1.0e300", "less than or equal to 3e+38"),
        ("optimizer.weight_decay=1.0e300", "less than or equal to 3e+38"),
        ("execution.groups={kind: constant, tensors: 99999999999999999999}", "less than or equal"),
        (f"name={'x' * 300}", "at most 100 characters"),
        (f"a{'.a' * 1_000}=1", "lie in each other"),
        ("a=\x1b[31m", r"\x1b"),
        ("\x1b[31m=1", r"\x1b[31m: unknown key"),
        ('name="\\e[31m"', "is no str"),
        ("name=!!float a", "--set name=!!float a:1: 'a' is no float"),
        (f"seed={'9' * 5_000}", "is no int"),
        (f"name={'x' * 70_000}", "more than 65,536 characters; write them into a recipe"),
        (f"seed.{'a' * 9_000}=1", "not a section"),
    ],
    ids=lambda text: text[:24].replace("\x1b", "ESC"),
)
def test_a_hostile_override_is_one_short_message_from_every_command(
    words: list[str],
    change: str,
    expected: str,
    capsys: pytest.CaptureFixture[str],
    ends: None,
) -> None:
    assert expected in message([*words, str(DIGITS), "--set", change], capsys)


def test_a_bomb_in_an_override_is_defused() -> None:
    levels = ["&a0 [x, x, x, x, x, x, x, x, x, x]"]
    levels += [f"&a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    with pytest.raises(RecipeError, match="too long for a recipe"):
        parse_recipe(TEXT, [f"model.arguments.a=[{', '.join(levels)}]"])


def test_an_override_changes_one_of_two_sections_that_are_written_once() -> None:
    text = TEXT.replace("warmup: {epochs: 5}", "warmup: &five {epochs: 5}")
    text = text.replace("clean: {epochs: 5}", "clean: *five")
    assert "&five" in text
    assert "*five" in text
    recipe = parse_recipe(text, ["schedule.warmup.epochs=3"])
    assert recipe.schedule.warmup is not None
    assert recipe.polish is not None
    assert recipe.polish.clean is not None
    assert (recipe.schedule.warmup.epochs, recipe.polish.clean.epochs) == (3, 5)


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


@COMMANDS
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        pytest.param(pipe, "a recipe is a file, this is a pipe", id="pipe"),
        pytest.param(lambda _: Path("/dev/zero"), "this is a pipe or a device", id="device"),
        pytest.param(lambda path: path.parent, "a folder, expected a recipe", id="folder"),
        pytest.param(lambda path: path / ("x" * 5_000), "File name too long", id="long name"),
        pytest.param(
            lambda _: Path("x" * 5_000), "neither a file nor an inst", id="long bare name"
        ),
        pytest.param(lambda _: Path("\x1b[2J\u202e.yaml"), r"\x1b[2J\u202e.yaml", id="escapes"),
        pytest.param(lambda _: Path("\udcff.yaml"), r"\udcff.yaml: cannot read", id="no UTF-8"),
    ],
)
def test_what_is_no_file_of_a_recipe_is_refused(
    words: list[str],
    make: Callable[[Path], Path],
    expected: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    ends: None,
) -> None:
    path = make(tmp_path / "r.yaml")
    assert expected in message([*words, str(path)], capsys)


def test_a_sparse_file_of_gigabytes_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "r.yaml"
    with path.open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(RecipeError, match="too long for a recipe"):
        load_recipe(path)


def test_a_name_that_a_terminal_would_obey_is_escaped_where_all_is_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "\x1b[31m\udcff.yaml"
    path.write_text(TEXT)
    assert main(["check", str(path)]) == DONE
    shown = capsys.readouterr().out
    assert shown.endswith("\\x1b[31m\\udcff.yaml: ok\n")


@pytest.mark.parametrize(
    "words",
    [["check", "--\x1b[31m" + "x" * 3_000], ["plan", "r", "--workers", "\x1b" + "9" * 5_000]],
    ids=["option", "number"],
)
def test_arguments_are_quoted_in_part_and_escaped(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == USER
    shown = capsys.readouterr().err
    assert len(shown) < LIMIT
    assert "\x1b" not in shown


def test_a_key_to_explain_is_quoted_in_part_and_escaped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = message(["explain", "\x1b[31m" + "optimizer." * 3_000], capsys)
    assert "no recipe has the key" in shown


def test_many_broken_recipes_are_one_short_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [tmp_path / f"{n}.yaml" for n in range(50)]
    for path in paths:
        path.write_text("".join(f"{'k' * 200}{n}: 1\n" for n in range(20)))
    assert "0.yaml: " in message(["check", *map(str, paths)], capsys)


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


def test_a_gigabyte_is_more_than_a_bomb_may_take(tmp_path: Path) -> None:
    """In a process whose memory is bounded, so that only what the recipe takes can be missing."""
    path = tmp_path / "r.yaml"
    path.write_text(BOMB)
    program = (
        "import resource, sys; from largebatch.cli.main import main; "
        "resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)); "
        f"sys.exit(main(['check', {str(path)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == USER, done.stderr


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
@example("!!int ''")
@example("!!bool maybe")
@example("2001-99-99")
@example("? [a]\n: b")
@example("&a [*a]")
@example("*a")
@example("!!map [a]")
@example("!!seq {a: 1}")
@example("!!str {a: 1}")
@example("! a: 1")
@example("%YAML 9.9\n--- a")
@example("%TAG ! a\n--- !b c")
@example("--- a\n--- b")
@example("a: |99\n b")
@example("\ufeff\ufeff")
@example("!!null a: 1")
@example("a: !!timestamp b")
@example("<<: 1")
@example("!<tag:yaml.org,2002:int> 0x")
@example("0b")
@example("-.inf: .nan")
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
