from pathlib import Path

import pytest

from largebatch.cli.main import main
from largebatch.errors import RecipeError
from largebatch.recipe.loading import load_recipe

DIGITS = Path(__file__).parents[2] / "recipes" / "quickstart" / "digits_96.yaml"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["data.source=synthetic", "execution.cache=memory"],
            "cache: memory would not be used",
        ),
        (["execution={decoder: dali, cache: memory}"], "decoder: dali would not be used: cache"),
        (["execution={reads: 20, cache: memory}"], "reads: 20 would not be used: cache: memory"),
        (["execution.reads=0"], "execution.reads: input should be greater than 0"),
        (["data.interpolation=nearest"], "interpolation: input should be 'bilinear' or 'bicubic'"),
        (["execution.cache=disk"], "cache: input should be 'memory' or 'device'"),
        (["data.decoder=dali"], "data.decoder: unknown key; write --set execution.decoder=dali"),
        (["optimizer.kernels=apex"], "unknown key; write --set execution.kernels=apex"),
    ],
)
def test_settings_without_effect_are_refused_by_name(overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe(DIGITS, overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([], "decoded by torchvision\n"),
        (["--decoder", "dali"], "decoded by dali\n"),
        (
            ["--set", "execution.cache=memory"],
            "decoded once, cached as bytes (execution.cache: memory)\n",
        ),
        (
            ["--set", "execution.cache=device"],
            "decoded once, cached as bytes (execution.cache: device; on CPU workers: the same as",
        ),
        (["--set", "data.source=synthetic"], "synthetic\n"),
    ],
)
@pytest.mark.usefixtures("unmeasured")
def test_the_plan_names_the_source_of_pixels(
    overrides: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["plan", str(DIGITS), *overrides]) == 0
    assert f"images  {words}" in capsys.readouterr().out
