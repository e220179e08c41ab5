# `make check` is the loop of every day, `make test` runs everything. Both set up what they need. `make help` names all targets.
PYTHON ?= python3
TORCH ?= torch
# The versions that the tests run with, exactly; empty for the newest.
CONSTRAINTS ?= constraints/tested.txt
# The kernel that tests of RDMA boot, see tests/rxe/build_kernel.sh. Without it they are skipped.
LAB_KERNEL ?= $(HOME)/.cache/adaptra/lab-linux
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CXX_SOURCES := $(shell find csrc -name '*.cc' -o -name '*.h')
CXX_TESTS := $(wildcard tests/cxx/*.cc tests/cxx/*.h tests/links/*.cc tests/links/*.h)
FUZZ_SECONDS ?= 10
ONE_PROCESS := not processes and not root and not rdma
# The suites that run on the stand-in for CUDA (tests/fake_cuda) as they are.
ON_FAKE_CUDA := @tests/fake_cuda/suites.txt
# The files that have a test with one of these marks: to collect the others takes a core some 10 s in each process of pytest.
WITH = $(shell grep -rlE 'mark\.($(1))\b' tests --include='test_*.py')
ON_ALL_CORES := --numprocesses=logical --dist=worksteal

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-failure check test lint types docs cxx unit processes alone fake_cuda rdma checks aside graphs versions gpu gpu-slow-link bench clean

help: ## name every target
	@sed -nE 's/^([a-z_-]+):[^#]*## (.*)$$/make \1|\2/p' $(firstword $(MAKEFILE_LIST)) | awk -F'|' '{ printf "%-20s %s\n", $$1, $$2 }'

setup: $(READY) ## make the virtual environment and build the extension

$(READY): pyproject.toml CMakeLists.txt $(CONSTRAINTS) $(CXX_SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "adaptra needs Python 3.11 or newer; $(PYTHON) is older: try make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "Python's venv is missing: apt-get install python3-venv"; exit 1; }
	@command -v $${CXX:-c++} >/dev/null || { echo "a C++20 compiler is missing: apt-get install g++"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(addprefix --constraint ,$(CONSTRAINTS)) "$(TORCH)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(addprefix --constraint ,$(CONSTRAINTS)) \
		--config-settings=cmake.define.ADAPTRA_WARNINGS_AS_ERRORS=ON --editable '.[dev]'
	@touch $@

demo: $(READY) ## train a GPT over 4 ranks through a link that turns slow
	$(BIN)/torchrun --nproc-per-node=4 examples/train_gpt.py --output out/demo

demo-failure: $(READY) ## kill a worker of a GPT's training in a step: it goes on, and no bit differs
	$(BIN)/python examples/kill_worker.py --output out/demo-failure

# Of what changed and what stands on it, within three minutes; make check CHECK=--help says more.
check: $(READY) ## lint, types and tests of what changed, in three minutes
	$(BIN)/python tests/support/check_changes.py $(CHECK)

lint: $(READY) ## format and lint: Python and C++
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/clang-format --dry-run --Werror $(CXX_SOURCES) $(CXX_TESTS)

types: $(READY) ## check the types of all Python
	$(BIN)/pyright

docs: $(READY) ## build the documentation into build/site, strictly
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# The C++ tests under the address and undefined-behaviour sanitizers, then under the thread sanitizer; then the fuzz target.
cxx: $(READY) ## the tests in C++ under sanitizers, and the fuzzer
	for sanitizers in address,undefined thread; do \
		build=build/cxx-$${sanitizers%%,*}; \
		$(BIN)/cmake -S tests/cxx -B $$build -G Ninja -DSANITIZE=$$sanitizers \
			-DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(BIN)/ninja" >/dev/null && \
		$(BIN)/cmake --build $$build && $$build/delegate_tests || exit 1; \
	done
	if command -v clang++ >/dev/null; then \
		$(BIN)/cmake -S tests/cxx -B build/cxx-fuzz -G Ninja -DCMAKE_CXX_COMPILER=clang++ \
			-DCMAKE_MAKE_PROGRAM="$(CURDIR)/$(BIN)/ninja" >/dev/null && \
		$(BIN)/cmake --build build/cxx-fuzz --target delegate_fuzz && mkdir -p build/fuzz-found && \
		build/cxx-fuzz/delegate_fuzz -max_total_time=$(FUZZ_SECONDS) -verbosity=0 build/fuzz-found tests/cxx/corpus; \
	else \
		build/cxx-address/delegate_fuzz $(FUZZ_SECONDS) tests/cxx/corpus; \
	fi

# Each test has one core: threads of torch wait for each other at the cost of the tests beside them.
unit: $(READY) ## the tests of one process, on all cores; UNIT= takes options of pytest
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "$(ONE_PROCESS)" $(ON_ALL_CORES) $(UNIT)

# A test of several processes keeps about one core busy, so two of them run at a time.
processes: $(READY) ## the tests that start several processes
	$(BIN)/pytest -m "processes and not (root or rdma or alone)" -n 2 --dist=worksteal $(call WITH,processes)

alone: $(READY) ## the tests that measure times, or join hosts by links: one at a time
	$(BIN)/pytest -m "(root or alone) and not rdma" $(call WITH,root|alone)

# torch takes the stand-in only when it is imported, so these have processes of their own. It is built at first use.
fake_cuda: $(READY) ## the tests of the stand-in for CUDA, and suites that run on it
	OMP_NUM_THREADS=1 $(BIN)/pytest --device=cuda -m "not (alone or gpu)" $(ON_ALL_CORES) tests/fake_cuda $(ON_FAKE_CUDA)
	OMP_NUM_THREADS=1 $(BIN)/pytest --device=cuda -m alone tests/fake_cuda

rdma: $(READY) ## the tests that boot the lab of RDMA devices
	$(BIN)/pytest -m rdma --lab-kernel=$(LAB_KERNEL) $(call WITH,rdma)

checks: $(READY) ## lint, types, docs, cxx
	$(MAKE) --jobs=1 lint types docs cxx

# A test that measures times leaves about a core idle. What takes no notice of the time uses that, and gives way to it.
test: $(READY) ## everything that can fail here: lint, types, docs, C++ and all tests
	$(MAKE) --jobs=2 --output-sync=target alone aside
	$(MAKE) --jobs=2 --output-sync=target unit rdma UNIT=--ignore=tests/graph
	$(MAKE) --jobs=1 fake_cuda processes

aside: $(READY) ## the checks and the unit tests of graphs, at the lowest priority
	nice -n 19 $(MAKE) --jobs=1 checks graphs

graphs: $(READY) ## the unit tests of graphs
	OMP_NUM_THREADS=1 $(BIN)/pytest -m "$(ONE_PROCESS)" tests/graph

# With every Python that there is and torch from 2.11 to 2.15. It takes hours, and 6 GB for one environment at a time.
versions: $(READY) ## unit tests and the demo with Python 3.11 to 3.13 and torch 2.11 to 2.15: a table
	$(BIN)/python bench/versions.py

# Ends at once, and with an error, where there is no GPU.
gpu: $(READY) ## all that needs a GPU: a table of what ran; GPU=--help says more
	@$(BIN)/python tests/support/check_gpus.py $(GPU)

# Up to ten minutes. It finds out what can run here, and lists the rest with its reasons; --help says more.
gpu-slow-link: $(READY) ## torch and adaptra on GPUs while a link turns slow: a table
	$(BIN)/python bench/gpu_slow_link.py

bench: $(READY) ## measure the figures of docs/benchmarks.md again
	$(BIN)/python bench/simulate.py
	$(BIN)/python bench/plan.py
	$(BIN)/python bench/runtime.py
	$(BIN)/python bench/step_against_torch.py
	$(BIN)/python bench/checks.py
	$(BIN)/python bench/monitor.py
	$(BIN)/python bench/telemetry.py
	$(BIN)/python bench/slow_link.py
	$(BIN)/python bench/delegate.py
	$(BIN)/python bench/failover.py
	$(BIN)/python bench/switching.py
	$(BIN)/python bench/compile_cost.py
	$(BIN)/python bench/split.py

clean: ## remove the virtual environment and everything built
	rm -rf $(VENV) build dist out
