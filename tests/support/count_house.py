"""Print how large the house is: python tests/support/count_house.py [--loaded]

Lines of the package, its tests and benchmarks, words of the documents, functions that take a Recipe
or a Session, and hard dependencies; with --loaded also what two updates of digits_96 import.
"""

import ast
import configparser
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

_LOADED = """
import sys
from pathlib import Path
from largebatch import run
run("digits_96", max_steps=2, out=sys.argv[1])
ours = [module for name, module in sys.modules.items() if name.split(".")[0] == "largebatch"]
paths = {module.__file__ for module in ours if module.__file__}
print(len(paths), sum(len(Path(path).read_text().splitlines()) for path in paths))
"""


def tracked(*patterns: str) -> list[Path]:
    """Return the files that git tracks, or would."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *patterns]
    names = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / name for name in names.stdout.splitlines() if (ROOT / name).is_file()]


def lines(folder: str) -> int:
    """Return the lines of the Python files below a folder."""
    return sum(
        len(path.read_text(encoding="utf-8").splitlines()) for path in tracked(f"{folder}/**.py")
    )


def takers(name: str) -> Iterator[str]:
    """Yield every function of the package with an argument annotated as `name`."""
    for path in tracked("largebatch/**.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                if any(arg.annotation and _names(arg.annotation, name) for arg in given):
                    yield f"{path.relative_to(ROOT)}:{node.lineno}"


def _names(annotation: ast.expr, name: str) -> bool:
    quoted = {f"{name}", f"{name} | None"}
    return any(
        (isinstance(node, ast.Name) and node.id == name)
        or (isinstance(node, ast.Constant) and node.value in quoted)
        for node in ast.walk(annotation)
    )


def main() -> None:
    """Print one line a figure."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    requires = setup["options"]["install_requires"].strip().splitlines()
    words = sum(len(path.read_text(encoding="utf-8").split()) for path in tracked("*.md"))
    figures = {
        "package, lines": lines("largebatch"),
        "tests, lines": lines("tests"),
        "benchmarks, lines": lines("benchmarks"),
        "documents, words": words,
        "README, lines": len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()),
        "functions that take a Recipe": len(list(takers("Recipe"))),
        "functions that take a Session": len(list(takers("Session"))),
        "hard dependencies": sum(not line.strip().startswith("#") for line in requires),
    }
    if "--loaded" in sys.argv[1:]:
        with tempfile.TemporaryDirectory() as out:
            command = [sys.executable, "-c", _LOADED, out + "/run"]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
        modules, loaded = done.stdout.split()[-2:]
        figures |= {"modules that a run loads": int(modules), "lines of them": int(loaded)}
    for name, figure in figures.items():
        print(f"{figure:>8,}  {name}")


if __name__ == "__main__":
    main()
