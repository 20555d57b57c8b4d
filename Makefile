# make demo  watch three float16 training runs diagnosed in the browser
# make test   the whole test suite
# make soak   tests that take many minutes
# All do all of their own set-up in .venv; running them again is quick.

PYTHON ?= python3
# The release that the tests pin. On Linux, PyPI's build of it brings CUDA; where no wheel for the CPU is at hand,
# TORCH='torch==2.13.0 --extra-index-url https://download.pytorch.org/whl/cpu' takes the small one.
TORCH ?= torch==2.13.0
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: help demo test soak lint format types wheel picture clean

help:
	@sed -n 's/^# //p' Makefile | head -4

demo: $(VENV)/.demo
	@$(BIN)/ampwatch demo $(ARGS)

test: $(VENV)/.test
	@$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist worksteal $(ARGS)

# The tests that take long: a job and its server are killed 50 times each, and a job 30 s after it was asked to end
# (docs/reliability.md); batches come in 20 orders, and 100 requests to each path, that differ each time.
soak: $(VENV)/.test
	@AMPWATCH_CHAOS_KILLS=50 AMPWATCH_CHAOS_GRACE_S=30 $(BIN)/python -m pytest tests/chaos --durations=5 $(ARGS)
	@AMPWATCH_ORDERS=20 AMPWATCH_REQUESTS=100 $(BIN)/python -m pytest --durations=5 $(ARGS) \
		tests/server/test_fold.py::test_any_order_and_repetition_end_in_the_same_chunks \
		tests/server/test_fuzz.py::test_no_request_is_an_error_of_the_servers

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.test
	$(BIN)/mypy

format: $(VENV)/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# What a user installs: built, put into an empty environment without torch, its top level looked at.
wheel: $(VENV)/.test
	$(BIN)/python tests/wheel.py

# README's picture of the dashboard, made from the demo.
picture: $(VENV)/.test
	$(BIN)/python docs/screenshots.py

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	@echo "Setting up $(VENV) (once)" >&2
	@$(PYTHON) -c 'import sys; sys.exit("ampwatch needs Python 3.10 or newer, got %d.%d: make PYTHON=python3.12" % sys.version_info[:2] if sys.version_info < (3, 10) else 0)'
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade 'pip>=25.1'

$(VENV)/.demo: pyproject.toml hatch_build.py $(wildcard ampwatch/stats/native/*) | $(BIN)/python
	@echo "Installing ampwatch and $(TORCH) (once; a few minutes where torch must be downloaded)" >&2
	@$(PIP) install --editable '.[server]' $(TORCH)
	@touch $@

$(VENV)/.test: pyproject.toml $(VENV)/.demo
	@echo "Installing what the tests need (once)" >&2
	@$(PIP) install --editable '.[server,postgres]' --group test --group frameworks --group lint $(TORCH)
	@touch $@
