"""Target `trt`: standard ONNX with Q/DQ as TensorRT's explicit quantization wants it, weights stored quantized.

Planning is here and reads names and shapes only; `bridge.graph` makes and edits the graph. TensorRT's rules and their
sources are listed in `bridge.graph.lint`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.dtypes import DTYPES, FLOATS, SHORT, dtype
from bridge.errors import UsageError, nearest
from bridge.graph.tasks import TASKS
from bridge.planning import Draft, Drafted, Output, Plan, Step
from bridge.quant.blocks import stored_shapes
from bridge.quant.scheme import has_tensor_scale, is_static
from bridge.values import Format, Numeric, Program, Site, Slice, Structure, TensorSpec

if TYPE_CHECKING:
    import numpy as np

    from bridge.conversion import Conversion, Written
    from bridge.graph.engine import Profile
    from bridge.quant.scheme import Scheme
    from bridge.sources import Source

NEWEST_OPSET = 24  # what torch 2.13 exports and TensorRT 10.15 reads
# What an architecture's class name says of its head.
SUFFIXES = (
    ("ForCausalLM", "causal-lm"),
    ("LMHeadModel", "causal-lm"),
    ("ForMaskedLM", "masked-lm"),
    ("ForSequenceClassification", "sequence-classification"),
    ("ForTokenClassification", "token-classification"),
    ("ForQuestionAnswering", "question-answering"),
    ("ForImageClassification", "image-classification"),
    ("Model", "feature-extraction"),
)
# TensorRT's "Quantization Schemes": INT4 blocks of 64 or 128, FP4 blocks of 16 under FP8 scales, MXFP8 blocks of 32.
INT4_BLOCKS = (64, 128)
# Graph export of a few layers and the stamping of the rest, measured on the 1.1 B Llama shape (benchmarks/trt.py).
EXPORT_MEMORY = 800 << 20
UNREAD = "holds all experts of a layer in one tensor, and the graph reads each by itself; target hf takes the model"


@dataclass(frozen=True)
class TrtOptions:
    """Options of target `trt`."""

    task: str | None = field(default=None, metadata={"help": f"one of {', '.join(TASKS)}; default: the architecture's"})
    dtype: str | None = field(
        default=None, metadata={"help": "fp16, bf16 or fp32 for what stays unquantized; default: the source's"}
    )
    opset: int | None = field(
        default=None, metadata={"help": "ONNX opset 21 to 24; default: the lowest that can say it"}
    )
    cache: bool = field(default=True, metadata={"help": "decoders: past_key_values inputs and present outputs"})
    custom_ops: bool = field(default=False, metadata={"help": "allow TensorRT's own FP4 / MXFP8 ops (domain trt)"})
    engine: bool = field(
        default=False, metadata={"help": "also build model.engine (needs the tensorrt package and a GPU)"}
    )
    stamp: bool = field(default=True, metadata={"help": "export a few layers and stamp the identical rest"})


class Trt:
    """See `bridge.targets.Target`."""

    name = "trt"
    writes = ("model.onnx", "model.safetensors", "model.engine", "trtexec.txt")
    loads = ("model.onnx", "model.safetensors")
    metadata: Mapping[str, str] = {}
    align = 64  # a cache line
    runs = True  # the export has loaded torch anyway
    base_memory = EXPORT_MEMORY
    Options = TrtOptions
    loaded_by = (
        Program(
            "TensorRT",
            "10.15 (its documented rules), opsets 21 to 24",
            "the file keeps the rules that TensorRT documents for explicit quantization (`qbridge check`); no engine "
            "was built where this was developed, which has no GPU",
            ("tests/graph/test_lint.py", "tests/graph/test_engine.py"),
        ),
        Program(
            "ONNX Runtime",
            "1.26 and later",
            "runs the written file on the CPU; codes equal those of ModelOpt's fake-quantized model node by node, ties "
            "apart",
            ("tests/targets/test_trt_oracle.py",),
        ),
    )

    def resolve(
        self, options: TrtOptions, structure: Structure, scheme: Scheme | None, specs: Mapping[str, TensorSpec]
    ) -> TrtOptions:
        if options.engine:
            self._refuse_engine()
        task = _task(options.task, structure.architecture)
        counts = Counter[str]()
        for spec in specs.values():
            if DTYPES[spec.dtype].floating:
                counts[spec.dtype] += spec.size
        if options.dtype and SHORT.get(options.dtype, options.dtype) not in FLOATS:
            raise UsageError(
                f"dtype {options.dtype!r} cannot be the graph's; {nearest(options.dtype, [*FLOATS, *SHORT])}"
            )
        chosen = dtype(options.dtype).name if options.dtype else counts.most_common(1)[0][0]
        if chosen not in FLOATS:
            raise UsageError(f"dtype {chosen!r} cannot be the graph's; known: fp32, fp16, bf16")
        least = self._least_opset(chosen, scheme, structure)
        opset = options.opset or least
        if not least <= opset <= NEWEST_OPSET:
            raise UsageError(
                f"opset {opset} cannot be written for this model and scheme; known: {least} to {NEWEST_OPSET}"
            )
        return dataclasses.replace(options, task=task, dtype=chosen, opset=opset)

    @staticmethod
    def _refuse_engine() -> None:
        from bridge.graph.engine import EngineUnavailable, missing

        if lack := missing():
            raise EngineUnavailable(f"engine=True: no TensorRT engine can be built here: {lack}")

    @staticmethod
    def _least_opset(chosen: str, scheme: Scheme | None, structure: Structure) -> int:
        """21 has block scales; 23 lets a float32 scale go with half data (`output_dtype`) and has FLOAT4E2M1."""
        formats = [scheme.format_of(site) for site in structure.sites] if scheme else []
        fp4 = any(
            isinstance(f, Format) and n.dtype == "float4_e2m1fn"
            for f in formats
            if isinstance(f, Format)
            for n in f.weight
        )
        quantized = any(isinstance(f, Format) for f in formats) or bool(scheme and scheme.kv)
        return 23 if fp4 or (quantized and chosen != "float32") else 21

    def refuse(self, format_: Format, options: TrtOptions) -> str:
        codes = {n.dtype for n in (*format_.weight, *((format_.input,) if format_.input else ()))}
        entry = format_.input
        if entry and entry.dynamic and entry.per == "token":
            return "TensorRT quantizes activations per tensor with constant scales, not per token; use fp8"
        if entry and entry.dynamic and not options.custom_ops:
            other = "nvfp4_wo" if entry.dtype == "float4_e2m1fn" else "fp8"
            return (
                f"standard ONNX cannot quantize activations to {entry.dtype} blocks at run time; pass custom_ops=True "
                f"(--custom-ops) for TensorRT's own ops, or use {other}"
            )
        for numeric in format_.weight:
            if numeric.dtype == "int4" and numeric.block not in [(b,) for b in INT4_BLOCKS]:
                return f"TensorRT's INT4 has blocks of 64 or 128 along `in`, not {numeric.block}"
            if numeric.dtype == "float4_e2m1fn" and (numeric.block, numeric.scale_dtype) != ((16,), "float8_e4m3fn"):
                return "TensorRT's FP4 has blocks of 16 under FP8 scales; use nvfp4_wo"
            if numeric.scale_dtype == "float8_e8m0fnu" and not options.custom_ops:
                return "TensorRT takes E8M0 scales only through its own ops; pass custom_ops=True (--custom-ops)"
        return (
            "" if codes <= {"float8_e4m3fn", "int8", "int4", "float4_e2m1fn"} else f"TensorRT has no codes of {codes}"
        )

    def refuse_kv(self, kv: Numeric, structure: Structure, options: TrtOptions) -> str:
        if kv.dynamic or kv.per != "tensor":
            return f"standard ONNX has no scales made at run time, as {kv.dtype} blocks need; use kv='fp8' or 'int8'"
        if not structure.attention:
            return f"{structure.architecture} has no attention module with a cache"
        return ""

    def refuse_stack(self, format_: Format, site: Site, options: TrtOptions) -> str:
        return UNREAD

    def keeps(self, format_: Format, site: Site) -> str:
        if site.layout == "conv" and any(n.per == "block" for n in format_.weight):
            return "convolution: block scales need a matrix"
        return ""

    def misfits(self, format_: Format, site: Site, spec: TensorSpec) -> list[str]:
        if site.layout == "conv":
            return []
        out, in_ = _out_in(spec, site)
        problems = []
        if not DTYPES[spec.dtype].floating or DTYPES[spec.dtype].bits < 16:
            return [f"a weight of dtype {spec.dtype} cannot be quantized; keep this module in a recipe"]
        for numeric in format_.weight:
            block = numeric.block[-1] if numeric.per == "block" else 1
            if in_ % block:
                divisors = [b for b in INT4_BLOCKS if in_ % b == 0 and numeric.dtype == "int4"]
                remedy = f"a recipe with block = {divisors[0]}" if divisors else "a recipe that keeps these modules"
                problems.append(
                    f"in = {in_} does not divide into blocks of {block}: TensorRT pads nothing; write {remedy}"
                )
            if DTYPES[numeric.dtype].bits == 4 and out % 2:
                problems.append(
                    f"out = {out} is odd: {numeric.dtype} codes are packed in pairs along `out`; keep it in a recipe"
                )
        return problems

    def draft(self, draft: Draft) -> Drafted:
        drafted = Drafted()
        for spec, site in draft.carried():
            if site and site.stacked:
                drafted.problems.append((site.module, UNREAD))
            format_ = draft.formats.get(site.weight) if site else None
            if site and isinstance(format_, Format):
                drafted.problems += [(site.module, problem) for problem in self.misfits(format_, site, spec)]
                drafted.steps.append(self.quantized_step(spec, site, format_, draft.options))
            else:
                drafted.steps.append(self.plain_step(spec, site, draft.why_plain(spec, site), draft.options))
        if draft.scheme and draft.scheme.kv:
            drafted.steps += [self.kv_step(module, draft.scheme.kv) for module in draft.structure.attention]
        return drafted

    def plain_step(self, spec: TensorSpec, site: Site | None, kept: str, options: TrtOptions) -> Step:
        cast = DTYPES[spec.dtype].floating and options.dtype is not None and spec.dtype != options.dtype
        target = options.dtype if cast and options.dtype else spec.dtype
        text = f"cast({spec.name}, {target})" if cast else spec.name
        output = Output(TensorSpec(spec.name, spec.shape, target), "weight", text)
        return Step((Slice(spec.name),), (output,), site, kept=kept)

    def quantized_step(self, spec: TensorSpec, site: Site, format_: Format, options: TrtOptions) -> Step:
        transpose = site.layout == "out_in"
        text = spec.name if not format_.prescales else f"{spec.name} / pre_quant_scale"
        text = f"transpose({text})" if transpose else text
        outputs = _weight_outputs(spec, site, format_, transpose, text)
        if format_.prescales:
            _, in_ = _out_in(spec, site)
            scale = TensorSpec(f"{site.module}.pre_quant_scale", (in_,), options.dtype or spec.dtype)
            outputs.append(Output(scale, "pre_quant_scale", f"calibration: {format_.algorithm}"))
        if format_.input and is_static(format_.input):
            bound = format_.input.maxbound * (448 if format_.input.dynamic else 1)
            scale = TensorSpec(f"{site.module}.input_scale", (), "float32")
            outputs.append(Output(scale, "input_scale", f"calibration: input amax / {bound:g}"))
        whole = Slice(spec.name, module=site.module)
        return Step((whole,), tuple(outputs), site, format_, transpose=transpose, shares=_shares(format_, site))

    def kv_step(self, attention: str, kv: Numeric) -> Step:
        outputs = [
            Output(
                TensorSpec(f"{attention}.{p}_scale", (), "float32"),
                f"{p}_scale",
                f"calibration: {p} amax / {kv.maxbound:g}",
            )
            for p in ("k", "v")
        ]
        return Step((), tuple(outputs), attention=attention, kv=kv)

    def notes(self, structure: Structure, options: TrtOptions) -> tuple[str, ...]:
        notes = []
        experts = {site.expert for site in structure.sites if site.expert is not None}
        if experts:
            notes.append(
                f"every token passes all {len(experts)} experts in the graph: standard ONNX has no fused routing"
            )
        if options.dtype != "float32":
            notes.append(
                f"{options.dtype} graph: ONNX Runtime's CPU cannot run it as it is; verify runs its float32 twin"
            )
        return tuple(notes)

    def lint(self, directory: Path, plan: Plan) -> list[str]:
        from bridge.graph.lint import lint

        return [str(finding) for finding in lint(directory, custom_ops=plan.options["custom_ops"])]

    def audit(self, directory: Path) -> list[str]:
        return []

    def runtime(self, directory: Path) -> Any:
        from bridge.graph.runtime import Runtime

        return Runtime(directory)

    def damage(
        self, directory: Path, plan: Plan, source: Source, batch: Mapping[str, np.ndarray]
    ) -> tuple[tuple[str, float], ...]:
        from bridge.graph.damage import layer_damage

        return layer_damage(directory, plan, source, batch)

    def write(self, conversion: Conversion, directory: Path) -> Written:
        from bridge.graph.engine import EngineOptions, build_engine, trtexec_line
        from bridge.graph.writer import write_onnx

        written = write_onnx(conversion, directory)
        build = EngineOptions(profile_of(conversion.source.config, bool(conversion.plan.options["cache"])))
        line = trtexec_line(directory / "model.onnx", options=build, shown="model.onnx")
        (directory / "trtexec.txt").write_text(line + "\n")
        if conversion.plan.options["engine"]:
            engine = directory / "model.engine"
            build_engine(directory / "model.onnx", engine, build, progress=conversion.progress)
        return written


def _shares(format_: Format, site: Site) -> str:
    """The name under which modules that the model holds as one matrix share a per-tensor amax."""
    return site.shares if has_tensor_scale(format_) else ""


def _task(asked: str | None, architecture: str) -> str:
    """The task to export; UsageError where the checkpoint has no head for it."""
    own = next((task for suffix, task in SUFFIXES if architecture.endswith(suffix)), None)
    if asked is not None and asked not in TASKS:
        raise UsageError(f"task {asked!r} is unknown; {nearest(asked, TASKS)}")
    if asked is None and own is None:
        raise UsageError(f"{architecture} belongs to no task that can be exported; known: {', '.join(sorted(TASKS))}")
    if asked is not None and own is not None and asked not in (own, "feature-extraction"):
        raise UsageError(f"task {asked!r}: a checkpoint of {architecture} has no such head; it serves {own}")
    return asked or own or "feature-extraction"


def _out_in(spec: TensorSpec, site: Site) -> tuple[int, int]:
    out, in_ = spec.shape[:2] if site.layout != "in_out" else spec.shape[1::-1]
    return out, in_


def _weight_outputs(spec: TensorSpec, site: Site, format_: Format, transpose: bool, text: str) -> list[Output]:
    """Codes and scales of a weight as ONNX wants them: scales (), (out,) per channel, [in / block, out] per block."""
    first, shapes = format_.weight[0], stored_shapes(format_.weight, spec.shape, site.layout, transpose, site.module)
    block = f" of {'×'.join(map(str, first.block))}" if first.block else ""
    what = {
        "codes": (site.weight, "weight", f"codes({text})"),
        "scale": (
            f"{site.module}.weight_scale",
            "scale",
            f"amax({spec.name}, {first.per}{block}) / {first.maxbound:g}",
        ),
        "scale_2": (
            f"{site.module}.weight_scale_2",
            "scale_2",
            f"amax({spec.name}) / {6 * 448 if len(format_.weight) == 1 else 448}",
        ),
    }
    outputs = []
    for key, (stored, shape) in shapes.items():
        name, part, expression = what[key]
        if key == "scale" and len(first.block) == 2:  # ONNX blocks have one axis: the scale repeats along `out`
            shape, expression = (shape[0], _out_in(spec, site)[0]), f"repeat({expression}, {first.block[0]})"
        stored = "uint8" if stored == "float8_e8m0fnu" else stored
        outputs.append(Output(TensorSpec(name, shape, stored), part, expression))
    return outputs


def profile_of(config: Mapping[str, Any], cache: bool) -> Profile:
    """The engine's default shapes, cut to the positions that the model has: past and sequence share them."""
    from bridge.graph.engine import Profile

    limit = config.get("max_position_embeddings") or config.get("n_positions")
    if not isinstance(limit, int):
        return Profile()
    most = min(512, max(limit // 2, 1) if cache else limit)
    past = min(1024, limit - most)
    return Profile(sequence=(1, min(128, most), most), past=(0, min(128, past), past))


TARGET = Trt()
