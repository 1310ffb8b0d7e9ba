# make train   installs what the main job needs and trains a small GPT on the standard library's source code, on two ranks
# make test    installs what the tests need, checks style and types, runs every test
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --constraint constraints.txt
SOURCES := pyproject.toml setup.py constraints.txt $(wildcard functrain/kernels/*.cpp functrain/kernels/*.h)
# One thread a worker: two workers share two cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q

.PHONY: train test test-fast check format bench clean

train: $(VENV)/core.stamp
	$(BIN)/functrain train --nproc 2

test: check
	$(PYTEST)

test-fast: $(VENV)/test.stamp
	$(PYTEST) -m "not slow"

check: $(VENV)/test.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/test.stamp
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/test.stamp
	$(BIN)/python benchmarks/kernels.py
	$(BIN)/python benchmarks/step.py

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/core.stamp: $(SOURCES) | $(BIN)/python
	$(INSTALL) --editable .
	touch $@

$(VENV)/test.stamp: $(SOURCES) | $(BIN)/python
	$(INSTALL) --editable '.[test]'
	touch $@ $(VENV)/core.stamp

clean:
	rm -rf $(VENV) build *.egg-info functrain/kernels/*.so
