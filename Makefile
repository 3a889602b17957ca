# Two commands: `make run` shows a conversation whose earlier tokens are reused, `make test` runs everything.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= smollm2
PROMPTS ?= 200
TRIALS ?= 300
SANITIZED := build/sanitize
NATIVE := CMakeLists.txt $(wildcard native/*)
# Waiting threads that spin slow a shared machine down; a test run shares it with itself.
export OMP_WAIT_POLICY ?= passive

.PHONY: run test check unit exact fuzz faults sanitize docs install tools browser clean

run: install
	@$(BIN)/octavo pull $(MODEL)
	@$(BIN)/octavo chat $(MODEL) --script docs/first-chat.txt --max-tokens 48

test: check
	$(BIN)/octavo pull smollm2
	$(BIN)/pytest

check: tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: tools
	$(BIN)/pytest tests/unit

# The long proof of the first promise: every way into the cache, byte by byte. `make exact PROMPTS=20` runs a part.
exact: tools
	$(BIN)/octavo pull smollm2
	OCTAVO_EXACT_PROMPTS=$(PROMPTS) $(BIN)/pytest tests/long --timeout 7200

# The server under some 5,000 requests made from its own document, and 1,000 clients that go at any moment.
fuzz: tools
	$(BIN)/octavo pull smollm2
	OCTAVO_FUZZ_EXAMPLES=160 OCTAVO_FUZZ_CLIENTS=1000 $(BIN)/pytest -s --timeout 7200 tests/e2e/server/test_fuzz.py \
	  tests/e2e/server/test_serving.py -k "request_fails or clients_that_go"

# What can happen to the store on disk, many times: kills, cuts, flipped bits, full and read-only disks.
faults: tools
	OCTAVO_FAULT_TRIALS=$(TRIALS) $(BIN)/pytest tests/faults --timeout 7200

# The documentation as a site, in build/site.
docs: tools
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# The kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer; needs GCC. Python is not built with them, so
# their libraries come first, and the C++ library beside them, whose exceptions they watch.
sanitize: tools
	$(BIN)/cmake -S . -B $(SANITIZED) -G Ninja -DOCTAVO_SANITIZE=ON -DCMAKE_BUILD_TYPE=Debug \
	  -DPython_EXECUTABLE=$(abspath $(BIN)/python) -Dnanobind_DIR=$$($(BIN)/python -m nanobind --cmake_dir)
	$(BIN)/cmake --build $(SANITIZED)
	LD_PRELOAD="$$(echo $$(for name in asan ubsan stdc++; do $(CXX) -print-file-name=lib$$name.so; done))" \
	  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	  OCTAVO_TEST_NATIVE=$(SANITIZED) $(BIN)/pytest --capture=sys tests/native

install: $(VENV)/.installed
tools: $(VENV)/.tools browser

# What running takes.
$(VENV)/.installed: pyproject.toml constraints.txt $(NATIVE)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV) (a few minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet -c constraints.txt torch==2.13.0
	@$(BIN)/python -m pip install --quiet -c constraints.txt "scikit-build-core>=0.11" "nanobind>=2.4" cmake ninja
	@$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation --editable .
	@touch $@

# What checks and tests take besides; the native module is there already.
$(VENV)/.tools: $(VENV)/.installed
	@echo "Installing what checks and tests need (a few minutes the first time) ..."
	@$(BIN)/python -m pip install --quiet -c constraints.txt --no-build-isolation --editable ".[dev,bench,clients,docs]"
	@touch $@

# The tests of the pages drive a real Chromium. Where there is none it is installed, if that needs no password.
CHROMIUM := $(firstword $(OCTAVO_CHROMIUM) $(foreach name,chromium chromium-browser google-chrome,$(shell command -v $(name))))
browser:
ifeq ($(CHROMIUM),)
	@echo "Installing Chromium, for the tests of the pages ..."
	@{ [ "$$(id -u)" = 0 ] && timeout 300 apt-get update -qq && DEBIAN_FRONTEND=noninteractive timeout 900 apt-get install -y -qq \
	  --no-install-recommends chromium fonts-dejavu-core >/dev/null; } || echo "Chromium could not be installed: tests of \
	the pages are left out. Run 'apt-get install chromium' as root, or '$(BIN)/playwright install chromium'."
endif

clean:
	rm -rf $(VENV) build
