# `make demo` and `make test` are all a newcomer needs; both set up .venv first.

SHELL := /bin/bash
PYTHON ?= python3
WHEELS ?=
BIN := .venv/bin
PACKAGES := core wire kv operator services cli
SOURCES := $(PACKAGES) tests bench tools examples models
# Two files of tests at a time, in their order: an engine's start keeps one core busy, and no more.
BY_TWOS := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: setup demo up test test-cluster check format wire crds images bench wheelhouse clean

setup: .venv/.ready ## make .venv with everything; WHEELS=DIR installs offline

.venv/.ready: pyproject.toml constraints.txt tools/setup.sh
	PYTHON="$(PYTHON)" WHEELS="$(WHEELS)" tools/setup.sh
	@touch $@

demo: setup ## answer questions about a handbook made just now, cold and warm
	$(BIN)/python examples/demo.py

up: setup ## run examples/quickstart.yaml on this machine until Ctrl-C
	$(BIN)/ragcache up -f examples/quickstart.yaml

test: check ## everything CI runs, fastest first
	$(BIN)/python -m pytest -n logical tests/unit
	$(BIN)/python -m tests.cluster.binaries
	$(BIN)/python -m pytest $(BY_TWOS) tests/integration tests/e2e
	$(BIN)/python -m pytest tests/cluster

test-cluster: setup ## a real Kubernetes on this machine: API, operator, pods, answers (root, Debian)
	$(BIN)/python -m pytest tests/cluster

check: setup ## format, lint, types, import layers, generated code
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python tools/generate_wire.py --check
	$(BIN)/python tools/generate_crds.py --check
	$(BIN)/python tools/generate_chart.py --check

format: setup ## rewrite the sources in the house format
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

wire: setup ## regenerate wire/ragcache_wire/v1 from the protos
	$(BIN)/python tools/generate_wire.py

crds: setup ## regenerate crds/, docs/reference/ and the chart from the typed spec and the chart's schema
	$(BIN)/python tools/generate_crds.py
	$(BIN)/python tools/generate_chart.py

images: setup ## the images of this release as OCI archives, without Docker (root, debootstrap)
	$(BIN)/python -m tools.images --out dist/images

bench: setup ## every benchmark, the quick way
	@for file in bench/*.py; do \
		name=$$(basename $$file .py); \
		if grep -q 'add_argument("--quick"' $$file; then \
			echo "== $$name"; $(BIN)/python -m bench.$$name --quick || exit 1; \
		fi; \
	done
	@echo "== blend_quality, text that nobody trained on"
	@$(BIN)/python -m bench.blend_quality --quick --foreign

wheelhouse: ## fill wheelhouse/ for `make setup WHEELS=wheelhouse` on a machine without network
	PYTHON="$(PYTHON)" tools/setup.sh --download wheelhouse

clean: ## remove the environment, caches and local data
	rm -rf .venv .ragcache wheelhouse dist .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
