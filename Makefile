# `make serve` and `make test` set up everything they need in .venv; `make help` lists the rest.

PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= cpu,server,dev
CONSTRAINTS ?= constraints/cpu.txt
MODEL ?= examples/tiny-llama
HOST ?= 127.0.0.1
PORT ?= 8080
ARGS ?=

BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: help install serve test lint format docs clean
.DELETE_ON_ERROR:

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST)

install: $(INSTALLED) ## the package and its tools in .venv

# The stamp is written last: an installation that was cut off starts again.
$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade pip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[$(EXTRAS)]'
	@touch $@

serve: $(INSTALLED) ## the example model on port 8080 (MODEL=folder PORT=number)
	$(BIN)/djl-neuronx serve $(MODEL) --host $(HOST) --port $(PORT)

test: $(INSTALLED) ## all tests (ARGS="-k name")
	$(BIN)/python -m pytest $(ARGS)

lint: $(INSTALLED) ## every check that is not a test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED) ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(INSTALLED) ## what is made from the option fields
	$(BIN)/python -m djl_python_neuronx.config.document options > docs/options.md
	$(BIN)/python -m djl_python_neuronx.config.document example > serving.properties.example

clean: ## away with the environments
	rm -rf .venv .venv-tf457 .venv-sdk221
