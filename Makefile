# make demo and make test need nothing but a Linux machine: both make the environments first.

# More threads than cores spin on one another: SGLang decodes 10 times slower.
export OMP_NUM_THREADS := 1

TRAIN := .venvs/train/bin
AGENTS := .venvs/agents/bin
PYTEST := $(TRAIN)/python -m pytest
KILLS := 300
# Three at a time: many tests wait for Slurm, for a start or for a time to pass.
# A worker that dies is not replaced, and what is left of its file does not run: pytest-xdist would
# give the same test out again, and the suite may never end.
SIDE_BY_SIDE := --numprocesses 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

.DEFAULT_GOAL := help
.PHONY: help setup frameworks framework-programs harnesses harnesses-newest gyms oracles slurm demo test check \
  lint format unit contract integration slurm-tests acceptance soak parity gpu gpu8 clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make or repair the environments in .venvs/
	@scripts/setup.sh all

frameworks: ## all environments, those of the agent frameworks included, which only tests need
	@scripts/setup.sh tests

framework-programs: setup ## SDKs and agent frameworks (1.5 GB), which only acceptance tests run
	@scripts/setup_framework_programs.sh

harnesses: setup ## coding harnesses from npm and PyPI (4 GB), which only acceptance tests run
	@scripts/setup_harnesses.sh

harnesses-newest: setup ## the newest release of each coding harness in the acceptance test's scene; writes a table
	@$(TRAIN)/python -m tests.support.newest_harnesses

gyms: ## Pythons of gyms (2 GB), which only acceptance tests run
	@scripts/setup_gyms.sh

oracles: setup ## a Python with TRL and verl (0.4 GB), which only acceptance tests ask
	@scripts/setup_oracles.sh

slurm: ## the distribution's Slurm, for devclusters (root on Debian or Ubuntu; starts no service)
	@scripts/install_slurm.sh

demo: setup ## train a tiny agent end to end on this machine's CPU (FRESH=1 starts over)
	@$(AGENTS)/areal-hpc run recipes/quickstart.yaml $(if $(FRESH),--fresh)
	@echo "make demo FRESH=1 keeps this run and starts another"

test: frameworks check ## everything that needs no GPU: the checks, then all tests
	@scripts/install_slurm.sh && code=0 || code=$$?; \
	case $$code in 0) slurm=tests/slurm ;; 78) slurm= ;; *) exit $$code ;; esac; \
	$(TRAIN)/python -m tests.support.whole_run $(SIDE_BY_SIDE) tests/unit tests/contract \
	  tests/integration $$slurm && \
	{ [ -n "$$slurm" ] || echo "NOT TESTED here: Slurm (tests/slurm), for the reason at the top"; }

check: setup ## style, types and import contracts
	$(TRAIN)/ruff check .
	$(TRAIN)/ruff format --check .
	$(TRAIN)/mypy
	$(TRAIN)/lint-imports

lint: setup ## only the style
	$(TRAIN)/ruff check .

format: setup ## rewrite the code in the project's style
	$(TRAIN)/ruff check --fix .
	$(TRAIN)/ruff format .

unit: setup ## pure logic
	$(PYTEST) tests/unit

contract: setup ## formats and edges that must not move
	$(PYTEST) tests/contract

integration: frameworks ## real servers, real processes
	$(PYTEST) tests/integration

slurm-tests: setup slurm ## a real Slurm on this machine (root, for its namespaces)
	$(PYTEST) tests/slurm

acceptance: setup harnesses framework-programs gyms oracles ## kill, compare and train at length, and write the tables (four hours)
	@scripts/install_browser.sh
	$(PYTEST) tests/acceptance

soak: setup ## kill -9 KILLS=300 random processes, by part, from where the last call stopped
	SOAK_KILLS=$(KILLS) $(PYTEST) tests/acceptance/test_soak.py

parity: setup ## measure every layout against transformers and write docs/parity.md (minutes)
	$(PYTEST) tests/acceptance/test_parity.py

gpu: ## tests and benchmarks that need a CUDA device, and no network (PYTHON=, WHEELS=, OUT=)
	@benchmarks/gpu/run.sh

gpu8: ## layouts, servers, kills and a recipe on a node of eight GPUs, with .venvs of setup.sh gpu
	@TIER=gpu_node benchmarks/gpu/run.sh

clean: ## remove caches; environments and runs stay
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find areal_hpc tests examples benchmarks -name __pycache__ -prune -exec rm -rf {} +
