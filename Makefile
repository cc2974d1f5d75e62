.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=

.PHONY: help setup demo test faults bench check fmt lock

help: ## what there is to do
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  make \1\t/' | expand -t 16

setup: $(READY) ## create .venv with the locked dependencies and the klaxon command in it

$(READY): pyproject.toml infra/locks/dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Klaxon needs Python 3.11 or later; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@test -x $(BIN)/python || { echo "setting up .venv: about 350 MB to download, 1.2 GB on disk, once; takes a minute"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r infra/locks/dev.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

demo: $(READY) ## the whole pipeline on this machine, one drill (ARGS="--fault none" and others)
	@$(BIN)/klaxon demo $(ARGS)

test: $(READY) ## all tests; those that need Java are skipped, with the reason, where there is none
	@$(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder $(ARGS)

faults: $(READY) ## the long fault suite on real Kafka: a table of what was broken (SEED=…, ROUNDS=…)
	@$(BIN)/python -m tests.faults $(if $(SEED),--seed $(SEED)) $(if $(ROUNDS),--rounds $(ROUNDS)) $(ARGS)

bench: $(READY) ## measure speed and memory; a table, and build/bench.json
	@$(BIN)/python -m tests.bench $(ARGS)

check: $(READY) ## ruff, format, mypy strict, import rules; changes nothing
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

fmt: $(READY) ## format, and mend what ruff can mend
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

lock: ## renew the locks from pyproject.toml (needs uv)
	uv pip compile pyproject.toml --extra embedded --group dev --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-header --quiet --output-file infra/locks/dev.txt
	uv pip compile pyproject.toml --universal --python-version 3.11 --constraints infra/locks/dev.txt \
	  --generate-hashes --no-emit-index-url --no-header --quiet --output-file infra/locks/runtime.txt
	uv pip compile --group build --universal --python-version 3.11 --constraints infra/locks/dev.txt \
	  --generate-hashes --no-emit-index-url --no-header --quiet --output-file infra/locks/build.txt
