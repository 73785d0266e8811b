# `make demo`, `make test` and `make docs` set everything up by themselves: a virtual environment, the package, what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One thread per rank, or ranks that share a machine get in each other's way.
export OMP_NUM_THREADS := 1
# Python keeps its bytecode: a hundred processes of the tests would otherwise compile the same files again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-long test-upstream lint docs setup clean
help:
	@echo "make demo   set up, then train on emulated fast and slow devices and draw what happened (2 minutes)"
	@echo "make test   set up, then lint, type-check and test (some 8 minutes on two cores)"
	@echo "make test-long"
	@echo "            set up, then run the tests that make test leaves out, as they take long (some 15 minutes)"
	@echo "make test-upstream LIGHTNING_SRC=FOLDER"
	@echo "            set up, then run Lightning's own tests, from a checkout of it, with its DDP and with ours (an hour)"
	@echo "make docs   set up, then make the documentation's site, docs/_build/html/index.html"
	@echo "make clean  remove the virtual environment and build products"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "== Setting up $(VENV): a virtual environment with PyTorch and Lightning (once; a minute or more)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || (echo "Python >= 3.10 is needed; set PYTHON=" && exit 1)
	@$(PYTHON) -m venv $(VENV)
	@echo "-- installing PyTorch"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	@echo "-- installing lightning-hetero with what its tests and examples use"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]'
	@touch $@

demo: setup
	@echo "== Demo"
	@$(BIN)/python -m lightning_hetero demo

lint: setup
	@echo "== Linting and type-checking"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

# What goes by the clock runs alone, and again where a busy machine has come between.
PYTEST := $(BIN)/python -m pytest
AT_ONCE := -n 3 --dist worksteal $(if $(RERUNS),--reruns $(RERUNS) -rR)
BY_THE_CLOCK := --reruns 3 --reruns-delay 3

test: lint
	@echo "== Testing"
	@$(PYTEST) $(AT_ONCE) -m "not clock and not long"
	@echo "== Testing what goes by the clock"
	@$(PYTEST) $(BY_THE_CLOCK) -m "clock and not long"

# Whole programs as their users start them, and further cases of tests that `make test` runs once.
test-long: setup
	@echo "== Testing what takes long"
	@$(PYTEST) $(AT_ONCE) -m "not clock and long"
	@echo "== Testing what takes long and goes by the clock"
	@$(PYTEST) $(BY_THE_CLOCK) -m "clock and long"

# What Lightning's tests need besides.
$(VENV)/.upstream: $(VENV)/.ready
	@echo "-- installing what Lightning's tests use"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt cloudpickle pandas tensorboard tensorboardX
	@touch $@

test-upstream:
	@test -n "$(LIGHTNING_SRC)" || (echo "Say where a checkout of Lightning is, of the version in constraints.txt: make test-upstream LIGHTNING_SRC=FOLDER" && exit 1)
	@$(MAKE) --no-print-directory $(VENV)/.upstream
	@$(BIN)/python tests/upstream/run.py "$(LIGHTNING_SRC)" $(UPSTREAM)

$(VENV)/.docs: $(VENV)/.ready
	@echo "-- installing Sphinx with what the documentation uses"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

docs: $(VENV)/.docs
	@echo "== Making the site"
	@$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet docs docs/_build/html
	@echo "docs/_build/html/index.html"

clean:
	rm -rf $(VENV) docs/_build build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
