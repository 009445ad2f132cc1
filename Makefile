# Two commands matter: `make demo` and `make test`. Both make .venv first.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check -q

# The suite starts thousands of processes, and without what Python writes beside a module each compiles all of it.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-fast test-slow lint bench bench-table clean

$(VENV)/.installed: pyproject.toml constraints.txt CMakeLists.txt $(wildcard src/native/*)
	$(PYTHON) -c 'import sys; sys.exit("ckstore needs Python 3.10 or newer") if sys.version_info < (3, 10) else None'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt 'scikit-build-core>=0.10' 'nanobind>=2.4'
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[torch,test]'
	touch $@

demo: $(VENV)/.installed  ## Train, kill, restore, compare: the main job, in about a minute.
	$(BIN)/python examples/demo.py

test: $(VENV)/.installed  ## The whole suite, linters included; the long programmes take most of its time.
	$(BIN)/python -m pytest -q -rs -n 3 --dist worksteal

test-fast: $(VENV)/.installed  ## All but the long programmes.
	$(BIN)/python -m pytest -q -rs -n 3 --dist worksteal -m 'not slow'

test-slow: $(VENV)/.installed  ## The long programmes: crash points, power cuts, fuzzing, stress.
	$(BIN)/python -m pytest -q -rs -n 3 --dist worksteal -m slow

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.bench-installed: $(VENV)/.installed
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[torch,test,bench]'
	touch $@

bench: $(VENV)/.bench-installed  ## ckstore and its peers in one interleaved run; needs about 20 GB of disk.
	$(BIN)/python -m bench.run

bench-table:  ## Make README's table, and those of docs/BENCH.md, from the newest results.
	$(BIN)/python -m bench.table

clean:
	rm -rf $(VENV) build demo-store .mypy_cache .pytest_cache .ruff_cache .hypothesis
