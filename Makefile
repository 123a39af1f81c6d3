# Every target works alone on a fresh clone: it makes .venv and installs what it needs, once per change of the pins.
#   make demo   install, start a local cluster on the demo pair, stream eight prompts, print the table
#   make test   the fast suite          make test-all   everything, minutes to an hour
#   make parity the grids of law 1 and the suites of ranks; OVERLAP=1: with the host a step ahead of its device
#   make verify  every slow suite; what passed on the same files is not run again; FRESH=1: forgets what passed
#   make planted  plants small faults in a copy, one at a time: the fast tests must find each
#   make kernels  every program of Triton in its interpreter      make kernels-compile  each, for GPUs that are not here
#   make check  lint, types, layers and unit tests      make serve   the demo pair on http://127.0.0.1:8000
#   make bench  speculation on and off, and against transformers, side by side
#   make docs   the documentation site, into build/docs; a broken link is an error
#   make real   a real Gemma-3 270M, built under REAL (default: ~/.cache/aerie/real), against transformers; some 20 minutes
# TORCH_ARGS is passed to pip when it installs torch. Where the index has only CUDA builds and a CPU build will do:
#   make demo TORCH_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

export RAY_USAGE_STATS_ENABLED := 0
export PIP_DISABLE_PIP_VERSION_CHECK := 1

VENV := .venv
BIN := $(VENV)/bin
# Compiling all at installation takes a minute; importing once compiles what is used. Bytecode is kept also where the
# environment says otherwise: without it every process compiles torch anew, and starts take twice as long.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
USED := ray.serve, ray.dashboard.agent, torch, transformers, xgrammar, cluster.cli, cluster.api.serve.application, cluster.actors.shard
TORCH_ARGS ?=
PINS := pyproject.toml constraints.txt
FITS := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))

.PHONY: help demo serve bench docs real test test-all parity verify planted kernels kernels-compile check clean

help:
	@sed -n 's/^#//p' Makefile

$(BIN)/python:
	@for python in python3.11 python3.12 python3; do \
	    if $$python -c '$(FITS)' 2>/dev/null; then \
	        echo "creating $(VENV) with $$($$python --version)"; exec $$python -m venv $(VENV); \
	    fi; \
	done; \
	echo "no CPython 3.11 or 3.12 with venv on the PATH; install one (on Debian also its -venv package)" >&2; exit 1

# torch first and alone: a range would let pip fetch the newest CUDA build, several gigabytes.
$(VENV)/.stamp: $(PINS) | $(BIN)/python
	@echo "installing into $(VENV)"
	@$(PIP) $(TORCH_ARGS) torch
	@$(PIP) --editable .
	@$(BIN)/python -W ignore -c 'import $(USED)'
	@touch $@

$(VENV)/.stamp-dev: $(VENV)/.stamp
	@$(PIP) --editable '.[dev]'
	@touch $@

demo: $(VENV)/.stamp
	$(BIN)/aerie demo

serve: $(VENV)/.stamp
	$(BIN)/aerie serve --config deploy/local.yaml

bench: $(VENV)/.stamp
	$(BIN)/aerie bench

docs: $(VENV)/.stamp
	@$(PIP) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

REAL ?= $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/aerie/real

real: $(VENV)/.stamp
	$(BIN)/python -m benchmarks.real --root "$(REAL)" --torch-args="$(TORCH_ARGS)"

# What depends on floating point runs once more, first, without this CPU's vector instructions: no test may hold only
# on the machine it was written on; test_probe and test_widths, which take long, run only then. What starts a Ray cluster
# runs last and one at a time.
FLOATING := tests/unit/attention tests/unit/sampling tests/unit/spec tests/unit/models tests/parity/test_nonfinite.py \
    tests/checkpoints/test_probe.py tests/checkpoints/test_widths.py
SIDE_BY_SIDE := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n auto --maxprocesses 4 --dist worksteal

test: $(VENV)/.stamp-dev
	ATEN_CPU_CAPABILITY=default $(SIDE_BY_SIDE) -m "not slow" $(FLOATING)
	$(SIDE_BY_SIDE) -m "not slow and not ray" $(addprefix --ignore=tests/checkpoints/,test_probe.py test_widths.py) tests
	$(BIN)/python -m pytest -m "ray and not slow" $$(grep -rl --include='*.py' mark.ray tests | sort)

test-all: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest

OVERLAP ?= 0

parity: $(VENV)/.stamp-dev
	OVERLAP=$(OVERLAP) $(SIDE_BY_SIDE) tests/parity
	OVERLAP=$(OVERLAP) $(BIN)/python -m pytest tests/distributed

# All slow suites, one after the other, also after one that failed. .verify records each test that passed, with a digest
# of the files that it depends on. SUITES="parity distributed" runs these alone.
FRESH ?=
SUITES ?=

verify: $(VENV)/.stamp-dev
	OVERLAP=$(OVERLAP) $(BIN)/python -m tests.verify $(if $(FRESH),--fresh) $(SUITES)

PLANT ?=

# PLANT="NAMES --jobs 2": the faults with these names, two at a time; see tests/planted. A run that was stopped goes on.
planted: $(VENV)/.stamp-dev
	$(BIN)/python -m tests.planted $(PLANT)

# Triton's programs without a GPU: all that they compute, in its interpreter; and what they take of one when compiled.
kernels: $(VENV)/.stamp-dev
	TRITON_INTERPRET=1 $(SIDE_BY_SIDE) tests/triton tests/flashinfer

kernels-compile: $(VENV)/.stamp-dev
	TRITON_INTERPRET=0 $(BIN)/python -m tests.triton.compile_all

check: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy & types=$$!; $(SIDE_BY_SIDE) -m "not slow" tests/test_layers.py tests/unit; wait $$types

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
