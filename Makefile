# On a fresh machine `make demo` and `make test` are all that is needed; both install into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check -q
# PyPI's default torch brings gigabytes of CUDA. constraints.txt pins the versions known to work together.
CONSTRAINTS := -c constraints.txt

.PHONY: demo demo-cluster serve test test-long coverage docs clean

$(VENV)/.base: pyproject.toml lab/pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(CONSTRAINTS) torch
	$(PIP) install $(CONSTRAINTS) -e '.[demo]' -e ./lab
	touch $@

$(VENV)/.test: $(VENV)/.base
	$(PIP) install $(CONSTRAINTS) -e '.[test]' -e './lab[plot]'
	touch $@

demo: $(VENV)/.base  ## serve the shipped model with all its adapters under a mixed load, and show what comes back
	$(BIN)/python -m demo.run

demo-cluster: $(VENV)/.base  ## three replicas behind one port; one is killed under load: what clients see of it
	$(BIN)/python -m demo.cluster

serve: $(VENV)/.base  ## the same server, kept up until Ctrl-C
	$(BIN)/manylora serve demo/model --served-model-name manylora-demo --adapter-dir demo/adapters

test: $(VENV)/.test  ## everything that CI runs
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

docs: $(VENV)/.base  ## write every figure of README and docs/ anew from its record in docs/results
	$(BIN)/python -m tools.figures

test-long: $(VENV)/.test  ## what takes longer than CI should
	$(BIN)/python -m pytest -m long -n 2 --dist loadfile --no-loadscope-reorder

coverage: $(VENV)/.test  ## lines and branches of the policy that its tests do not take
	$(BIN)/coverage run --branch --source=src/manylora/policy -m pytest -p no:xdist --timeout=0 --hypothesis-seed=0 \
		tests/policy tests/router tests/proof/test_journals.py
	$(BIN)/coverage report --show-missing --skip-covered

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
