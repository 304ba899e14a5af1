# Everything runs in .venv, which is made on first use and again when the requirements change.
PYTHON ?= python3
BIN := .venv/bin
FOLDERS := runtime compiler profiler partitioner codegen

.PHONY: demo test lint bench clean

# The commands a user types, on a GPT-2 of 10.8 million parameters. On two cores data parallelism beats any
# pipeline, so the demo asks for two stages; leave --stages out to see the planner say so.
demo: .venv/.ready
	rm -rf build/demo && mkdir -p build/demo
	$(BIN)/dpart profile examples/gpt2.py:workload -o build/demo/profile.json --microbatch-size 2
	$(BIN)/dpart partition build/demo/profile.json --devices 2 --stages 2 -o build/demo/plan.json
	$(BIN)/dpart emit examples/gpt2.py:workload build/demo/plan.json -o build/demo/gpt2
	$(BIN)/dpart verify examples/gpt2.py:workload build/demo/gpt2 --steps 1
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 build/demo/gpt2/train.py --steps 32 --lr 1e-3

test: .venv/.ready
	$(BIN)/python -m pytest

# mypy does not see through an editable install, so it gets the folders under their installed names.
lint: .venv/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/links && mkdir -p build/links/dpart
	ln -s $(CURDIR)/dpart/* $(foreach f,$(FOLDERS),$(CURDIR)/$(f)) build/links/dpart/
	MYPYPATH=build/links $(BIN)/mypy --strict -p dpart

bench: .venv/.ready
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/run.py -o docs/benchmarks.md

clean:
	rm -rf build .venv

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev,examples]'
	touch $@
