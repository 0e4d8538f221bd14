# make test and make demo set up everything they need, once, in .venv.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
# One thread a process: ranks share the cores. No model hub: everything used here is in the repository.
export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1

.PHONY: help demo test clean
.DEFAULT_GOAL := help

help:  ## Show this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(READY)  ## Train the built-in toy model on CPU with two ranks
	$(BIN)/asyncflow dancegrpo --ranks 2

test: $(READY)  ## Check style and types, and run all tests
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python -m pytest

clean:  ## Remove the environment and the caches, not the runs
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache build *.egg-info

# torch goes first and pinned, so that nothing below can choose another build of it.
$(READY): setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@
