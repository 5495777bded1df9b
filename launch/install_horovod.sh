#!/usr/bin/env bash
# Build Horovod for the torch of one Python, and install it there.
#
#   launch/install_horovod.sh [PYTHON]             PYTHON: $PYTHON, else python3
#   DRY_RUN=1 launch/install_horovod.sh [PYTHON]   print the decisions and the commands only
#   BUILD_ONLY=1 launch/install_horovod.sh [PYTHON]   leave the wheel in its folder
#
# The machine needs a C++ compiler; cmake and ninja are installed with pip into a temporary folder.
# NCCL is built in if torch has CUDA and there is nvcc, MPI if there are mpicxx and mpirun. The wheel
# stays in ${XDG_CACHE_HOME:-~/.cache}/largebatch/wheels under a name that identifies the build, so
# the next environment with the same torch installs it in seconds.
#
# Longer than 40 lines because the last Horovod is older than today's C++, Python and CMake.
set -euo pipefail

horovod=0.28.1
python=${1:-${PYTHON:-python3}}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/largebatch/wheels
PATH=${CUDA_HOME:-/usr/local/cuda}/bin:$PATH
has() { command -v "$1" >/dev/null; }
die() { echo "install_horovod: $*" >&2; exit 1; }
run() { echo "+ $*"; if [[ ${DRY_RUN:-} != 1 ]]; then "$@"; fi; }

has "$python" || die "there is no Python at '$python'; name one: $0 PYTHON"
facts=$("$python" - <<'EOP'
import os, re, sys, sysconfig
try:
    import torch
except ImportError as error:
    sys.exit(f"install_horovod: {sys.executable} has no torch to build for: {error}")
config = open(f"{torch.utils.cmake_prefix_path}/Torch/TorchConfig.cmake").read()
homes = [os.environ.get("HOROVOD_NCCL_HOME"), *(f"{p}/nvidia/nccl" for p in sys.path), "/usr"]
nccl = next((home for home in homes if home and os.path.exists(f"{home}/include/nccl.h")), "")
python = "cp{}{}".format(*sys.version_info)
platform = re.sub(r"[-.]", "_", sysconfig.get_platform())
print(torch.__version__, torch.version.cuda or "", re.search(r"STANDARD (\d+)", config)[1], nccl,
      sysconfig.get_path("include"), f"{python}-{python}-{platform}", sep="\n")
EOP
)
{ read -r torch; read -r cuda; read -r standard; read -r nccl; read -r headers; read -r tags
} <<<"$facts"

label=torch${torch/+/.} mpi=WITHOUT gpu=()
if has mpicxx && has mpirun; then label+=.mpi mpi=WITH; fi
if [[ $cuda && $nccl ]] && has nvcc; then
    label+=.nccl gpu=(HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_{LINK=SHARED,HOME="$nccl"})
elif [[ $cuda ]]; then
    echo "Without GPU support: torch has CUDA $cuda, but nvcc or nccl.h is missing."
fi
wheel=$cache/horovod-$horovod+$label-$tags.whl

build() ( # a subshell: what it exports and traps ends with it
    compiler=${CXX:-$(type -P c++ g++ clang++ | head -n 1 || true)}
    error=$(${compiler:-c++} -std=c++"$standard" -I"$headers" -include Python.h -fsyntax-only \
        -x c++ /dev/null 2>&1) || die "torch $torch needs a C++$standard compiler and the headers" \
        "of Python; install g++ and python3-dev, or set CXX (${error%%$'\n'*})"
    work=$cache/build.$HOSTNAME.$$ source=$cache/build.$HOSTNAME.$$/horovod-$horovod
    trap 'rm -rf "$work"' EXIT
    run mkdir -p "$work"
    run "$python" -m pip install --quiet --target "$work/tools" \
        'setuptools<81' wheel packaging cmake ninja cffi cloudpickle psutil pyyaml
    export PYTHONPATH=$work/tools${PYTHONPATH:+:$PYTHONPATH} PATH=$work/tools/bin:$PATH
    run "$python" -m pip download --quiet --dest "$work" --no-deps --no-build-isolation \
        --no-binary horovod "horovod==$horovod"
    run tar -xzf "$source.tar.gz" -C "$work"
    run sed -i.orig -f - "$source"/{setup.py,CMakeLists.txt,horovod/torch/CMakeLists.txt} \
        "$source"/{cmake/Modules/FindPytorch.cmake,horovod/runner/js_run.py} <<EOP
# torch is written in a newer C++
s/CXX_STANDARD 14/CXX_STANDARD $standard/
# Python 3.12 has no distutils
s/distutils.spawn import find_executable/shutil import which as find_executable/
s/from distutils/from setuptools._distutils/
# a CUDA folder need not be a CUDA toolkit
s/torch.version.cuda is not None/'HOROVOD_GPU_OPERATIONS' in __import__('os').environ/
# make's word for what ninja calls -v
s/VERBOSE=1/-v/
# files together, for most of the time goes into the same headers; not tried with MPI and GPUs
s/^set(PYTORCH_TARGET_LIB "pytorch")/&\nif(NOT HAVE_MPI AND NOT HAVE_CUDA AND NOT HAVE_ROCM)\nset(CMAKE_UNITY_BUILD ON)\nendif()/
# debug symbols are 60 MB
s/RelWithDebInfo/Release/
EOP
    # NCCL from pip comes without the name that linkers look for.
    [[ $label != *.nccl ]] || run ln -s "$nccl/lib/libnccl.so.2" "$work/libnccl.so"
    # Gloo asks for CMake 2.8, which CMake 4 refuses unless told otherwise.
    run env CMAKE_POLICY_VERSION_MINIMUM=3.5 CMAKE_GENERATOR=Ninja "HOROVOD_${mpi}_MPI=1" \
        HOROVOD_{WITH_{PYTORCH,GLOO},WITHOUT_{TENSORFLOW,MXNET}}=1 "${gpu[@]}" \
        HOROVOD_NCCL_LIB="$work" HOROVOD_LOCAL_VERSION="$label" "$python" -m pip wheel --quiet \
        --wheel-dir "$work/wheel" --no-deps --no-build-isolation "$source"
    run mv "$work/wheel"/*.whl "$wheel"
)

echo "Horovod $horovod for torch $torch, C++$standard"
[[ -e $wheel ]] || build
[[ ${BUILD_ONLY:-} != 1 ]] || exit 0
run "$python" -m pip install --quiet "$wheel"
run "$python" -c "from horovod.torch import init" || die "Horovod does not load; remove $wheel"
