# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A Python that already has torch (a GPU host brings its own build) is used as it is; otherwise constraints.txt decides.
HAS_TORCH := $(shell $(PYTHON) -c "import torch" 2>/dev/null && echo yes)

.PHONY: demo test lint gpu-test overhead setup clean

demo: setup
	$(BIN)/paceline run quick

test: setup
	$(BIN)/python -m pytest -n 2

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# On a host with a GPU, with the Python that has torch: real strategies on one rank and on two NCCL ranks of one GPU.
gpu-test:
	PYTHONPATH=src:$(PYTHONPATH) $(PYTHON) -m pytest tests/gpu -v

overhead: setup
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/report.py

setup: $(VENV)/.ready

ifeq ($(HAS_TORCH),yes)
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --system-site-packages $(VENV)
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	DS_BUILD_OPS=0 $(BIN)/pip install -q -c $(VENV)/constraints.txt -e '.[zero,finetune,dev]'
	touch $@
else
$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	@echo "Installing torch and the rest into $(VENV): a few minutes the first time."
	$(BIN)/pip install -q torch==$$(sed -n 's/^torch==//p' constraints.txt)
	DS_BUILD_OPS=0 $(BIN)/pip install -q -c constraints.txt -e '.[zero,finetune,dev]'
	touch $@
endif

clean:
	rm -rf $(VENV) results build src/*.egg-info
