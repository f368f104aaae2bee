# Two commands do everything on a fresh machine: `make train` and `make test`.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: install train test test-full lint docs clean

install: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,docs,dev]'
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps --target $(VENV)/oracles torchao accelerate torchft
	$(BIN)/python -m pip install --quiet --target $(VENV)/oracles psutil opentelemetry-sdk opentelemetry-exporter-otlp-proto-http
	touch $(STAMP)

train: install
	$(BIN)/thinwire train $(ARGS)

test: install
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest $(ARGS)

test-full: install
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -m '' $(ARGS)

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
