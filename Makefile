# Two commands for users: `make demo` and `make test`. Each sets up its own virtual environment first.
PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?= -n 2 --dist loadfile -q
BENCH_MODEL ?= smollm2
SOAK_MODEL ?= smollm2
SOAK_SECONDS ?= 600

BIN := $(VENV)/bin
# a registry that hiccups is asked again; one that stays away is an error
PIP_INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 8 --timeout 60

.PHONY: demo test test-models bench soak lint format clean
.DELETE_ON_ERROR:

demo: $(VENV)/.stamp-run
	$(BIN)/m40llm generate smollm2 "The capital of France is" --raw --greedy --stop .

test: $(VENV)/.stamp-test
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not models and not slow and not gpu"

test-models: $(VENV)/.stamp-test
	$(BIN)/python -m pytest -q -m "(models or slow) and not gpu"

bench: $(VENV)/.stamp-bench
	$(BIN)/python bench/compare_llama_cpp.py $(BENCH_MODEL)

soak: $(VENV)/.stamp-test
	$(BIN)/python -m tests.soak $(SOAK_MODEL) --seconds $(SOAK_SECONDS)

lint: $(VENV)/.stamp-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.stamp-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "error: m40llm needs Python 3.10 or newer as $(PYTHON) (or: make PYTHON=python3.12 …)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
		{ echo "error: $(PYTHON) cannot make virtual environments: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.stamp-run: $(VENV)/.stamp-venv pyproject.toml
	$(PIP_INSTALL) -e .
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-venv pyproject.toml
	$(PIP_INSTALL) -e '.[test]'
	@touch $@

$(VENV)/.stamp-bench: $(VENV)/.stamp-venv pyproject.toml
	$(PIP_INSTALL) -e '.[bench]'
	@touch $@

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
