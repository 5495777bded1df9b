"""The wheel built by `pip wheel .` works in a new environment, from any folder."""

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("largebatch", "recipes", "launch", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel into an environment that has everything else that is installed here."""
    folder = tmp_path_factory.mktemp("wheel")
    for part in PARTS:
        source, target = ROOT / part, folder / "source" / part
        if source.is_dir():
            shutil.copytree(
                source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            shutil.copy(source, target)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-index", "--no-deps"]
    build = [
        *pip,
        "wheel",
        *offline,
        "--no-build-isolation",
        "-w",
        str(folder),
        str(folder / "source"),
    ]
    subprocess.run(build, check=True)
    venv.create(folder / "venv")
    (wheel,) = folder.glob("*.whl")
    (packages,) = folder.glob("venv/lib/*/site-packages")
    # Their .pth files are not read, so an editable installation of this package stays out.
    others = [path for path in sys.path if path.endswith("-packages")]
    (packages / "others.pth").write_text("\n".join(others))
    python = str(folder / "venv" / "bin" / "python")
    subprocess.run([*pip, "--python", python, "install", *offline, wheel], check=True)
    return folder / "venv" / "bin"


def call(environment: Path, folder: Path, *words: str) -> str:
    """Return what a program of the environment prints, run in an empty home."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    kept = {key: os.environ[key] for key in ("PATH", "OMP_NUM_THREADS") if key in os.environ}
    done = subprocess.run(
        [environment / words[0], *words[1:]],
        cwd=folder,
        env={**kept, "HOME": str(home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_installed_recipes_are_listed_and_copied(environment: Path, tmp_path: Path) -> None:
    listed = call(environment, tmp_path, "largebatch", "recipes").splitlines()
    rows = [line.split() for line in listed if line.startswith("  ")]
    names = {row[0]: row[1:] for row in rows}
    assert names.keys() - {"recipe"} == {path.stem for path in (ROOT / "recipes").glob("*/*.yaml")}
    assert names["digits_96"][:5] == ["96", "40.0", "98.94", "%", "top-1"]
    copied = call(environment, tmp_path, "largebatch", "recipes", "copy", "digits_96")
    assert copied == "recipe: digits_96.yaml\n"
    ours = (ROOT / "recipes" / "quickstart" / "digits_96.yaml").read_text()
    assert (tmp_path / "digits_96.yaml").read_text() == ours


def test_an_installed_recipe_trains_from_any_folder(environment: Path, tmp_path: Path) -> None:
    words = ("train", "digits_96", "--max-steps", "1", "--out", "run")
    assert "report: run/report.html" in call(environment, tmp_path, "largebatch", *words)
    assert "<h1>digits-96</h1>" in (tmp_path / "run" / "report.html").read_text()


@pytest.mark.long
def test_an_editable_install_is_a_path_that_other_tools_follow(
    environment: Path, tmp_path: Path
) -> None:
    source = environment.parents[1] / "source"
    program = f"from setuptools.build_meta import build_editable as b; print(b({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", program], cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (pth,) = [name for name in archive.namelist() if name.endswith(".pth")]
        assert Path(archive.read(pth).decode().strip()) == source


def test_all_modules_are_imported_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    code = "import largebatch.optional as one; print(one.__file__); print(one.INSTALL_HOROVOD)"
    module, command = call(environment, tmp_path, "python", "-c", code).splitlines()
    assert Path(module).is_relative_to(environment.parent)
    script = Path(command.split()[0])
    assert script.is_relative_to(environment.parent)
    assert os.access(script, os.X_OK)


def test_jobs_are_printed_from_the_wheel(environment: Path, tmp_path: Path) -> None:
    printed = call(environment, tmp_path, "largebatch", "launch", "slurm", "digits_96", "--nodes=2")
    assert "#SBATCH --nodes=2\n" in printed
