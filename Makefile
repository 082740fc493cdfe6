# `make demo` and `make test` are all the set-up there is: both build .venv on first use, and again when pyproject.toml or
# this file changes.
PYTHON ?= python3
BIN    := .venv/bin
STAMP  := .venv/.stamp

.PHONY: demo test faults fuzz fuzz-guided browser lint bench docs format readme clean

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: lint browser
	$(BIN)/pytest -n auto
	$(BIN)/pytest -n auto -m slow -rs

# Strangers' files, 100,000 of them and new ones each time (CI has 2,000, always the same), then the malicious ones. It
# prints the seed: `make fuzz SEED=7` runs the same again.
fuzz: $(STAMP)
	$(BIN)/python -m tests.attack --cases 100000 $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.attack.corpus

# Every command killed, stopped, on a full disk and from a source that breaks, at 200 points of each kind and new ones each
# time (CI has fewer, always the same). It prints the seed: `make faults SEED=7` strikes the same again. Needs a C compiler.
faults: $(STAMP)
	$(BIN)/python -m tests.faults --points 200 $(if $(SEED),--seed $(SEED))

# Led by coverage, for those parsers of ours that take bytes: atheris has wheels for Linux only, and is not installed else.
fuzz-guided: $(STAMP)
	$(BIN)/python -m pip install --quiet atheris
	for target in headers pickles legacy metadata records archives yamls; do \
	    $(BIN)/python -m tests.attack.guided $$target --seconds $(or $(SECONDS),60) || exit 1; done

# What looks at the report needs Chromium and its driver, which pip has not; -rs above says so where they are missing.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null \
	    || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq \
	         && apt-get install -y -qq --no-install-recommends chromium chromium-driver fonts-dejavu-core >/dev/null; } \
	    || echo "no chromium and chromedriver, and they cannot be installed here: the tests marked browser will be skipped"

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/qbridge check

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

readme: $(STAMP)
	$(BIN)/python -m tests.readme

# The site, out/site/index.html: it opens from the disk. The variable silences an advertisement of the theme's.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

bench: $(STAMP)
	$(BIN)/python benchmarks/trt.py

clean:
	rm -rf .venv build dist

# torch goes first and by exact version: a CPU wheel that the machine holds is found by this requirement, while a range would
# bring the CUDA build, several GB of it. The range in pyproject.toml then keeps what is there.
# nvtripy comes without its requirements, a TensorRT and a compiler that PyPI does not have: tests/tripy_runtime stands in.
#
# Then the oracles of foreign checkpoints, for tests only, without their requirements, which pull CUDA builds and trainers:
# einops and on is what importing them on a CPU asks for (einops Megatron-Bridge, the rest torchtitan). The last two
# stand apart from the environment's own: torchtitan before it renamed its tensors, and the last transformers whose wheel
# carries the converter of Meta's checkpoints.
$(STAMP): pyproject.toml Makefile
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps nvtripy==0.1.7
	$(BIN)/python -m pip install --quiet --no-deps megatron-core==0.16.1 megatron-bridge==0.3.1 torchtitan==0.3.0 \
	    einops==0.8.2 spmd_types==0.3.1 tyro==1.0.17 docstring_parser==0.18.0
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .venv/torchtitan-0.2 torchtitan==0.2.2
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .venv/transformers-4.45 transformers==4.45.2
	touch $@
