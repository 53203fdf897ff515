# Two commands do everything on a fresh machine: `make demo` and `make test`, which installs more.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A Python that already has torch (a GPU host brings its own build) is used as it is; otherwise, and where that Python is
# the environment made here, constraints.txt decides.
HAS_TORCH := $(shell $(PYTHON) -c "import os, sys, torch; sys.exit(os.path.realpath('$(VENV)') == sys.prefix)" 2>/dev/null && echo yes)
# An environment made from another one sees the system's packages, and not those of the one it was made from.
ITS_PACKAGES := $(shell $(PYTHON) -c "import sys, sysconfig; sys.prefix != sys.base_prefix and print(sysconfig.get_path('purelib'))")

# Processes are started by the hundred, so what Python compiles is kept, whatever the environment says.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all lint gpu-test vllm-env vllm-test overhead wheelhouse setup clean

demo: $(VENV)/.demo
	$(BIN)/paceline run quick

# Tests of engines wait as often as they compute: four at a time keep two cores busy. What failed beside the others is run
# once more, alone: a machine that somebody else keeps busy must not fail a change. Both results are printed.
test: setup
	$(BIN)/python -m pytest -n 4 || { [ $$? -eq 1 ] && $(BIN)/python -m pytest -n 0 --last-failed --last-failed-no-failures none; }

# Every combination of what `make test` tries once: several times as long.
test-all: export PACELINE_EXHAUSTIVE = 1
test-all: test

lint: setup
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .
	$(BIN)/python -m mypy

# On a host with a GPU, with the Python that has torch: real strategies on one rank and on two NCCL ranks of one GPU.
gpu-test:
	PYTHONPATH=src:$(PYTHONPATH) $(PYTHON) -m pytest tests/gpu -v

# vLLM without a GPU, in an environment of its own beside this one: minutes to install, 30 s for each start.
vllm-env:
	PYTHON=$(PYTHON) deploy/vllm-env.sh $(VENV)-vllm

vllm-test: setup vllm-env
	PACELINE_TEST_VLLM=$(VENV)-vllm/bin/vllm $(BIN)/python -m pytest -v -m vllm tests/vllm

overhead: setup
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/report.py

# Every wheel that Paceline needs, with hashes: what a host or an image build without a network installs from.
wheelhouse: setup
	$(BIN)/python deploy/wheelhouse.py fill wheelhouse

setup: $(VENV)/.ready

# pip compiles 17,000 files one after the other, which is half of an installation. Here only torch is compiled, while pip
# installs the rest; Python compiles what else is imported when that happens first.
INSTALL := DS_BUILD_OPS=0 $(BIN)/pip install --no-compile
COMPILE_TORCH := $(BIN)/python -m compileall -qq -x '/(tests?|testing|_inductor)/' $(VENV)/lib/python*/site-packages/torch || true

# The environment of the demo: Paceline, torch and DeepSpeed. The tests and linters add the rest to it.
$(VENV)/.demo: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "Installing DeepSpeed into $(VENV): a minute the first time."
	@$(COMPILE_TORCH) & $(INSTALL) -c $(VENV)/constraints.txt -e '.[zero]' && wait
	touch $@

$(VENV)/.ready: $(VENV)/.torch pyproject.toml constraints.txt
	@echo "Installing what the tests and linters need into $(VENV): a few minutes the first time."
	@$(COMPILE_TORCH) & $(INSTALL) -c $(VENV)/constraints.txt -e '.[zero,finetune,dev]' && wait
	touch $@ $(VENV)/.demo

$(VENV)/.torch: constraints.txt
	@echo "Installing torch into $(VENV): a minute the first time."
ifeq ($(HAS_TORCH),yes)
	$(PYTHON) -m venv --system-site-packages $(VENV)
	echo '$(ITS_PACKAGES)' > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/host.pth"
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
else
	$(PYTHON) -m venv $(VENV)
	cp constraints.txt $(VENV)/constraints.txt
	$(INSTALL) torch==$$(sed -n 's/^torch==//p' constraints.txt)
endif
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-vllm results build src/*.egg-info
