# Two commands do all set-up on a fresh machine: `make quickstart` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Build dependencies are pinned too: pip applies this file inside the isolated build.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt

.DEFAULT_GOAL := help

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */\t/' | expand -t 17

setup: $(STAMP)  ## create .venv and install the project with its development tools

$(STAMP): pyproject.toml constraints.txt csrc/CMakeLists.txt $(wildcard csrc/*.cpp csrc/*.cu csrc/*.h)
	@$(PYTHON) -c 'import sys; sys.exit(0 if (3, 11) <= sys.version_info[:2] < (3, 13) else "$(PYTHON) is Python %d.%d; Python 3.11 or 3.12 is needed: make PYTHON=python3.12 …" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): some minutes, and up to 3 GB to download (all that pip says: $(VENV)/setup.log)"
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@set -o pipefail; $(BIN)/python -m pip install --progress-bar raw --editable '.[dev]' 2>&1 | tee $(VENV)/setup.log \
	  | bash tools/dev/pip_progress.sh || { tail -n 40 $(VENV)/setup.log; exit 1; }
	@echo "installed"
	@touch $@

quickstart: $(STAMP)  ## corpus, tokenizer, training over two ranks, resume on another layout, sample
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash tools/quickstart.sh

quickstart-bert: $(STAMP)  ## sentences, WordPiece, a BERT over two ranks, its masks filled
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash tools/quickstart_bert.sh

test: $(STAMP)  ## run the tests: a pairwise cover of the layouts
	$(BIN)/python -m pytest -m "not full and not gpu"

test-full: $(STAMP)  ## run all tests: the whole product of layouts, kills and reshards
	$(BIN)/python -m pytest -m "not gpu"

test-gpu: $(STAMP)  ## run the tests that need a GPU; one is enough
	$(BIN)/python -m pytest -m gpu tests/gpu

lint: $(STAMP)  ## ruff, mypy --strict and the import contract
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=. $(BIN)/lint-imports

bench: $(STAMP)  ## measure against the alternatives, side by side
	$(BIN)/python tools/benchmark/training_speed.py --size s384 s768
	$(BIN)/python tools/benchmark/pretrain_vs_plain_loop.py
	$(BIN)/python tools/benchmark/step_overhead.py --threads 1
	$(BIN)/python tools/benchmark/optimizer_step.py
	$(BIN)/python tools/benchmark/checkpoint_speed.py
	$(BIN)/python tools/benchmark/data.py
	$(BIN)/torchrun --nproc-per-node 2 tools/benchmark/activation_memory.py

# Of all that pip says, the steps of the build, and the end where it fails.
kernels: $(STAMP)  ## rebuild the compiled extension after a change in csrc/
	@mkdir -p build
	@set -o pipefail; $(BIN)/python -m pip install --verbose --no-deps --editable . 2>&1 | tee build/kernels.log \
	  | sed -unE '/\[[0-9]+\/[0-9]+\]/p' || { tail -n 60 build/kernels.log; exit 1; }
	@$(BIN)/python tools/doctor.py --device cpu --kernels native

docs: $(STAMP)  ## check that every command and flag in the documents is right
	$(BIN)/python -m pytest tests/docs

clean:  ## remove what was built; .venv and quickstart/ stay
	rm -rf build dist megatron/_C*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

.PHONY: help setup quickstart quickstart-bert test test-full test-gpu lint bench kernels docs clean
