import re
from pathlib import Path

import pytest

from largebatch.cli.main import DONE, USER, main
from largebatch.errors import RecipeError
from largebatch.recipe.installed import installed
from largebatch.recipe.loading import load_recipe

DIGITS = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"


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


def test_recipes_are_listed_by_data_set_with_measured_ones_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["recipes"]) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    heads = [line for line in lines if re.match(r"\w+ \(", line)]
    assert heads == [
        "quickstart (embedded, needs no --data)",
        "cifar10 (needs --data DIR)",
        "fashion_mnist (needs --data DIR)",
        "imagenet (needs --data DIR)",
        "imagenette (needs --data DIR)",
    ]
    start = lines.index("cifar10 (needs --data DIR)")
    rows = [line.split() for line in lines[start + 1 : start + 8]]
    assert rows[0] == ["cifar10_airbench_2000", "2,000", "8.0", "94.03", "%", "top-1"]
    assert [row[0] for row in rows[1:]] == [
        "cifar10_airbench_2000_nesterov",
        "cifar10_resnet9_128",
        "cifar10_resnet9_1600",
        "cifar10_quick_128",
        "cifar10_resnet8_128",
        "cifar10_resnet8_3200",
    ]
    names = [line.split()[0] for line in lines[1:] if line.startswith("  ")]
    assert set(names) == set(installed())
    batches = [int(name.split("_")[1]) for name in names if name.startswith("resnet50_")]
    assert len(batches) > 20
    assert batches == sorted(batches)


def test_a_wide_terminal_shows_more_of_where_a_recipe_comes_from(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["recipes"]) == DONE
    shown = capsys.readouterr().out
    assert "after MLPerf Training's reference convergence point for 1,632\n" in shown


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("digit_96", "digit_96: neither a file nor an installed recipe; did you mean 'digits_96'"),
        ("x", "x: neither a file nor an installed recipe; `largebatch recipes` lists them"),
        ("digits_96.yaml", "digits_96.yaml: cannot read the recipe: No such file"),
        ("recipes/digits_96", "recipes/digits_96: cannot read the recipe: No such file"),
    ],
)
def test_another_name_is_answered_with_the_nearest(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as caught:
        load_recipe(name)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("name", ["store", "./store", "data/store.1", "."])
def test_a_folder_of_images_is_answered_with_where_it_belongs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).mkdir(parents=True, exist_ok=True)
    path = Path(name)
    with pytest.raises(RecipeError) as caught:
        load_recipe(name)
    assert str(caught.value) == (
        f"{path}: a folder, expected a recipe; a command on its images takes RECIPE --data {path}, "
        f"and `largebatch init {path}` writes a recipe for them"
    )


def test_the_folder_of_a_run_is_answered_with_its_recipe(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("name: a", encoding="utf-8")
    with pytest.raises(RecipeError, match="a folder, expected a recipe; it holds one: .*/recipe"):
        load_recipe(tmp_path)


def test_an_installed_recipe_is_found_beside_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("digits_96").mkdir()
    assert load_recipe("digits_96").name == "digits-96"


def test_a_copy_never_overwrites(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.yaml"
    assert main(["recipes", "copy", "digits_96", "--out", str(out)]) == DONE
    assert out.read_text() == DIGITS.read_text()
    out.write_text("changed")
    assert main(["recipes", "copy", "digits_96", "--out", str(out)]) == USER
    assert f"{out}: cannot write the recipe: File exists" in capsys.readouterr().err
    assert out.read_text() == "changed"
