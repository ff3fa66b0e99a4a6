# Everything from a bare clone: needs python3 (with venv), a C++ compiler and make.
#
# The first run makes .venv, installs the pinned tools and torch into it and compiles pydist;
# later runs redo only what changed. Variables that may be given:
#   PYTHON      the interpreter that .venv is made from         (python3)
#   VENV        the virtual environment to work in              (.venv)
#   VENV_FLAGS  for `python -m venv` where it makes that: --system-site-packages keeps to the torch,
#               and all else, that PYTHON has already
#   TORCH_SPEC  what is installed where torch is missing        (torch==2.13.0)
#   TORCH       the version that `make test-torch` tests with; it needs no other variable
#   OUT         the folder of what is built                     (build)
#   PIP_FLAGS   more flags for pip, such as an index of CPU-only wheels
#   WERROR      ON makes compiler warnings errors             (OFF; .ci/run sets it)
#   N           processes of `make train`                       (2)
#   ARGS        more arguments for train, test (pytest), bench and test-gpu (--dry-run)
#   PART        the parts that `make test-gpu` runs                (all)
#   REPORTS     where it puts what it finds                      (build/gpu/reports)
#   FRAMEWORKS  the pins that `make test-frameworks` installs; it gives them itself

PYTHON ?= python3
VENV ?= .venv
VENV_FLAGS ?=
OUT ?= build
TORCH ?=
TORCH_SPEC ?= torch==2.13.0
PIP_FLAGS ?=
WERROR ?= OFF
N ?= 2
ARGS ?=
PART ?=
REPORTS ?= build/gpu/reports
FRAMEWORKS ?= tests/frameworks/newest.txt

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

BIN := $(VENV)/bin
BUILD := $(OUT)/dev
PIP := $(BIN)/python -m pip --disable-pip-version-check
export PATH := $(CURDIR)/$(BIN):$(PATH)

# Sources, as the rules below need them; CMake itself lists what it compiles.
CPP := $(sort $(shell find csrc tests/cpp tests/fake_cuda tests/fakes bench -name '*.cc' -o -name '*.cu' -o -name '*.h'))
CMAKE := CMakeLists.txt csrc/CMakeLists.txt tests/cpp/CMakeLists.txt tests/fake_cuda/CMakeLists.txt \
         tests/fakes/CMakeLists.txt \
         $(wildcard third_party/cmake/*.cmake) pydist/_build.py.in pyproject.toml

# ON where GoogleTest's headers are found; without them the C++ tests are left out, and said so.
CXX ?= c++
GTEST = $(shell echo '#include <gtest/gtest.h>' | $(CXX) -E -x c++ - >/dev/null 2>&1 \
          && echo ON || echo OFF)
GTEST_HINT := GoogleTest is not installed: `apt-get install libgtest-dev`

BUILD_FLAGS = --no-build-isolation \
  -C build-dir=$(BUILD) -C cmake.define.PYDIST_BUILD_TESTS=$(GTEST) \
  -C cmake.define.PYDIST_WERROR=$(WERROR)

##@ Everyday targets
.PHONY: help
help:  ## list the targets
	@awk 'BEGIN { FS = ":.*## " } /^##@/ { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

.PHONY: build
build: $(OUT)/.installed  ## compile and install pydist into .venv (editable)

.PHONY: train
train: build  ## train a small GPT on N=2 processes
	$(BIN)/pydist run -n $(N) examples/train_gpt.py $(ARGS)

.PHONY: test
test: test-cpp test-python  ## the everyday tests: each behaviour of a function once

.PHONY: test-all
test-all: test-cpp test-python-all  ## every test: on more backends, ranks and dtypes

.PHONY: bench
bench: build  ## the benchmarks of bench/, compared with the baseline of this hardware
	$(SUITE)
	$(BIN)/python bench/baseline.py compare --allow-missing build/suite.json

# Statistics of the subjects' times; what is compared are ratios.
SUITE = $(BIN)/python -m pytest bench -q --benchmark-json=build/suite.json \
  --benchmark-columns=median,iqr,max,rounds --benchmark-group-by=func --benchmark-sort=fullname

.PHONY: bench-save
bench-save: build  ## the same, made the baseline of this hardware
	$(SUITE)
	$(BIN)/python bench/baseline.py save build/suite.json

.PHONY: bench-readme
bench-readme: bench-peers  ## what README says: beside gloo, DDP and the MPIs
	$(BIN)/pydist bench all_reduce -b 8 -e 256M -f 4 -p 2 --compare symmetric,gloo,openmpi,mpich,impi
	$(BIN)/pydist bench step
	$(BIN)/pydist bench sharded
	$(BIN)/python bench/optimizer_step.py
	$(BIN)/pydist bench overlap
	$(BIN)/pydist bench startup

.PHONY: bench-peers
bench-peers: build bench-engine  ## collectives in C++ beside the MPIs in C
	$(BIN)/python bench/peers/install.py
	$(BIN)/python bench/peers/compare.py

.PHONY: bench-hosts
bench-hosts: build  ## TCP between hosts that namespaces play, collectives and steps over it: needs root
	$(BIN)/python bench/peers/install.py openmpi ucx
	$(BIN)/python bench/hosts/raw_streams.py
	$(BIN)/python bench/hosts/latency.py
	$(BIN)/python bench/hosts/all_reduce.py
	$(BIN)/python bench/hosts/train_step.py --rate 1gbit

.PHONY: bench-engine
bench-engine: $(OUT)/.tools  ## the C++ part of bench
	cmake -S . -B build/bench -G Ninja -DPYDIST_BUILD_PYTHON=OFF -DPYDIST_BUILD_BENCH=ON >/dev/null
	cmake --build build/bench --target bench_engine bench_kernels
	build/bench/bench/bench_engine all_reduce 2
	build/bench/bench/bench_engine all_reduce 2 8 67108864 0.2 bfloat16

##@ Tests
# More at a time than there are cores: most of these tests wait.
CTEST = ctest --output-on-failure --no-tests=error --parallel $$((2 * $$(nproc)))

.PHONY: test-cpp
test-cpp: build  ## the C++ tests
ifeq ($(GTEST),ON)
	$(CTEST) --test-dir $(BUILD)
else
	@echo "SKIPPED: all C++ tests (tests/cpp). $(GTEST_HINT)"
endif

# Most tests wait for processes that they start, so four files of them run at a time; without
# pytest-benchmark, which says that it can't measure then. Those processes, hundreds of them, import
# what they have in common from its compiled form, also where the environment asks for none.
PYTEST_ALONE = PYTHONDONTWRITEBYTECODE= TEST_BUILD=$(BUILD) $(BIN)/python -m pytest -p no:benchmark
PYTEST = $(PYTEST_ALONE) -n 4 --dist loadfile

.PHONY: test-python
test-python: build  ## the Python tests of test
	$(PYTEST) -m 'not thorough' $(ARGS)

.PHONY: test-programs
test-programs: build  ## whole programs: launchers, scripts that start their ranks, examples, benchmarks
	$(PYTEST) -m 'not thorough' tests/programs $(ARGS)

.PHONY: test-python-all
test-python-all: build  ## the Python tests of test-all
	$(PYTEST) $(if $(findstring tests/,$(ARGS)),,tests/drop_in tests/python tests/faults tests/programs) $(ARGS)

# As sanitize builds it, too.
FUZZED := build/sanitize-address-undefined
.PHONY: fuzz
fuzz: build  ## a million forged messages, frames and damages of shared memory, under ASan and UBSan, and 100,000 damaged checkpoints
	@[ $(GTEST) = ON ] || { echo "make fuzz runs C++ tests. $(GTEST_HINT)" >&2; exit 1; }
	cmake -S . -B $(FUZZED) -G Ninja -DPYDIST_SANITIZE=address,undefined \
	  -DPYDIST_BUILD_TESTS=ON -DPYDIST_WERROR=$(WERROR)
	cmake --build $(FUZZED) --target pydist_tests
	PYDIST_TEST_FUZZ=1000000 TEST_PATIENCE=60 $(FUZZED)/tests/cpp/pydist_tests \
	  --gtest_filter='NativeDamageTest.*:*Garbage*'
	PYDIST_TEST_FUZZ=100000 TEST_PATIENCE=20 $(PYTEST_ALONE) \
	  tests/python/checkpoint/test_foreign_checkpoint.py -k mutations

.PHONY: drills
drills: build  ## every drill of tests/faults 20 times, in an hour at most: the table of docs/failure.md
	$(BIN)/python tests/faults/run_drills.py $(ARGS)

.PHONY: test-hosts
test-hosts: build  ## jobs over several hosts, which network namespaces play: needs root
	$(PYTEST_ALONE) tests/hosts $(ARGS)

.PHONY: test-hosts-everyday
test-hosts-everyday: build
	$(PYTEST_ALONE) -n 2 --dist loadfile -m 'not thorough' tests/hosts $(ARGS)

# In an environment and a build folder of its own, beside those of every other version.
.PHONY: test-torch
test-torch:  ## make test-all with another torch: TORCH=2.11.0
	@[ -n "$(TORCH)" ] || { echo "Say which torch to test with: make test-torch TORCH=2.11.0" >&2; exit 1; }
	$(MAKE) OUT=build/torch-$(TORCH) VENV=build/torch-$(TORCH)/venv TORCH_SPEC=torch==$(TORCH) test-all

# Each in an environment and a build folder of its own, without the C++ tests: the newest frameworks,
# and the oldest that are supported.
.PHONY: test-frameworks
test-frameworks: test-frameworks-newest test-frameworks-oldest  ## pydist under training frameworks: the newest, and the oldest supported

.PHONY: test-frameworks-newest test-frameworks-oldest
test-frameworks-newest test-frameworks-oldest: test-frameworks-%:
	$(MAKE) OUT=build/frameworks/$* VENV=build/frameworks/$*/venv GTEST=OFF \
	  FRAMEWORKS=tests/frameworks/$*.txt run-frameworks

.PHONY: run-frameworks
run-frameworks: $(OUT)/.frameworks
	$(PYTEST_ALONE) tests/frameworks $(ARGS)

.PHONY: test-view
test-view: $(OUT)/.view  ## the page of `pydist view` in a real browser: needs chromium and chromium-driver
	$(PYTEST_ALONE) tests/view tests/python/monitoring $(ARGS)

# By PYTHON itself, which has torch for CUDA: see docs/gpu.md. Nothing is downloaded.
.PHONY: test-gpu
test-gpu:  ## what one NVIDIA GPU can show, in parts of 9 minutes: all of them, or PART=2
	$(PYTHON) tests/one_gpu/run_parts.py --reports $(REPORTS) $(ARGS) $(PART)

# The tools and what they import; torch and numpy are there.
.PHONY: gpu-wheels
gpu-wheels: $(OUT)/.tools  ## what test-gpu installs where nothing can be downloaded, for Python 3.12
	$(PIP) download --quiet --dest build/gpu/wheels --only-binary :all: --python-version 3.12 \
	  --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64 --no-deps \
	  --group build --group test execnet iniconfig lightning-utilities markdown-it-py mdurl \
	  packaging pathspec pluggy pygments rich sortedcontainers

SANITIZERS := address,undefined thread
# The linker takes a comma in a path for the end of it.
comma := ,
SANITIZED = build/$(subst $(comma),-,$@)
# TSan of g++ 12 needs a fixed memory layout; where the sandbox forbids that it runs without.
FIXED_LAYOUT = $(shell setarch -R true 2>/dev/null && echo setarch -R)
export ASAN_OPTIONS ?= detect_stack_use_after_return=1
export UBSAN_OPTIONS ?= print_stacktrace=1
export TSAN_OPTIONS ?= halt_on_error=1 second_deadlock_stack=1

.PHONY: sanitize
sanitize: $(SANITIZERS:%=sanitize-%)  ## the C++ tests under ASan and UBSan, and under TSan

.PHONY: $(SANITIZERS:%=sanitize-%)
$(SANITIZERS:%=sanitize-%): sanitize-%: $(OUT)/.tools
	@[ $(GTEST) = ON ] || { echo "make sanitize runs the C++ tests. $(GTEST_HINT)" >&2; exit 1; }
	cmake -S . -B $(SANITIZED) -G Ninja -DPYDIST_SANITIZE=$* -DPYDIST_BUILD_TESTS=ON \
	  -DPYDIST_BUILD_BENCH=ON -DPYDIST_WERROR=$(WERROR)
	cmake --build $(SANITIZED)
	$(FIXED_LAYOUT) $(CTEST) --test-dir $(SANITIZED)

##@ House-keeping
.PHONY: lint
lint: lint-python lint-cpp lint-shell check-stubs tidy  ## every check below (-k shows all that fail)

.PHONY: lint-python
lint-python: build  ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

.PHONY: lint-cpp
lint-cpp: $(OUT)/.tools  ## clang-format
	$(BIN)/clang-format --dry-run -Werror $(CPP)

.PHONY: lint-shell
lint-shell: $(OUT)/.tools  ## shellcheck
	$(BIN)/shellcheck .ci/run

.PHONY: format
format: $(OUT)/.tools  ## rewrite the sources in the project's format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CPP)

# clang-tidy on the torch-free sources that this machine compiles (other processors have kernels of
# their own). A file is checked again when it or any header changes.
TIDY_SOURCES = $(shell sed -n 's|^ *"file": "$(CURDIR)/\(csrc/.*\)",*$$|\1|p' \
                   build/lint/compile_commands.json)
.PHONY: tidy
tidy: build/lint/compile_commands.json  ## clang-tidy
	@$(MAKE) --no-print-directory -j$$(nproc) $(TIDY_SOURCES:%.cc=build/lint/%.tidy)

build/lint/compile_commands.json: $(CMAKE) | $(OUT)/.tools
	cmake -S . -B build/lint -G Ninja -DPYDIST_BUILD_PYTHON=OFF -DPYDIST_BATCHES=OFF >/dev/null

build/lint/%.tidy: %.cc $(filter %.h,$(CPP)) .clang-tidy build/lint/compile_commands.json
	@mkdir -p $(@D)
	$(BIN)/clang-tidy --quiet -p build/lint $< 2> >(grep -v 'warnings generated' >&2)
	@touch $@

STUBGEN = $(BIN)/pybind11-stubgen pydist._native --output-dir build/stubs --exit-code
.PHONY: docs
docs: $(OUT)/.docs  ## the pages of docs/ and the reference of public names, as HTML
	$(BIN)/sphinx-build -q -W --keep-going -c docs -d $(OUT)/docs/doctrees . $(OUT)/docs/html
	@echo "$(OUT)/docs/html/docs/index.html"

.PHONY: stubs
stubs: build  ## write pydist/_native.pyi and docs/variables.md anew from the compiled module
	$(STUBGEN)
	cp build/stubs/pydist/_native.pyi pydist/_native.pyi
	$(BIN)/python docs/write_variables.py

.PHONY: check-stubs
check-stubs: build  ## the stub fits the compiled module
	$(STUBGEN) >/dev/null
	@diff -u pydist/_native.pyi build/stubs/pydist/_native.pyi || \
	  { echo "pydist/_native.pyi differs from the compiled module: run make stubs." >&2; exit 1; }

.PHONY: wheel
wheel: $(OUT)/.tools  ## dist/*.whl for the torch minor and the Python of .venv
	$(PIP) wheel --quiet $(BUILD_FLAGS) --no-deps --wheel-dir dist .
	@ls -1 dist/*.whl

.PHONY: clean
clean:  ## remove what was built (not .venv)
	rm -rf build dist

# Stamps. $(OUT)/.tools: the virtual environment with the pinned tools and a torch; made again with an
# environment that is newer.
$(BIN)/python:
	@echo "making $(VENV)"
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)

$(OUT)/.tools: pyproject.toml $(BIN)/python $(wildcard $(VENV)/pyvenv.cfg)
	@mkdir -p $(OUT)
	@echo "installing the pinned tools into $(VENV)"
	$(PIP) install --quiet $(PIP_FLAGS) 'pip>=25.1'
	@# Before the tools: one of them needs a torch, and would bring the newest.
	@$(BIN)/python -c 'import torch' 2>/dev/null || \
	  { echo "installing $(TORCH_SPEC) into $(VENV)"; $(PIP) install --quiet $(PIP_FLAGS) '$(TORCH_SPEC)'; }
	$(PIP) install --quiet $(PIP_FLAGS) --group dev
	@touch $@

$(OUT)/.docs: $(OUT)/.installed
	$(PIP) install --quiet $(PIP_FLAGS) --group docs
	@touch $@

$(OUT)/.view: $(OUT)/.installed
	$(PIP) install --quiet $(PIP_FLAGS) --group view
	@touch $@

$(OUT)/.frameworks: $(OUT)/.installed $(FRAMEWORKS)
	@echo "installing the frameworks of $(FRAMEWORKS) into $(VENV)"
	$(PIP) install --quiet $(PIP_FLAGS) -r $(FRAMEWORKS)
	@touch $@

# What the last build knew of GoogleTest. Written only when that is another than now, so that a build
# follows.
$(OUT)/.gtest: FORCE
	@mkdir -p $(@D)
	@echo $(GTEST) | cmp --quiet - $@ || echo $(GTEST) >$@

.PHONY: FORCE
FORCE:

$(OUT)/.installed: $(OUT)/.tools $(OUT)/.gtest $(CMAKE) $(CPP)
	@echo "compiling pydist (a few minutes the first time)"
	$(PIP) install --quiet $(PIP_FLAGS) $(BUILD_FLAGS) --editable '.[examples]'
	@touch $@
