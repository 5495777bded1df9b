from pathlib import Path

import pytest

from largebatch.cli.main import main
from largebatch.errors import RecipeError
from largebatch.recipe.loading import load_recipe

DIGITS = Path(__file__).parents[2] / "recipes" / "digits_96.yaml"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["source=synthetic", "cache=memory"], "cache: memory keeps decoded pictures, and these"),
        (["cache=device", "eval_decoder=dali"], "eval_decoder: dali would not be used: cache"),
        (["antialias=false", "decoder=torchvision"], "antialias: false can only be done by"),
        (["antialias=false", "decoder=dali", "eval_decoder=torchvision"], "only be done by"),
        (["antialias=false", "decoder=dali", "cache=memory"], "only be done by decoder: dali"),
        (["interpolation=nearest"], "interpolation: input should be 'bilinear' or 'bicubic'"),
        (["cache=disk"], "cache: input should be 'memory' or 'device'"),
    ],
)
def test_what_nobody_can_do_is_refused_by_name(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(DIGITS, [f"data.{override}" for override in overrides])
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "decoded by torchvision\n"),
        (["eval_decoder=torchvision"], "decoded by torchvision\n"),
        (
            ["decoder=dali", "eval_decoder=torchvision"],
            "decoded by dali to train and by torchvision to evaluate: not the same pixels\n",
        ),
        (["cache=memory"], "decoded once, kept as bytes (cache: memory)\n"),
        (
            ["cache=device"],
            "decoded once, kept as bytes (cache: device; on CPU workers: the same as memory)\n",
        ),
        (["source=synthetic"], "made up\n"),
    ],
)
def test_the_plan_says_where_pixels_come_from(
    overrides: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = [word for override in overrides for word in ("--set", f"data.{override}")]
    assert main(["plan", str(DIGITS), *changes]) == 0
    assert f"pictures  {words}" in capsys.readouterr().out
