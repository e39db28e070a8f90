# The two commands of a newcomer are `make run` and `make test`. Each makes .venv when it is missing.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK = 1

.PHONY: run test test-slow check docs bench dist proto clean

run: .venv/installed
	@echo '$$ fedbudget run --dataset breast-cancer --nodes 5 --partition dirichlet:0.5 --budget time=5s'
	@$(BIN)/fedbudget run --dataset breast-cancer --nodes 5 --partition dirichlet:0.5 --budget time=5s
	@echo
	@echo '$$ fedbudget compare --dataset digits --model svm --nodes 5 --cases 1,2,3,4 --taus 1,10,100 --seeds 2 --budget time=15s'
	@$(BIN)/fedbudget compare --dataset digits --model svm --nodes 5 --cases 1,2,3,4 --taus 1,10,100 --seeds 2 --budget time=15s

test: .venv/installed-dev
	$(BIN)/python -m pytest -q -m "not slow" -n 2 --dist loadgroup

test-slow: .venv/installed-dev
	$(BIN)/python -m pytest -q -m slow

check: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(MAKE) -s docs

# The documentation as a site; whatever is wrong in it ends the build.
docs: .venv/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

bench: .venv/installed-dev
	$(BIN)/python -m benchmarks

# What a release has: sdist and wheel, in dist/. `python tools/try_wheel.py --all` then installs and uses the wheel.
dist:
	rm -rf dist .venv-dist
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/pip install -q build twine
	.venv-dist/bin/python -m build
	.venv-dist/bin/twine check --strict dist/*
	rm -rf .venv-dist

# The messages on the wire. An older compiler on purpose: what it writes works with protobuf 5.29 and newer.
proto: .venv/bin/python
	$(PYTHON) -m venv .venv-proto
	.venv-proto/bin/pip install -q grpcio-tools==1.71.2 setuptools
	.venv-proto/bin/python -m grpc_tools.protoc -I src --python_out=src --pyi_out=src src/fedbudget/engines/remote/wire.proto
	rm -rf .venv-proto

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
