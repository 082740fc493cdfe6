# `make demo` and `make test` are all the set-up there is: both build .venv on first use, and again when pyproject.toml changes.
PYTHON ?= python3
BIN    := .venv/bin
STAMP  := .venv/.stamp

.PHONY: demo test lint bench format readme clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: lint
	$(BIN)/pytest -n auto
	$(BIN)/pytest -n auto -m slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/qbridge check

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

readme: $(STAMP)
	$(BIN)/python tests/readme.py

bench: $(STAMP)
	$(BIN)/python benchmarks/trt.py

clean:
	rm -rf .venv build dist

# torch goes first and by exact version: a CPU wheel that the machine holds is found by this requirement, while a range would
# bring the CUDA build, several GB of it. The range in pyproject.toml then keeps what is there.
$(STAMP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	touch $@
