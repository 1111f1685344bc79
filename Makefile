# Everything happens in .venv; nothing but Python 3.11 (or later) and a C compiler need be installed.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= dev,cuda13
TORCH ?= torch==2.13.0
WORKERS ?= 3
MODEL ?= zoo:resnet18
PAGE ?= build/page.html
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed

ifneq (,$(filter default undefined,$(origin AS))) # make's own name of an assembler, or nothing
AS := x86-avx2
endif
# The tests in which it matters which CPU schedules and code are made for.
NATIVE_TESTS := $(addprefix tests/test_,hardware.py compile_operators.py cpu_*.py row_joining.py pixel_joining.py runtime.py admission.py cli.py output_pool.py)

.PHONY: help venv install page demo test test-as test-slow replay lint types wheel clean
help:
	@echo "make venv       the virtual environment, with the tested versions of constraints.txt"
	@echo "make page       a page on ResNet-18, compiled and measured here (MODEL=$(MODEL) PAGE=$(PAGE))"
	@echo "make demo       train a small network on handwritten digits, compile it, compare with PyTorch; then ResNet-18"
	@echo "make test       the test suite without the slow tests (WORKERS=$(WORKERS) processes)"
	@echo "make test-as    those tests that run code of this CPU, as if it were another (AS=$(AS))"
	@echo "make test-slow  the slow tests, and those with random cases with all of them"
	@echo "make replay BASE=COMMIT   what this tree chooses and prints otherwise than that commit, as text"
	@echo "make lint types wheel clean"

venv install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import sys; sys.exit("Python 3.11 or later is needed: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@echo "installing PyTorch and the other packages into $(VENV), a download of some hundred megabytes"
	$(BIN)/python -m pip install --no-input -c constraints.txt "$(TORCH)"
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[$(EXTRAS)]"
	touch $@

page: venv
	$(BIN)/tilewright explain $(MODEL) --profile --html $(PAGE) >/dev/null
	@echo "open $(PAGE) in a browser"

demo: venv
	$(BIN)/python examples/demo.py

# One OpenMP thread a process: workers with two threads each would fight for the cores. Three of them: some tests wait for processes.
# Byte code is kept whatever the environment says: the tests start hundreds of Python processes.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal

test: venv
	$(PYTEST) -m "not slow and not gpu"

test-as: venv
	TILEWRIGHT_NATIVE=$(AS) $(PYTEST) -m "not slow and not gpu" $(NATIVE_TESTS)

test-slow: venv
	$(PYTEST) --hypothesis-profile=thorough -m "(slow or hypothesis) and not gpu"

BASE ?= HEAD
replay: venv
	$(BIN)/python -m bench.replay --against $(BASE)

lint: venv
	$(BIN)/ruff check .

types: venv
	$(BIN)/mypy tilewright bench examples scripts tests

wheel: venv
	rm -rf build dist
	$(BIN)/python -m build --wheel --outdir dist .

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find tilewright tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +
