# Two commands: `make run` shows a conversation whose earlier tokens are reused, `make test` runs everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= smollm2
NATIVE := CMakeLists.txt $(wildcard native/*)
# Waiting threads that spin slow a shared machine down; a test run shares it with itself.
export OMP_WAIT_POLICY ?= passive

.PHONY: run test check unit exact install clean

run: install
	@$(BIN)/octavo pull $(MODEL)
	@$(BIN)/octavo chat $(MODEL) --script docs/first-chat.txt --max-tokens 48

test: check
	$(BIN)/octavo pull smollm2
	$(BIN)/pytest

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: install
	$(BIN)/pytest tests/unit

exact: install
	$(BIN)/pytest tests/long --timeout 7200

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt $(NATIVE)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	@$(BIN)/python -m pip install --quiet -c constraints.txt "scikit-build-core>=0.11" "nanobind>=2.4" cmake ninja
	@$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation --editable ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build
