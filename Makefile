# Two commands for a new user: make demo, make test. Both set up .venv first.
# A machine without a GPU gets a smaller torch with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make setup

PYTHON ?= python3
BIN := .venv/bin
MGRAPH := ../$(BIN)/mgraph
BENCH ?=

.PHONY: setup demo test lint check parity bench

setup: .venv/.installed

# torch by itself first: the constraint then keeps the other packages from choosing another build of it.
.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("mgraph needs Python 3.11 or newer; run make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt torch
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

demo: setup
	rm -rf demo && mkdir demo
	cd demo && $(MGRAPH) profile --quick --dataset demo --device cpu --gpus 2
	cd demo && $(MGRAPH) fit
	cd demo && $(MGRAPH) search --gpus 2
	cd demo && $(MGRAPH) train

# Two test processes, a file in one of them: files share what is slow to set up. In the order of tests/conftest.py.
test: setup
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 --durations 25

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

check: lint
	$(BIN)/python -m pytest -m "not slow and not ranks"

# All plans in both number types, one after another: their workers are more than most machines have cores.
parity: setup
	MGRAPH_PARITY=all $(BIN)/python -m pytest -o faulthandler_timeout=1800 tests/parity

# make bench lists the benchmarks, make bench BENCH=accuracy runs one.
bench: setup
	@$(if $(BENCH),$(BIN)/python bench/$(BENCH).py,ls bench)
