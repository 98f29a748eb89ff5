PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test fast lint
demo: .venv/ready
	$(BIN)/gspo train

test: lint
	$(BIN)/python -m pytest

fast: lint
	$(BIN)/python -m pytest -m "not slow"

lint: .venv/ready
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/pyright

# The tested set of versions, in an environment of its own.
.venv/ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt -e '.[dev,bench,trl]'
	touch $@
