# Each target does all its own set-up, in .venv; a second run installs nothing.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: demo test docs notebooks wheel-test attack lint fix setup clean

demo: $(INSTALLED)
	$(BIN)/tt demo --overwrite true

test: $(INSTALLED) lint
	# One thread for each of the two processes: more would wait for each other.
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2

docs: $(INSTALLED)
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env docs build/site
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m docs tests/test_docs_commands.py
	@echo "open build/site/index.html"

notebooks: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python .ci/notebooks.py

wheel-test:
	PYTHON=$(PYTHON) .ci/wheel-test

# An hour in pieces: stop it at any moment, run it again to continue. MINUTES=10 does a part.
MINUTES ?= 60
attack: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.attack.run --minutes $(MINUTES)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fix: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

setup: $(INSTALLED)

# The constraints pin what we test with; pyproject.toml says what may work.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $(INSTALLED)

clean:
	rm -rf .venv runs build
