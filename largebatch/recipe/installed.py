"""The recipes that are installed with the package, each by the name of its file."""

import re
from importlib.resources import files
from pathlib import Path

from largebatch.errors import RecipeError, nearest

FEWEST_UPDATES = 1_178
"""Fewest updates of a published training of ResNet-50 on ImageNet to 75.9 % top-1:
resnet50_65536_shampoo (MLPerf v1.0). LARS takes 1,860 there, in batches of 55,296. Other images may
take fewer."""

_PARTS = re.compile(r"(\d+)")


def by_data_set() -> dict[str, dict[str, str]]:
    """Return the text of every installed recipe, by its data set and, in order, its name."""
    texts: dict[str, dict[str, str]] = {}
    for folder in (files("largebatch") / "recipes").iterdir():
        if folder.is_dir():
            paths = [file for file in folder.iterdir() if file.name.endswith(".yaml")]
            paths.sort(key=lambda file: _natural(Path(file.name).stem))
            texts[folder.name] = {Path(p.name).stem: p.read_text(encoding="utf-8") for p in paths}
    return texts


def installed() -> dict[str, str]:
    """Return the text of every installed recipe by its name, sorted as in `by_data_set`."""
    texts = {name: text for recipes in by_data_set().values() for name, text in recipes.items()}
    return {name: texts[name] for name in sorted(texts, key=_natural)}


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key of a name, by its words and numbers: 512 comes before 1024."""
    return [(int(part or 0), "") if part.isdigit() else (0, part) for part in _PARTS.split(name)]


def read_installed(name: str) -> str:
    """Return the text of an installed recipe; raise RecipeError, with the nearest name, if none."""
    texts = installed()
    if name not in texts:
        hint = nearest(name, texts, otherwise="`largebatch recipes` lists them")
        raise RecipeError(f"{name}: neither a file nor an installed recipe; {hint}")
    return texts[name]


def origin(text: str) -> tuple[str | None, str | None]:
    r"""Return the paper and the measured result in the header of a recipe; None if missing.

    >>> origin("# After: You et al. 2017, arXiv:1708.03888.\n# Measured: 98.9 %, a.json.\nname: a")
    ('You et al. 2017', '98.9 %')
    """
    lines = re.match(r"(?:#.*\n?)*", text)
    header = " ".join(lines[0].replace("#", " ").split()) if lines else ""
    after = re.search(r"After: (.+?)(?:[,:] | \(|$)", header)
    end = r"(?:, \S+\.json| \(docs/|\. |\.?$)"
    measured = re.search(rf"Measured(?: here)?: (?!not yet)(.+?){end}", header)
    return after and after[1], measured and measured[1]
