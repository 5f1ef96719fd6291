# Two commands do everything: `make demo` and `make test`. Each makes .venv and installs what it needs.
PYTHON ?= python3
PIP_ARGS ?=
BIN := .venv/bin

.PHONY: demo test test-full test-gpu bench-gpu compat lint clean

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS) torch setuptools
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS) \
		--no-build-isolation -e '.[dev]'
	touch $@

demo: .venv/.installed
	$(BIN)/rholoss demo

lint: .venv/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint
	$(BIN)/pytest -n 2 -m "not full"

# Slow things: faults and other versions. Their output is committed.
test-full: lint
	$(BIN)/pytest -m full -s tests/full 2>&1 | tee tests/full/output.txt

# What needs a CUDA device, on a machine that has one (its own Python: BIN=...). The output is committed.
# Only files with such tests are read: others may need what is not there. In parts: TESTS="tests/test_gpu.py ..."
TESTS ?= $(sort $(shell grep -rlE --include='test_*.py' 'mark[.]gpu' tests))
test-gpu:
	PYTHONPATH=src $(BIN)/python -m pytest -m gpu -rs --continue-on-collection-errors $(TESTS) 2>&1 \
		| tee tests/full/output_gpu.txt

# The engine's figures, there too (half an hour; the parts are in gpu.sh): make bench-gpu DATA=DIR
bench-gpu:
	PYTHON="$(BIN)/python" bash benchmarks/gpu.sh "$(DATA)"

# The integrations against the oldest and newest versions of the frameworks, in environments that are
# thrown away (minutes, gigabytes). The output is committed: tests/full/compat_*.txt
compat:
	$(PYTHON) tools/compat.py

clean:
	rm -rf .venv build dist *.egg-info
