# Two commands do everything: `make serve` and `make test`. Both start from a bare Python 3.11+.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# A local CPU build; on a machine with a GPU, install the torch you want first and it is kept.
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
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[test,check]'
	touch $@

$(VENV)/.installed-check: $(VENV)/.installed-test
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
