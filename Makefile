# make demo and make test do all their set-up themselves. Environments: .venv; build trees: build/.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BUILD := build/mlx032
BIN := $(VENV)/bin
# MLX's Linux wheel brings a reference BLAS; a fast one in front of it makes the real model 30 times faster.
RUN = $(addprefix LD_PRELOAD=,$(firstword $(shell ls /usr/lib/*/openblas-pthread/libopenblas.so.0 2>/dev/null))) PATH="$(CURDIR)/$(BIN):$$PATH"
SOURCES := $(shell find csrc cmake python metal -type f -not -name '*.pyc' -not -name '*.so' -not -path '*/lib/*' 2>/dev/null) CMakeLists.txt pyproject.toml

.PHONY: help demo test test-long bench dev lint format stub sanitize fuzz clean
.DELETE_ON_ERROR:

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

demo: $(BUILD)/.installed  ## restore a real model's prefix, in this process and in a new one, and show what it saved
	@scripts/system-packages test
	@$(RUN) $(BIN)/python examples/demo.py

test: $(BUILD)/.tests lint  ## every kind of test, the long ones in a short form
	$(RUN) ctest --test-dir $(BUILD) --output-on-failure -j 2
	$(RUN) $(BIN)/python -m pytest -m "not long"

test-long: test sanitize  ## the same at full size, with sanitizers and fuzzing
	$(RUN) $(BIN)/python -m pytest -m long
	$(MAKE) fuzz SECONDS_EACH=60

bench: $(BUILD)/.installed  ## what README and docs claim, measured here
	@scripts/system-packages test
	$(RUN) $(BIN)/python benchmarks/run.py

dev: $(VENV)/.ready  ## an editable build: Python from the source tree, the extension in place
	$(RUN) $(BIN)/pip install -q --no-build-isolation --no-deps -e . -Cbuild-dir=build/dev \
	  -Ccmake.define.PREFIXCACHE_INPLACE=ON -Ccmake.define.PREFIXCACHE_BUILD_TESTS=ON

CXX_FILES := $(shell find csrc tests/cpp tests/fuzz examples -name '*.h' -o -name '*.cpp')

lint: $(VENV)/.ready  ## ruff and clang-format over everything
	@$(BIN)/clang-format --dry-run --Werror $(CXX_FILES)
	@$(BIN)/ruff check python tests examples benchmarks
	@$(BIN)/ruff format --check python tests examples benchmarks

format: $(VENV)/.ready  ## put everything into shape
	@$(BIN)/clang-format -i $(CXX_FILES)
	@$(BIN)/ruff check --fix python tests examples benchmarks
	@$(BIN)/ruff format python tests examples benchmarks

stub: $(BUILD)/.installed  ## write the extension's stub anew
	$(RUN) $(BIN)/python -m nanobind.stubgen -m prefixcache._core -o python/prefixcache/_core.pyi

sanitize: $(VENV)/.ready  ## the C++ tests under AddressSanitizer and UndefinedBehaviorSanitizer, then ThreadSanitizer
	$(RUN) scripts/sanitize

fuzz: $(VENV)/.ready  ## feed damaged headers to the parser (needs clang); SECONDS_EACH=60
	$(RUN) scripts/fuzz $(or $(SECONDS_EACH),60)

clean:  ## remove what was built; environments and the model stay
	rm -rf build

$(VENV)/.ready: pyproject.toml scripts/system-packages
	@command -v $(PYTHON) >/dev/null || { echo "missing: Python 3.10 or newer as $(PYTHON) (make PYTHON=...)" >&2; exit 1; }
	@PYTHON=$(PYTHON) scripts/system-packages build test
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "missing: Python 3.10 or newer (PYTHON=...)")'
	@[ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV)"
	@$(BIN)/python -m pip install -q --upgrade 'pip>=25.1'
	@$(BIN)/python -m pip install -q --group pair --group build --group test --group lint
	@$(BIN)/python -m pip install -q --no-deps --group test-no-deps
	@touch $@

$(BUILD)/.installed: $(VENV)/.ready $(SOURCES)
	@echo "building"
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip install -q --no-build-isolation --no-deps . -Cbuild-dir=$(BUILD)
	@touch $@

# In the package's own build tree, so that the library is compiled once.
$(BUILD)/.tests: $(BUILD)/.installed $(wildcard tests/cpp/*/*.cpp tests/cpp/*/*.h tests/cpp/CMakeLists.txt tests/fuzz/*)
	@echo "building the C++ tests"
	@$(RUN) cmake -S . -B $(BUILD) -DPREFIXCACHE_BUILD_TESTS=ON >$(BUILD)/tests.log 2>&1 || { cat $(BUILD)/tests.log; exit 1; }
	@$(RUN) cmake --build $(BUILD) >$(BUILD)/tests.log 2>&1 || { cat $(BUILD)/tests.log; exit 1; }
	@touch $@
