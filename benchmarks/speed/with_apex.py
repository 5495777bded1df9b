"""Build the kernels of NVIDIA's apex from its sources, test LARS with them, and time it.

    APEX_SOURCES=DIR python -m benchmarks.speed.with_apex [arguments of lars.py]

DIR is a checkout of github.com/NVIDIA/apex. Only the module `amp_C` is built, from the files that
its setup.py names, into build/amp_C; that takes a C++ compiler, nvcc and a minute or two. Without
APEX_SOURCES an installed apex is used, if any.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

TESTS = ["pytest", "-q", "-rs", "tests/optim/test_lars_fast.py", "-k", "apex and the_table"]


def main() -> None:
    """Build, test and measure; exit with the first error."""
    path = os.environ.get("PYTHONPATH", "")
    if given := os.environ.get("APEX_SOURCES"):
        path = f"{build(Path(given).resolve())}{os.pathsep}{path}"
    environment = {**os.environ, "PYTHONPATH": path}
    for words in (
        ["-m", *TESTS],
        ["-m", "benchmarks.speed.lars", *sys.argv[1:]],
    ):
        done = subprocess.run([sys.executable, *words], check=False, cwd=ROOT, env=environment)
        if done.returncode:
            sys.exit(done.returncode)


def build(sources: Path) -> Path:
    """Return the folder of the built module."""
    import torch
    from torch.utils.cpp_extension import CUDA_HOME, load

    setup = (sources / "setup.py").read_text(encoding="utf-8")
    names = re.search(r'name="amp_C",\s*sources=\[(.*?)\]', setup, re.DOTALL)
    assert names, f"{sources}/setup.py names no sources of amp_C"
    headers: list[str] = []
    if not Path(CUDA_HOME or "", "include/cusparse.h").exists():  # those of torch's own packages
        headers = [str(path) for path in Path(torch.__file__).parents[1].glob("nvidia/*/include")]
    folder = ROOT / "build/amp_C"
    folder.mkdir(parents=True, exist_ok=True)
    load(
        "amp_C",
        [str(sources / name) for name in re.findall(r'"(csrc/[^"]+)"', names[1])],
        extra_cflags=["-O3"],
        extra_cuda_cflags=["-O3", "--use_fast_math"],
        extra_include_paths=headers,
        build_directory=str(folder),
        verbose=True,
    )
    return folder


if __name__ == "__main__":
    main()
