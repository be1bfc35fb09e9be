# Needs Python 3.11 to 3.13 and nothing else; each target sets up .venv itself, and compiles the CPU
# kernels meanwhile, if there is a compiler.

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
BUF   := clients/node/node_modules/.bin/buf
MODEL ?= demo
ARGS  ?=

SUITABLE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c '$(SUITABLE)' 2>/dev/null && echo $$p && break; done)

# Bytecode is kept from the first import on: pip would compile every module that no one imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test compose-test test-floor architectures variants serve bench gpu gpu-serving peers lint format \
	protos contracts contracts-release docs lock clean

help: ## This list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 20

demo: $(STAMP) ## Serve the demo model, ask it several things at once, show it at work
	$(BIN)/octavo demo $(ARGS)

test: $(STAMP) ## Run the tests (ARGS="tests/octavo -k client" for some of them)
	$(BIN)/pytest --numprocesses auto --dist loadfile --no-loadscope-reorder $(ARGS)

compose-test: $(STAMP) ## Build the images and put docker/compose.yaml through it (root, Debian's Docker and mmdebstrap)
	$(BIN)/pytest tests/deployment/test_compose_containers.py -m slow -s -x $(ARGS)

test-floor: $(STAMP) ## Run tests with the lowest versions that pyproject.toml allows (TORCH="torch==2.13.0": another PyTorch)
	TORCH="$(TORCH)" tests/floor.sh $(ARGS)

architectures: $(STAMP) ## Hold every decoder of transformers to "right or refused" (ARGS="llama gpt2")
	$(BIN)/python -m tests.architectures.sweep $(ARGS)

variants: $(STAMP) ## Compile every kernel that engines of real models launch on NVIDIA's GPUs (ARGS="--gpus sm_90")
	$(BIN)/python -m tests.variants.sweep $(ARGS)

serve: $(STAMP) ## Serve MODEL (default: demo)
	$(BIN)/octavo serve --model $(MODEL) $(ARGS)

bench: $(STAMP) ## Serve MODEL and measure its throughput (ARGS="-c 1 8 32")
	$(BIN)/octavo bench throughput --serve $(MODEL) $(ARGS)

gpu: $(STAMP) ## Test and time the kernels on the GPU at hand (ARGS="--parts decode")
	$(BIN)/python -m benchmarks.gpu $(ARGS)

gpu-serving: $(STAMP) ## Serve LLaMA-7B on the GPU beside transformers (ARGS="--model LLaMA-13B")
	$(BIN)/python -m benchmarks.gpu.serving $(ARGS)

peers: $(STAMP) ## Octavo beside vLLM, OpenVINO, llama.cpp and transformers
	$(BIN)/python -m benchmarks.peers $(ARGS)

lint: $(STAMP) ## ruff, mypy and the words of docstrings
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/python -m tools.docstring_words

format: $(STAMP) ## Lay the code out and fix what can be fixed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

protos: $(STAMP) ## Make the Python stubs anew
	$(BIN)/python protos/generate.py

contracts: $(BUF) ## buf's checks of the contracts: style, and that nothing released was broken
	$(BUF) lint protos
	$(BUF) breaking protos --against protos/released.binpb

contracts-release: $(BUF) ## Make today's contracts the ones that `make contracts` holds later ones to
	$(BUF) build protos --exclude-source-info --output protos/released.binpb

docs: $(STAMP) ## Make docs/api.md, docs/flags.md, docs/parameters.md, the dashboard and the tables of metrics and models anew
	$(BIN)/python -m tools.api_reference
	$(BIN)/python -m tools.flag_table
	$(BIN)/python -m tools.parameter_table
	$(BIN)/python -m tools.dashboard
	$(BIN)/python -m tools.metric_table
	$(BIN)/python -m tools.model_table
	$(BIN)/python -m tools.rank_table

# The lowest Python, and all others and every machine with it. pip is the virtual environment's own.
lock: $(BIN)/pip ## Bring constraints.txt in line with pyproject.toml (ARGS=--upgrade: the newest versions)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip compile pyproject.toml --quiet --universal --python-version 3.11 --all-extras \
		--no-emit-package pip --no-annotate --custom-compile-command 'make lock' \
		--output-file constraints.txt $(ARGS)

clean: ## Remove everything that is made, .venv included
	rm -rf $(VENV) build dist octavo/v1 .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find engine kernels octavo router tests benchmarks -name __pycache__ -prune -exec rm -rf {} +

$(STAMP): pyproject.toml constraints.txt $(wildcard protos/*.py protos/octavo/v1/*.proto) | $(BIN)/pip
	$(BIN)/python kernels/cpu/prebuild.py build/kernels & kernels=$$!; \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
		--constraint constraints.txt --editable '.[dev]'; installed=$$?; \
	wait $$kernels; exit $$installed
	touch $@

$(BIN)/pip:
	@test -n "$(PYTHON)" || { echo "Python 3.11 to 3.13 is needed (PYTHON=... to name it)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(BUF): clients/node/package-lock.json
	npm --prefix clients/node ci --ignore-scripts
	touch $@
