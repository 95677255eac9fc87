# Two commands do everything: `make check` runs the main job, `make test` runs the tests. Each makes .venv first.

PYTHON ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,\
            $(if $(shell $(name) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo yes),$(name))))
BIN := .venv/bin
READY := .venv/.ready
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
ARGS ?=

.PHONY: check test lint env clean

check: $(READY)
	$(BIN)/mlacheck run --profile quick $(ARGS)

test: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

env: $(READY)

$(READY): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "make: needs Python 3.11 or newer (or PYTHON=path)" >&2; exit 2; }
	$(PYTHON) -m venv .venv
	$(PIP) setuptools torch
	$(PIP) --no-build-isolation --editable '.[dev,gpu]'
	touch $(READY)

clean:
	rm -rf .venv build dist *.egg-info
