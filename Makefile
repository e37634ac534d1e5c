# Every target makes .venv by itself, and installs again only when pyproject.toml or constraints.txt changed.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet -c constraints.txt

.PHONY: install demo test test-slow check bench clean

install: .venv/.dev

demo: .venv/.user
	rm -rf runs/demo
	$(BIN)/vicinal study run demo --jobs 2
	$(BIN)/vicinal priors --draw runs/demo/priors.png
	$(BIN)/vicinal report runs/demo

test: .venv/.dev
	$(BIN)/pytest -n auto

test-slow: .venv/.dev
	$(BIN)/pytest -n auto -m slow
	$(BIN)/pytest -n auto -m hypothesis --hypothesis-profile=random
	VICINAL_NATIVE=0 $(BIN)/pytest -n auto tests/attention tests/attachment tests/models tests/mixing

check: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/.user
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/attach.py --threads 1 2
	$(BIN)/python benchmarks/training.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/mixing.py
	$(BIN)/python benchmarks/erf.py

clean:
	rm -rf .venv runs

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.user: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e .
	touch $@

.venv/.dev: pyproject.toml constraints.txt | .venv/bin/python
	$(PIP) -e ".[dev]"
	touch $@ .venv/.user
