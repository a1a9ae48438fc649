# `make demo` and `make test` are all that a newcomer needs; both set up .venv first.

SHELL := /bin/bash
PYTHON ?= python3
WHEELS ?=
PART ?=
T ?=
DOCS ?=
QUESTIONS ?=
BIN := .venv/bin
PACKAGES := core wire kv operator services cli
SOURCES := $(PACKAGES) tests harness bench tools examples models

.PHONY: help setup dev llama-index vllm-0.31 demo up test test-slow test-cluster coverage check format wire crds settings metrics images bench docs wheelhouse sbom clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9.-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/.ready ## make .venv with everything; WHEELS=DIR installs offline

.venv/.ready: pyproject.toml constraints.txt tools/setup.sh
	PYTHON="$(PYTHON)" WHEELS="$(WHEELS)" tools/setup.sh
	@touch $@

dev: ## make .venv for one part, without vLLM and torch: make dev PART=operator
	PYTHON="$(PYTHON)" WHEELS="$(WHEELS)" tools/setup.sh --part "$(PART)"

llama-index: .venv-llama-index/.ready ## make .venv-llama-index, which a test of clients needs; see docs/api.md

.venv-llama-index/.ready: constraints-llama-index.txt
	"$(PYTHON)" -m venv .venv-llama-index
	.venv-llama-index/bin/python -m pip install --quiet $(if $(WHEELS),--no-index --find-links "$(WHEELS)") -r constraints-llama-index.txt
	@touch $@

vllm-0.31: .venv-vllm-0.31/.ready ## make .venv-vllm-0.31, for the engine's tests on the older vLLM

.venv-vllm-0.31/.ready: pyproject.toml constraints.txt constraints-vllm-0.31.txt tools/setup.sh
	PYTHON="$(PYTHON)" WHEELS="$(WHEELS)" tools/setup.sh --vllm 0.31
	@touch $@

demo: setup ## answer questions from documents, cold and from the store; yours with DOCS=DIR QUESTIONS=FILE
	$(BIN)/python examples/demo.py $(if $(DOCS),--docs "$(DOCS)") $(if $(QUESTIONS),--questions "$(QUESTIONS)")

up: setup ## run examples/quickstart.yaml on this machine until Ctrl-C
	$(BIN)/ragcache up -f examples/quickstart.yaml

ifeq ($(T),)
test: setup llama-index ## run what CI runs, fastest first; T=tests/unit/operator runs one part
	$(BIN)/python -m tools.test_stages
else
test: $(if $(wildcard $(BIN)/python),,setup)
	$(BIN)/python -m pytest $(T)
endif

test-slow: setup vllm-0.31 ## run the tests that take many minutes each: upgrade, soak; part of a release
	$(BIN)/python -m tools.test_stages --slow

test-cluster: setup ## run the tests on a real Kubernetes on this machine (root, Debian)
	$(BIN)/python -m pytest tests/cluster -m "not slow"

coverage: setup ## measure which lines the unit tests reach
	$(BIN)/python -m pytest -n logical tests/unit --cov --cov-report=term:skip-covered

check: setup ## check format, lint, types, import layers, generated code, terms and prose
	$(BIN)/python -m tools.test_stages --only check

format: ## rewrite the sources in the project's format
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

wire: setup ## regenerate wire/ragcache_wire/v1 from the protos
	$(BIN)/python tools/generate_wire.py

crds: setup ## regenerate crds/, docs/reference/ and the chart's values
	$(BIN)/python tools/generate_crds.py
	$(BIN)/python tools/generate_chart.py

settings: setup ## regenerate docs/reference/settings.md from the settings tables
	$(BIN)/python tools/generate_settings.py

metrics: setup ## regenerate docs/reference/metrics.md, the dashboards and the rules
	$(BIN)/python tools/generate_metrics.py
	$(BIN)/python -m tools.dashboards --write

images: setup ## build the images as OCI archives, without Docker (root, debootstrap)
	$(BIN)/python -m tools.images --out dist/images

bench: setup ## run every benchmark with --quick
	@for file in bench/[a-z]*.py; do \
		name=$$(basename $$file .py); \
		echo "== $$name"; $(BIN)/python -m bench.$$name --quick || exit 1; \
	done

docs: setup ## build the documentation site into site/; broken links are errors
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

sbom: ## print what the environment consists of, as CycloneDX JSON
	.venv/bin/python -m tools.sbom

wheelhouse: ## fill wheelhouse/ for `make setup WHEELS=wheelhouse` on a machine without network
	PYTHON="$(PYTHON)" tools/setup.sh --download wheelhouse

clean: ## remove the environment, caches and local data
	rm -rf .venv .venv-llama-index .venv-vllm-* .ragcache wheelhouse dist site .coverage .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
