# make demo and make test need nothing but a Linux machine: both make the environments first.

# More threads than cores spin on one another: SGLang decodes 10 times slower.
export OMP_NUM_THREADS := 1
# Images often set it; then each of thousands of processes would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venvs/main/bin
PYTEST := $(BIN)/python -m pytest
KILLS := 300
MINUTES := 60
TIERS := tests/unit tests/contract tests/integration $(if $(SLURM),tests/slurm)

.DEFAULT_GOAL := help
.PHONY: help setup setup-tests framework-programs harnesses gyms oracles slurm slurm-roots demo test tests durations \
  check lint format unit contract integration slurm-tests acceptance nightly soak parity gpu gpu8 docs clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make or repair the environments serve and main in .venvs/
	@scripts/setup.sh

setup-tests: ## the same with the development tools, and the environment camel
	@scripts/setup.sh tests

framework-programs: setup-tests ## SDKs and agent frameworks (1.5 GB), which only acceptance tests run
	@scripts/setup_framework_programs.sh

harnesses: setup ## coding harnesses from npm and PyPI (4 GB), which only acceptance tests run
	@scripts/setup_harnesses.sh

gyms: ## Pythons of gyms (2 GB), which only acceptance tests run
	@scripts/setup_gyms.sh

oracles: setup ## a Python with TRL and verl (0.4 GB), which only acceptance tests ask
	@scripts/setup_oracles.sh

slurm: ## the distribution's Slurm, for devclusters (root on Debian or Ubuntu; starts no service)
	@scripts/install_slurm.sh

slurm-roots: slurm ## Slurm 24.11 and 26.05 and Apptainer beside the machine's own (0.4 GB in .roots/)
	@scripts/make_root.sh 24.11 26.05 apptainer

demo: setup ## train a tiny agent end to end on this machine's CPU (FRESH=1 starts over)
	@$(BIN)/areal-hpc run recipes/quickstart.yaml $(if $(FRESH),--fresh)
	@echo "make demo FRESH=1 keeps this run and starts another"

test: setup-tests $(if $(SLURM),slurm) ## all that needs no GPU: checks and tests (SLURM=1: those on Slurm too)
	@$(MAKE) --no-print-directory --jobs 2 check tests

tests: setup-tests
	@$(BIN)/python -m tests.support.whole_run $(TIERS)

durations: ## test, and write how long each file takes
	@WRITE_DURATIONS=1 $(MAKE) --no-print-directory test

check: setup-tests ## style, types, import contracts, line budgets, figures of documents
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@$(BIN)/python -m tests.support.line_budgets
	@$(BIN)/python -m tests.support.site.figures

lint: setup-tests ## only the style
	$(BIN)/ruff check .

format: setup-tests ## rewrite the code in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

unit: setup-tests ## pure logic
	$(PYTEST) tests/unit

contract: setup-tests ## formats and edges that must not move
	$(PYTEST) tests/contract

integration: setup-tests ## real servers, real processes
	$(PYTEST) tests/integration

slurm-tests: setup-tests slurm ## a real Slurm on this machine (root, for its namespaces)
	$(PYTEST) tests/slurm

acceptance: ## what the long proofs need (8 GB), then all of them in one go (four hours)
acceptance: setup-tests slurm-roots harnesses framework-programs gyms oracles
	@scripts/install_browser.sh
	$(PYTEST) tests/acceptance

nightly: ## the long proofs, MINUTES=60 a call: each call goes on where the last one stopped
nightly: setup-tests slurm-roots harnesses framework-programs gyms oracles
	@scripts/install_browser.sh
	@$(BIN)/python -m tests.support.nightly --minutes $(MINUTES)

soak: setup-tests ## kill -9 KILLS=300 random processes, by part, from where the last call stopped
	SOAK_KILLS=$(KILLS) $(PYTEST) tests/acceptance/test_soak.py

parity: setup-tests ## measure every layout against transformers (minutes)
	$(PYTEST) tests/acceptance/test_parity.py

gpu: ## tests and benchmarks that need a CUDA device, and no network (PYTHON=, WHEELS=, OUT=)
	@benchmarks/gpu/run.sh

gpu8: ## layouts, servers, kills and a recipe on a node of eight GPUs, with .venvs of setup.sh gpu
	@TIER=gpu_node benchmarks/gpu/run.sh

docs: setup-tests ## the site, in site/ (its tools take 170 MB)
	@scripts/setup_docs.sh
	@$(BIN)/python -m tests.support.site.pages
	@NO_MKDOCS_2_WARNING=1 .venvs/docs/bin/mkdocs build --quiet
	@echo "the site is in site/: $(BIN)/python -m http.server --directory site"

clean: ## remove caches; environments and runs stay
	rm -rf build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find areal_hpc tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +
