# Every target sets up what it needs: a fresh clone wants Linux, Python 3.11+ and make, nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
ENGINES := $(VENV)/.engines

# The tests start hundreds of processes. Without stored bytecode each would compile Convoy.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-full check fix docs package gpu bench targets bench-full validate clean

ifneq ($(shell test -L $(VENV) && echo link),)
# The environment of another checkout, used with the code here. Installing into it would take it from that checkout.
export PYTHONPATH := $(CURDIR)
$(READY) $(ENGINES): ;
else
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $(READY)
$(ENGINES): $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[engines]'
	touch $(ENGINES)
endif

demo: $(READY)  ## four unequal local processes train one CNN; one device beside them
	$(BIN)/convoy demo

test: $(READY)  ## everything that fits into eight minutes on two cores
	$(BIN)/python -m pytest -n 4 --dist worksteal

test-full: $(ENGINES)  ## the slow checks too, with the engines that they start
	$(BIN)/python -m pytest -n 3 --dist worksteal -m 'slow or not slow'

check: $(READY)  ## what a commit must pass: format, lint, imports one way, types, size limits
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python -m tests.support.room_lines

fix: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(READY)  ## the pages, into docs/_build: figures drawn again, warnings are errors
	$(BIN)/python -m docs.figures_plans
	$(BIN)/python -m docs.figures_step
	$(BIN)/python -m docs.figures_rooms
	$(BIN)/python -m sphinx -W --keep-going -n -q -b html docs docs/_build

package: $(READY)  ## sdist and wheel into dist/; the wheel in an environment of its own runs the demo
	rm -rf dist && $(BIN)/python -m pip install --quiet build
	$(BIN)/python -m build --quiet
	$(BIN)/python -m tests.support.distribution dist
	$(PYTHON) -m venv --clear dist/venv
	dist/venv/bin/python -m pip install --quiet -c constraints.txt "$$(ls dist/*.whl)[digits]"
	cd dist && venv/bin/python -W error -m convoy --version && venv/bin/convoy demo --epochs 1

bench: $(READY)  ## Convoy beside one device and PyTorch DDP, some minutes; Linux, root
	$(BIN)/python -m benchmarks.bench

targets: $(READY)  ## every target of the benchmark once, an hour and a half on two cores; Linux, root
	$(BIN)/python -m benchmarks.bench --set targets

bench-full: $(READY)  ## all fleets, nets and batches, how cost grows; hours; Linux, root
	$(BIN)/python -m benchmarks.bench --set bench-full

validate: $(READY)  ## predictions beside measurements, an hour; Linux, root
	$(BIN)/python -m benchmarks.validate

gpu: $(READY)  ## what Convoy does on this machine's accelerator, ten minutes; docs/gpu.md
	$(BIN)/python -m benchmarks.gpu --page docs/gpu.md

clean:
	rm -rf $(VENV) dist docs/_build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
