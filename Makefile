PYTHON ?= python3
BIN := .venv/bin
LINKS := build/links/dpart
FOLDERS := runtime compiler profiler partitioner codegen

.PHONY: demo test lint bench clean

demo: .venv/.ready
	$(BIN)/python examples/demo.py

test: .venv/.ready
	$(BIN)/pytest

lint: .venv/.ready links
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	MYPYPATH=build/links $(BIN)/mypy --strict $(foreach f,$(FOLDERS),-p dpart.$(f)) -p dpart
