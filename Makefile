PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test fast lint gate parity
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

# Beside verl's own functions, in an environment of its own: verl wants an older transformers.
parity: build/verl/ready
	PYTHONPATH=. build/verl/bin/python -m pytest tests/test_verl_parity.py

build/verl/ready: pyproject.toml constraints.txt
	test -x build/verl/bin/python || $(PYTHON) -m venv build/verl
	grep -E '^(torch|triton)==' constraints.txt > build/verl/constraints.txt
	build/verl/bin/pip install -q -c build/verl/constraints.txt -e '.[verl]' 'pytest>=8' 'hypothesis>=6.100'
	touch $@

# The compile gate on the oldest and the newest Triton; the tested one is part of `make test`.
gate: gate-3.6.0 gate-newest

gate-%: .venv/ready
	rm -rf build/triton-$*
	$(BIN)/pip install -q --no-deps --target build/triton-$* triton$(if $(filter newest,$*),,==$*)
	PYTHONPATH=build/triton-$* $(BIN)/gspo doctor --compile
