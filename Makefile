# make demo and make test do all their set-up themselves. Environments: .venv*; build trees: build/.
SHELL := /bin/bash
PYTHON ?= python3
# The current line of MLX; the targets of the other line (below) set these anew.
VENV := .venv
BUILD := build/mlx032
RELEASE := 0.32
PIP_GROUPS := build test lint
OTHER_VENV := .venv-mlx031
OTHER_BUILD := build/mlx031
BIN = $(VENV)/bin
# MLX's Linux wheel brings a reference BLAS; a fast one in front of it makes the real model 30 times faster.
RUN = $(addprefix LD_PRELOAD=,$(firstword $(shell ls /usr/lib/*/openblas-pthread/libopenblas.so.0 2>/dev/null))) PATH="$(CURDIR)/$(BIN):$$PATH"
# Two files at a time, each with a core, in the order of tests/python/conftest.py.
PYTEST = OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder
SOURCES := $(shell find csrc cmake python metal -type f -not -name '*.pyc' -not -name '*.so' -not -path '*/lib/*' 2>/dev/null) \
  CMakeLists.txt pyproject.toml mlx-lines.json scripts/mlx_lines.py
# The short form of the other line: every handler, the front door, exact continuation, windows, states and a real model;
# of oMLX's surface its contract, layer dicts and our own blocks.
SHORT := $(addprefix tests/python/test_,handler_contract.py layer_state.py cache.py exactness.py windows.py \
  checkpoints.py import.py prefix_cache_contract.py own_blocks.py layer_dicts.py mlx_lm.py::test_a_real_conversation) \
  $(addprefix --deselect tests/python/test_exactness.py::test_a_real_model_,continues_bit_for_bit in_a_new_process)

.PHONY: help demo test test-current test-other test-long test-other-long bench dev lint format stub sanitize fuzz clean
.DELETE_ON_ERROR:

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

demo: $(BUILD)/.installed  ## restore a real model's prefix, in this process and in a new one, and show what it saved
	@scripts/system-packages test
	@$(RUN) $(BIN)/python examples/demo.py

test: test-current test-other  ## every kind of test, the long ones and the other line of MLX in a short form

# Both lines are set up and compiled side by side: while one fetches packages the other has the processor.
test-current: build/.system  ## what make test runs with the current line of MLX
	@$(MAKE) --no-print-directory $(OTHER_BUILD)/.installed & other=$$!; \
	  $(MAKE) --no-print-directory lint $(BUILD)/.tests; mine=$$?; wait $$other && exit $$mine
	$(RUN) ctest --test-dir $(BUILD) --output-on-failure -j 4
	$(RUN) $(PYTEST) -m "not long"

test-other: $(OTHER_BUILD)/.installed  ## what make test runs with the other line of MLX, a short form
	$(RUN) $(PYTEST) -m "not long" $(SHORT)

test-long: test sanitize test-other-long  ## the same at full size for both lines, with sanitizers and fuzzing
	$(RUN) PREFIXCACHE_TEST_FULL=1 ctest --test-dir $(BUILD) --output-on-failure -R 'StoreFaults|StoreStress|OneStore'
	$(RUN) $(PYTEST) -m "long or hypothesis"
	$(MAKE) fuzz SECONDS_EACH=60

test-other-long: $(OTHER_BUILD)/.tests
	$(RUN) ctest --test-dir $(BUILD) --output-on-failure -j 4
	$(RUN) $(PYTEST)

OTHER := test-other test-other-long $(OTHER_VENV)/.ready $(OTHER_BUILD)/.installed $(OTHER_BUILD)/.tests
$(OTHER): VENV := $(OTHER_VENV)
$(OTHER): BUILD := $(OTHER_BUILD)
$(OTHER): RELEASE := 0.31
$(OTHER): PIP_GROUPS := build test

bench: $(BUILD)/.installed  ## what README and docs claim, measured here
	@scripts/system-packages test
	$(RUN) $(BIN)/python benchmarks/run.py

dev: $(VENV)/.ready  ## an editable build: Python from the source tree, the extension in place
	$(RUN) $(BIN)/pip install -q --no-build-isolation --no-deps -e . -Cbuild-dir=build/dev \
	  -Ccmake.define.PREFIXCACHE_INPLACE=ON -Ccmake.define.PREFIXCACHE_BUILD_TESTS=ON

PYTHON_FOLDERS := python tests examples benchmarks scripts
CXX_FILES := $(shell find csrc tests/cpp tests/fuzz tests/gpu examples -name '*.h' -o -name '*.cpp')

lint: $(VENV)/.ready  ## ruff and clang-format over everything
	@$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	@$(BIN)/ruff check $(PYTHON_FOLDERS)
	@$(BIN)/ruff format --check $(PYTHON_FOLDERS)

format: $(VENV)/.ready  ## put everything into shape
	@$(BIN)/clang-format -i $(CXX_FILES)
	@$(BIN)/ruff check --fix $(PYTHON_FOLDERS)
	@$(BIN)/ruff format $(PYTHON_FOLDERS)

stub: $(BUILD)/.installed  ## write the extension's stub anew
	$(RUN) $(BIN)/python -m nanobind.stubgen -m prefixcache._core -o python/prefixcache/_core.pyi

sanitize: $(VENV)/.ready  ## the C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer, then ThreadSanitizer
	$(RUN) scripts/sanitize

fuzz: $(VENV)/.ready  ## feed damaged headers to the parser (needs clang); SECONDS_EACH=60
	$(RUN) scripts/fuzz $(or $(SECONDS_EACH),60)

clean:  ## remove what was built; environments and the model stay
	rm -rf build

build/.system: scripts/system-packages
	@command -v $(PYTHON) >/dev/null || { echo "missing: Python 3.10 or newer as $(PYTHON) (make PYTHON=...)" >&2; exit 1; }
	@PYTHON=$(PYTHON) scripts/system-packages build test
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "missing: Python 3.10 or newer (PYTHON=...)")'
	@mkdir -p build && touch $@

# Bytecode is left to the imports: they touch few of an environment's 8,000 files.
$(VENV)/.ready $(OTHER_VENV)/.ready: pyproject.toml mlx-lines.json | build/.system
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV)"
	@$(BIN)/python -m pip install -q --upgrade 'pip>=25.1'
	@line=$$($(BIN)/python scripts/mlx_lines.py $(RELEASE)) && \
	  $(BIN)/python -m pip install -q --no-compile $$line $(addprefix --group ,$(PIP_GROUPS))
	@$(BIN)/python -m pip install -q --no-compile --no-deps --group test-no-deps
	@touch $@

# The release of MLX is that of the environment.
$(BUILD)/.installed: $(VENV)/.ready $(SOURCES)
$(OTHER_BUILD)/.installed: $(OTHER_VENV)/.ready $(SOURCES)
$(BUILD)/.installed $(OTHER_BUILD)/.installed:
	@echo "building for MLX $(RELEASE)"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install -q --no-build-isolation --no-deps . -Cbuild-dir=$(BUILD)
	@touch $@

# In the package's own build tree, so that the library is compiled once.
CXX_TESTS := $(wildcard tests/cpp/*/*.cpp tests/cpp/*/*.h tests/cpp/CMakeLists.txt tests/shim/* tests/fuzz/*)
$(BUILD)/.tests: $(BUILD)/.installed $(CXX_TESTS)
$(OTHER_BUILD)/.tests: $(OTHER_BUILD)/.installed $(CXX_TESTS)
$(BUILD)/.tests $(OTHER_BUILD)/.tests:
	@echo "building the C++ tests for MLX $(RELEASE)"
	@$(RUN) cmake -S . -B $(BUILD) -DPREFIXCACHE_BUILD_TESTS=ON >$(BUILD)/tests.log 2>&1 || { cat $(BUILD)/tests.log; exit 1; }
	@$(RUN) cmake --build $(BUILD) >$(BUILD)/tests.log 2>&1 || { cat $(BUILD)/tests.log; exit 1; }
	@touch $@
