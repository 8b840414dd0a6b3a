# Two commands do everything: `make serve` and `make test`. Both start from a bare Python 3.11+.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# What pip gets as torch if the environment has none yet. On Linux the index's own build brings CUDA along,
# some gigabytes; for a smaller, CPU-only one say where you get it: TORCH="torch==2.13.0 --index-url URL".
TORCH  ?= torch==2.13.0
MODEL  ?= smollm2-135m
ARGS   ?=

.PHONY: serve test check format install clean

serve: $(VENV)/.installed
	$(BIN)/tandem serve --model $(MODEL) $(ARGS)

test: $(VENV)/.installed-test
	$(BIN)/tandem model fetch smollm2-135m
	$(BIN)/python -m pytest

check: $(VENV)/.installed-check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-check
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

install: $(VENV)/.installed

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Tandem needs Python 3.11 or newer")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip show --quiet torch 2>/dev/null || $(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[test,check]'
	touch $@

$(VENV)/.installed-check: $(VENV)/.installed-test
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
