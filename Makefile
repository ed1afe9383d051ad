# make up, make test; `make help` lists the rest. Variables may be given either way: `make up PORT=8081` or `PORT=8081 make up`.

PYTHON ?= python3
PORT ?= 8080
HOST ?= 127.0.0.1
TORCH_INDEX ?=
export TORCH_INDEX

INSTALL := $(PYTHON) gateway/local/install.py
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help up test lint format types install bench-peers real-servers lock clean
.NOTPARALLEL:

help: ## List the targets
	@echo "Usage: make TARGET [VARIABLE=value]"
	@echo
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 12
	@echo
	@echo "Variables:"
	@echo "  PORT=8080           port of the gateway (make up)"
	@echo "  HOST=127.0.0.1      address the gateway listens on (make up)"
	@echo "  PYTHON=python3      the Python, 3.11 or newer, that .venv is made with"
	@echo "  TORCH_INDEX=cpu     take torch from PyTorch's index for CPUs (saves GBs without a GPU), or from the index at a URL"
	@echo "  ARGS=               more arguments for pytest (make test), such as ARGS='-k admission -x'"

up: ## Install, then start Postgres, Redis, a worker and the gateway; Ctrl-C stops them all
	@$(INSTALL) worker local
	@exec $(BIN)/penstock up --host $(HOST) --port $(PORT)

test: ## Install what the tests need and run the whole suite, on all cores
	@$(INSTALL) worker local dev
	@exec $(BIN)/pytest -n auto $(ARGS)

lint: ## Check style
	@$(INSTALL) worker local dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: ## Check types
	@$(INSTALL) worker local dev
	$(BIN)/mypy

format: ## Rewrite the sources in the house's style
	@$(INSTALL) worker local dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

install: ## Install everything into .venv without starting anything
	@$(INSTALL) worker local dev

bench-peers: ## Install the gateways that benchmarks/gateway.py compares with, each in an environment of its own (npm, PyPI)
	@$(INSTALL) worker local dev
	npm install --silent --no-fund --no-audit --prefix .penstock/peers/portkey @portkey-ai/gateway@1.15.2
	$(BIN)/uv venv --quiet --allow-existing .penstock/peers/litellm
	$(BIN)/uv pip install --quiet --python .penstock/peers/litellm/bin/python 'litellm[proxy]==1.106.12'

real-servers: ## Install real model servers for tests/real_servers (SERVERS="transformers llamacpp vllm"; llamacpp compiles)
	@$(INSTALL) worker local dev
	$(BIN)/python tests/real_servers/servers.py $(SERVERS)

lock: ## Renew the pinned, hashed dependencies of the gateway's image
	@$(INSTALL) worker local dev
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes --no-emit-index-url \
	  --custom-compile-command "make lock" --extra otel --extra cache pyproject.toml -o deploy/gateway.lock

clean: ## Remove .venv and caches; .penstock (your data) stays
	rm -rf .venv .install.lock .pytest_cache .ruff_cache .mypy_cache .hypothesis build *.egg-info
