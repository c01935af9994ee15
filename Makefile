# `make help` lists the targets. Each sets up what it needs: see tools/setup_env.py.
#
# PYTHON  the interpreter to start from           make test PYTHON=python3.12
# TORCH   the version of torch to build against   make test TORCH=2.9.1
#         several for `wheel` and `test-wheel`    make wheel TORCH="2.11.0 2.15.0"
# Each pair of a Python version and a torch has a virtual environment and a build folder of its own.

PYTHON ?= python3
TORCH ?= 2.11.0

# Asked once, and only by targets that need it: "cpython-312", or a message where it is too old.
tag = $(eval tag := $(shell $(PYTHON) tools/setup_env.py --tag))$(or $(tag),$(error \
  PYTHON=$(PYTHON) is of no use here: gnsilu needs Python 3.10 or newer))
python = $(if $(tag),$(PYTHON))
name = $(tag)-torch$(if $(word 2,$(TORCH)),$(error \
  TORCH=$(TORCH): wheel and test-wheel alone take several),$(TORCH))
venv = .venv-$(name)
build = build/$(name)
run = $(venv)/bin/python
setup = $(python) tools/setup_env.py --venv $(venv) --build $(build) --torch $(TORCH)

cpp_sources = $(shell find csrc examples include tests/cpp -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh')
python_sources := benchmarks cmake python setup.py tests tools

# `make gpu-test INSTALLED=1`: PYTHON imports gnsilu already, from PYTHONPATH for instance, and
# GTEST_DIR may hold C++ tests that were built elsewhere.
INSTALLED ?=
GTEST_DIR ?= $(if $(INSTALLED),,$(build)/tests)

.DEFAULT_GOAL := help
.PHONY: help demo test test-diffusers wheel test-wheel gpu-test gpu-pending lint format clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s%s\n", $$1, $$2 }' Makefile

demo: ## run an image autoencoder's GroupNorm + SiLU sites on a photograph; pictures into demo/
	@$(setup) test demo
	$(run) benchmarks/demo.py --output demo

test: ## C++ and Python tests; those that need a GPU are skipped without one
	@$(setup) test demo
	$(venv)/bin/ctest --test-dir $(build) --output-on-failure --no-tests=error
	GNSILU_CPP_TESTS=$(abspath $(build)/tests) $(run) -m pytest -ra --cases tests/python

DIFFUSERS ?= 0.35.2
test-diffusers: ## gnsilu.patch on the models of another diffusers: DIFFUSERS=0.35.2
	@$(setup) test demo
	$(run) -m pip install --quiet --no-deps --upgrade --target build/diffusers-$(DIFFUSERS) \
	  diffusers==$(DIFFUSERS)
	PYTHONPATH=build/diffusers-$(DIFFUSERS) $(run) -m pytest -ra tests/python/test_patch_diffusers.py

# Built in the folders of `make test`, so that only what changed is compiled; any torch but those of
# TORCH's minor versions refuses it. For several, a wheel for each is built, and one made of them.
WHEELS := dist
first_torch_run = .venv-$(tag)-torch$(firstword $(TORCH))/bin/python
wheel: ## a wheel for this Python and this torch, or these: TORCH="2.11.0 2.15.0"; into dist/
ifeq ($(word 2,$(TORCH)),)
	@$(setup) test
	GNSILU_BUILD_DIR=$(build) GNSILU_BUILD_TESTS=ON \
	  $(run) -m pip wheel --no-build-isolation --no-deps --wheel-dir $(WHEELS) .
else
	rm -rf build/wheels
	set -e; for torch in $(TORCH); do $(MAKE) wheel TORCH=$$torch WHEELS=build/wheels; done
	$(first_torch_run) tools/merge_wheels.py --output dist build/wheels/gnsilu-*.whl
endif

test-wheel: wheel ## the Python tests against that wheel, in a fresh environment for each torch
	set -e; for torch in $(TORCH); do \
	  rm -rf build/wheel-venv; \
	  $(first_torch_run) -m venv build/wheel-venv; \
	  build/wheel-venv/bin/pip install --quiet torch==$$torch pytest hypothesis numpy wheel "cmake>=3.24" \
	    "$$(ls -t dist/gnsilu-*.whl | head -n 1)"; \
	  GNSILU_CPP_TESTS=$(abspath build)/$(tag)-torch$$torch/tests \
	    build/wheel-venv/bin/python -m pytest -ra tests/python; \
	done

gpu-test: ## every test on a GPU, memory checkers too; writes tests/gpu_record.json
	@$(if $(INSTALLED),,nvidia-smi -L >/dev/null 2>&1 || \
	  { echo "gpu-test needs a CUDA GPU and nvidia-smi; without one: make gpu-pending" >&2; exit 1; })
	@$(if $(INSTALLED),,$(setup) test demo)
	$(if $(INSTALLED),$(python),$(run)) tools/gpu_test.py --gtest-dir "$(GTEST_DIR)"

# The reason goes through the environment as it was typed: quotes and dollar signs stay.
unexport REASON
gpu-pending: export GPU_PENDING_REASON := $(value REASON)
gpu-pending: ## REASON="...": say in tests/gpu_record.json that no GPU was to be had
	@$(python) tools/gpu_record.py pending -- "$$GPU_PENDING_REASON"

lint: ## formatting, style, types, lengths of files
	@$(setup) lint
	$(venv)/bin/clang-format --dry-run --Werror $(cpp_sources)
	$(venv)/bin/ruff check $(python_sources)
	$(venv)/bin/ruff format --check $(python_sources)
	$(venv)/bin/mypy
	$(python) tools/check_lengths.py

format: ## let clang-format and ruff rewrite the sources
	@$(setup) lint
	$(venv)/bin/clang-format -i $(cpp_sources)
	$(venv)/bin/ruff check --fix $(python_sources)
	$(venv)/bin/ruff format $(python_sources)

clean: ## remove what was built; .venv-* stay
	rm -rf build dist demo .pytest_cache .mypy_cache .ruff_cache .hypothesis python/*.egg-info
