# Start with `make run` and `make test`. Both create .venv if it is missing.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: run test test-slow check docs bench dist clean

run: .venv/installed
	@echo '$$ fedbudget run --dataset breast-cancer --nodes 5 --partition dirichlet:0.5 --budget time=5s'
	@$(BIN)/fedbudget run --dataset breast-cancer --nodes 5 --partition dirichlet:0.5 --budget time=5s
	@echo
	@echo '$$ fedbudget compare --dataset digits --model svm --nodes 5 --cases 1,2,3,4 --taus 1,10,100 --seeds 2 --budget time=15s'
	@$(BIN)/fedbudget compare --dataset digits --model svm --nodes 5 --cases 1,2,3,4 --taus 1,10,100 --seeds 2 --budget time=15s

test: .venv/installed-dev
	$(BIN)/python -m pytest -q -m "not slow" -n 2 --dist loadgroup

test-slow: .venv/installed-dev
	$(BIN)/python -m pytest -q -m slow --timeout 3600

check: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/readability.py
	$(MAKE) -s docs

# Builds the documentation site; any warning fails the build.
docs: .venv/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

bench: .venv/installed-dev
	$(BIN)/python -m benchmarks

# Builds the sdist and the wheel of a release in dist/. `python tools/try_wheel.py --all` then tests the wheel.
dist:
	rm -rf dist .venv-dist
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/pip install -q build twine
	.venv-dist/bin/python -m build
	.venv-dist/bin/twine check --strict dist/*
	rm -rf .venv-dist

clean:
	rm -rf .venv site dist .mypy_cache .ruff_cache .pytest_cache .hypothesis

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/pip install -q -c constraints.txt -e '.[full]'
	@touch $@

.venv/installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	$(BIN)/pip install -q -c constraints.txt torch
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]'
	@touch .venv/installed $@
