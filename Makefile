# Two commands matter: `make demo` and `make test`. Both make .venv first.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# PIP_NO_COMPILE=no means: do not compile. Most of torch is never imported, and this saves half of the install.
PIP    := PIP_NO_COMPILE=no $(BIN)/python -m pip --disable-pip-version-check -q
PYTEST := $(BIN)/python -m pytest -q -n 3 --dist worksteal
TESTS  ?= tests

# The suite starts thousands of processes. Without .pyc files each of them would compile all modules again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo demo-ranks test test-frameworks test-unit test-slice test-deep lint bench bench-table wheel clean

$(VENV)/.installed: pyproject.toml constraints.txt CMakeLists.txt $(wildcard src/native/*)
	$(PYTHON) -c 'import sys; sys.exit("ckstore needs Python 3.10 or newer") if sys.version_info < (3, 10) else None'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -c constraints.txt 'scikit-build-core>=0.11' 'nanobind>=2.4'
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[torch,test]'
	touch $@

demo: $(VENV)/.installed  ## Train, kill, restore, compare: the main job, in about a minute.
	$(BIN)/python examples/demo.py

demo-ranks: $(VENV)/.installed  ## Four ranks train, are killed, and resume with four and with two; about a minute.
	$(BIN)/python examples/demo_ranks.py

test: $(VENV)/.installed  ## All behaviour, and a part of each long programme: other parts with each commit.
	$(PYTEST) --ignore=tests/frameworks $(TESTS)

test-frameworks: $(VENV)/.frameworks-installed  ## With transformers, Lightning, accelerate and PEFT; all how-to pages.
	$(PYTEST) tests/frameworks

test-unit: $(VENV)/.installed  ## Only the tests of single modules.
	$(PYTEST) tests/unit

test-slice: $(VENV)/.installed  ## Another part of each long programme than make test takes, and nothing else.
	$(PYTEST) --depth=slice --ignore=tests/frameworks $(TESTS)

test-deep: $(VENV)/.frameworks-installed  ## Everything: every point of every long programme. Takes more than half an hour.
	$(PYTEST) --depth=all $(TESTS)

lint: $(VENV)/.installed  ## Linters, formatter and type checker.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/.frameworks-installed: $(VENV)/.installed
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[torch,test,frameworks]'
	touch $@

$(VENV)/.bench-installed: $(VENV)/.installed
	$(PIP) install -c constraints.txt --no-build-isolation -e '.[torch,test,bench]'
	touch $@

bench: $(VENV)/.bench-installed  ## ckstore and its peers in one interleaved run; needs about 20 GB of disk.
	$(BIN)/python -m bench.run

bench-table:  ## Make README's table, and those of docs/BENCH.md, from the newest results.
	$(BIN)/python -m bench.table

wheel:  ## Wheels in dist/ for other machines, audited, and tried where there is no compiler. PYTHONS="python3.12 ..."
	$(PYTHON) tests/support/wheels.py $(PYTHONS)

clean:
	rm -rf $(VENV) build dist demo-store demo-ranks-store .mypy_cache .pytest_cache .ruff_cache .hypothesis
