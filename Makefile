# Usage: make TARGET [ARGS="…"]
.DEFAULT_GOAL := help
.PHONY: help setup suffix train test check clean

PYTHON := .venv/bin/python

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Create or update .venv; does nothing when it is current
	@bash scripts/setup.sh

# The package compiles against nanobind and protobuf's compiler; these build requirements lie in a
# folder of their own, so that .venv keeps its versions of everything.
suffix: setup ## Build the package of the `suffix` drafter into .venv (a few minutes)
	$(PYTHON) -m pip install --quiet --upgrade --target build/suffix-tools \
	  nanobind==2.9.2 grpcio-tools cmake ninja setuptools wheel
	PYTHONPATH=build/suffix-tools \
	  CMAKE_ARGS="-Dnanobind_DIR=$$(PYTHONPATH=build/suffix-tools $(PYTHON) -m nanobind --cmake_dir)" \
	  $(PYTHON) -m pip install --no-build-isolation --no-deps arctic-inference==0.3.0

train: setup ## Train a policy: ARGS are Hydra overrides of scripts/train.py
	$(PYTHON) scripts/train.py $(ARGS)

# Live engines of two test files side by side would fight for cores with more threads each.
# pytest ends with 5 where ARGS leave it nothing of one half to run.
test: setup ## Run the tests that measure time, then the rest, two files at a time: ARGS go to pytest
	$(PYTHON) -m pytest -m alone $(ARGS) || [ $$? -eq 5 ]
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not alone" $(ARGS) || [ $$? -eq 5 ]

check: setup ## Check format, lint, types, import boundaries and configuration
	$(PYTHON) -m ruff format --check
	$(PYTHON) -m ruff check
	$(PYTHON) -m mypy
	$(PYTHON) -m pytest tests/test_import_boundaries.py tests/test_config.py

clean: ## Remove caches and build leftovers; keeps .venv and what runs wrote
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
	find policy envs scripts tests -name __pycache__ -type d -prune -exec rm -rf {} +
