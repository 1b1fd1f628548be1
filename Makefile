# make train   set up, train on the embedded data set, evaluate, export          make test   set up, run the test suite
#   make test-cluster   the tests over several hosts, which are made of network namespaces (root);
#                       SKIPS=--skips-fail: nothing may be missing here
#   WORKERS=4 make test  so many processes share the files of the suite (3); the ranks that its tests start come on top
#   make test-all       the rest of the suite: what CI runs in addition to `make test`
#   make test-slow      the tests that take minutes, among them the commands of the docs, executed; on a CPU
#   make docs   the site in build/docs                  make coverage   the suite, and the lines that it runs
#
#   PRESET=zero3 make train       another ZeRO preset of ds_configs/
#   make train FLAGS="--lr 1e-3"  other flags of pretrain_clip.py (give NAME=... too: a finished run is not trained over)
#   make charts                   the charts of the docs again, from docs/results
SHELL := /bin/bash
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PRESET ?= zero1
NAME   ?= demo-$(PRESET)
DATA   ?= .data/demo
LOGS   ?= runs
FLAGS  ?=
CLUSTER_SECONDS ?= 1800
SKIPS  ?=
WORKERS ?= 3
SHARED := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
ON_A_CPU := not gpu and not multigpu and not cluster

.PHONY: train test suite test-all test-slow test-cluster lint docs coverage charts clean

train: $(VENV)/.installed
	@PATH="$$PWD/$(BIN):$$PATH" DATA=$(DATA) LOGS=$(LOGS) NAME=$(NAME) PRESET=$(PRESET) bash launch/demo.sh $(FLAGS)

# The suite and `lint` run at the same time: tests wait for other processes, and leave a core idle then.
test: $(VENV)/.installed-test
	@$(MAKE) --no-print-directory --jobs 2 --keep-going lint suite

# The order of the files is conftest.py's: the longest first.
suite: $(VENV)/.installed-test
	$(BIN)/python -m pytest $(SHARED)

test-all: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m 'long and not slow and $(ON_A_CPU)' $(SHARED)

# Those for GPUs and clusters have their own markers.
test-slow: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m 'slow and $(ON_A_CPU)' -o addopts='' -q -rs $(SKIPS)

# 32 ranks on four hosts: pytest -m "cluster and slow" -o addopts="". Hosts are network namespaces; skips, with the reason, where they cannot be made (root, openssh-server, pdsh) and
# the launchers that are not installed (openmpi-bin, slurm-wlm).
test-cluster: $(VENV)/.installed-test
	timeout --kill-after 60 $(CLUSTER_SECONDS) $(BIN)/python -m pytest -m 'cluster and not slow' -o addopts='' -v -rs $(SKIPS) --durations 0 --durations-min 1

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/hadolint launch/Dockerfile
	$(BIN)/python dev/check_language.py

charts: $(VENV)/.installed
	$(BIN)/python -m benchmarks.charts

docs: $(VENV)/.installed-test
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo build/docs/index.html

coverage: $(VENV)/.installed-test
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest -m 'not slow and $(ON_A_CPU)'
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# The checkout itself is installed too: its commands, `python -m infcl.X` and scripts then run from any folder.
$(VENV)/.installed: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' \
		|| { echo "Python 3.10 to 3.12 is needed, $$($(PYTHON) --version) found: make PYTHON=python3.11 ..." >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed requirements-test.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-test.txt
	@touch $@

clean:
	rm -rf $(VENV) .data runs build .coverage* .mypy_cache .pytest_cache .ruff_cache
