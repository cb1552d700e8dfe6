# Each target sets up what it needs: a fresh clone plus `make demo` is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo demo-vision test lint types
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/python -m lm.fit

demo-vision: $(VENV)/.demo
	$(BIN)/python -m vision_mae.fit

test: lint types
	$(BIN)/python -m pytest

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Stamps, so that a second `make` starts at once and a changed pyproject.toml installs again.
$(VENV)/.demo: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.test: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@ $(VENV)/.demo
