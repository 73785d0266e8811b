# `make demo`, `make test` and `make docs` set everything up by themselves: a virtual environment, the package, what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The versions to install; CONSTRAINTS=/dev/null takes the newest of everything.
CONSTRAINTS ?= constraints.txt
# One thread per rank, or ranks that share a machine get in each other's way.
export OMP_NUM_THREADS := 1
# Python keeps its bytecode: a hundred processes of the tests would otherwise compile the same files again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-long test-oldest test-ray test-upstream test-packages lint docs dist setup clean
help:
	@echo "make demo   set up, then train on emulated fast and slow devices and draw what happened (2 minutes)"
	@echo "make test   set up, then lint, type-check and test (some 8 minutes on two cores)"
	@echo "make test-long"
	@echo "            set up, then run the tests that make test leaves out, as they take long (some 15 minutes)"
	@echo "make test-oldest"
	@echo "            the core of the tests with the oldest Lightning, in an environment of its own (some 10 minutes)"
	@echo "make test-ray"
	@echo "            set up, with Ray, then train under Ray Train (2 minutes)"
	@echo "make test-upstream LIGHTNING_SRC=FOLDER"
	@echo "            set up, then run Lightning's own tests, from a checkout of it, with its DDP and with ours (an hour)"
	@echo "make test-packages PACKAGES=NAMES"
	@echo "            train models of other packages, each in an environment of its own (.envs, 17 GB), with ddp and with ours;"
	@echo "            without NAMES all (ten minutes, and longer to make the environments)"
	@echo "make docs   set up, then make the documentation's site, docs/_build/html/index.html"
	@echo "make dist   build the sdist and the wheel, in dist/, and check them; TAG=v1.2.3 sees first that this is the version"
	@echo "make clean  remove the virtual environments and build products"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "== Setting up $(VENV): a virtual environment with PyTorch and Lightning (once; a minute or more)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || (echo "Python >= 3.10 is needed; set PYTHON=" && exit 1)
	@$(PYTHON) -m venv $(VENV)
	@echo "-- installing PyTorch"
	@$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) torch
	@echo "-- installing lightning-hetero with what its tests and examples use"
	@$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[test]'
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
AT_ONCE := -n 4 --dist worksteal $(if $(RERUNS),--reruns $(RERUNS) -rR)
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

# The oldest versions that pyproject.toml allows, as constraints-oldest.txt says, and constraints.txt for all else. The oldest PyTorch is
# taken only if it is named, OLDEST_TORCH=2.4.0: not every machine can install it.
OLDEST := .venv-oldest
OLDEST_CORE := tests/algorithms tests/batching tests/strategies tests/launch \
    $(addprefix tests/distributed/test_,exactness.py events.py resume_elsewhere.py node.py diloco.py gossip.py sigterm.py saving.py start_again.py)
# Lightning 2.5.2's AsyncCheckpointIO cannot be sent to another process, as the first test does. The second one has dropout, and goes on at
# the end of an epoch: with 2.5.2 its weights are others then (docs/archive/log.md).
OLDEST_BUT := --deselect tests/distributed/test_saving.py::test_a_write_in_the_background_leaves_the_old_checkpoint \
    --deselect "tests/distributed/test_start_again.py::test_it_goes_on_from_the_newest_that_is_whole[complete]"

$(OLDEST)/.ready: pyproject.toml constraints.txt constraints-oldest.txt
	@echo "== Setting up $(OLDEST): a virtual environment with the oldest Lightning"
	@$(PYTHON) -m venv $(OLDEST)
	@awk -F= -v torch=$(OLDEST_TORCH) 'BEGIN { if (torch) { print "torch==" torch; old["torch"] } } \
	    NR == FNR { old[$$1] } NR == FNR || !($$1 in old)' constraints-oldest.txt constraints.txt > $(OLDEST)/constraints.txt
	@$(OLDEST)/bin/python -m pip install --quiet --constraint $(OLDEST)/constraints.txt torch
	@$(OLDEST)/bin/python -m pip install --quiet --constraint $(OLDEST)/constraints.txt --editable '.[test]'
	@touch $@

test-oldest: $(OLDEST)/.ready
	@echo "== Testing with the oldest Lightning"
	@$(OLDEST)/bin/python -m pytest $(AT_ONCE) -m "not clock and not long" $(OLDEST_BUT) $(OLDEST_CORE)

# Ray is large, so it is installed only for its own tests.
$(VENV)/.ray: $(VENV)/.ready
	@echo "-- installing Ray"
	@$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[ray]'
	@touch $@

test-ray: $(VENV)/.ray
	@echo "== Testing under Ray Train"
	@$(BIN)/python -m pytest tests/launch/test_ray.py

# What Lightning's tests need besides.
$(VENV)/.upstream: $(VENV)/.ready
	@echo "-- installing what Lightning's tests use"
	@$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) cloudpickle pandas tensorboard tensorboardX
	@touch $@

test-upstream:
	@test -n "$(LIGHTNING_SRC)" || (echo "Say where a checkout of Lightning is, of the version in constraints.txt: make test-upstream LIGHTNING_SRC=FOLDER" && exit 1)
	@$(MAKE) --no-print-directory $(VENV)/.upstream
	@$(BIN)/python tests/upstream/run.py "$(LIGHTNING_SRC)" $(UPSTREAM)

# Each environment is made once.
test-packages:
	@echo "== Training models of other packages"
	@$(PYTHON) tests/packages/run.py --constraints $(CONSTRAINTS) $(PACKAGES)

$(VENV)/.docs: $(VENV)/.ready
	@echo "-- installing Sphinx with what the documentation uses"
	@$(BIN)/python -m pip install --quiet --constraint $(CONSTRAINTS) --editable '.[docs]'
	@touch $@

docs: $(VENV)/.docs
	@echo "== Making the site"
	@$(BIN)/python -m sphinx --builder html --fail-on-warning --keep-going --quiet docs docs/_build/html
	@echo "docs/_build/html/index.html"

# Built apart, with neither PyTorch nor the tests' needs. What an earlier build has left would come into the wheel.
DIST := .venv-dist

$(DIST)/.ready: constraints.txt
	@$(PYTHON) -m venv $(DIST)
	@$(DIST)/bin/python -m pip install --quiet --constraint $(CONSTRAINTS) build twine
	@touch $@

dist: $(DIST)/.ready
	@test -z "$(TAG)" || grep -qx 'version = "$(TAG:v%=%)"' pyproject.toml \
	    || (echo "TAG=$(TAG), but pyproject.toml says $$(grep '^version' pyproject.toml). Change the one or the other." && exit 1)
	@echo "== Building the sdist and the wheel"
	@rm -rf build dist *.egg-info
	@$(DIST)/bin/python -m build --outdir dist
	@$(DIST)/bin/python -m twine check --strict dist/*

clean:
	rm -rf $(VENV) $(OLDEST) $(DIST) .envs docs/_build build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
