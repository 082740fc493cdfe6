"""Target `trt`: standard ONNX with Q/DQ for TensorRT's explicit quantization.

Weights are stored quantized. TensorRT's rules and their sources are listed in `bridge.targets.onnx.lint`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.core.errors import UsageError, warn
from bridge.core.text import size
from bridge.core.values import Format, Numeric, Program, Structure, TensorSpec, main_dtype
from bridge.planning.joined_and_cut import OWN_SCALES_NOTE, is_refit
from bridge.planning.plan import Plan
from bridge.planning.target import Draft, Drafted
from bridge.sources.configs.positions import context_length
from bridge.targets.checkpoint import float_dtype, option
from bridge.targets.onnx.export.tasks import choose_task
from bridge.targets.onnx.families.refusals import why_refused
from bridge.targets.onnx.formats import FLOAT_ACTIVATIONS, INT4_BLOCKS, NEWEST_OPSET, least_opset
from bridge.targets.onnx.target import ALL_EXPERTS, GRAPHS, OnnxTarget
from bridge.targets.tasks import listed, tasks

if TYPE_CHECKING:
    from bridge.quant.schemes.scheme import Scheme
    from bridge.streaming.context import ConversionContext, WriteResult
    from bridge.targets.onnx.export.float_graph import Graph

# codes and scales of activations that TensorRT's own ops make in blocks: NVFP4, MXFP8
BLOCKS_AT_RUN_TIME = (("float4_e2m1fn", "float8_e4m3fn"), ("float8_e4m3fn", "float8_e8m0fnu"))
BLOCKS = "write a recipe with block = 128 or 64 that keeps the matrices which it does not divide"


@dataclass(frozen=True)
class TrtOptions:
    """Options of target `trt`."""

    task: str | None = option(None, f"one of {', '.join(tasks())}; default: the architecture's")
    dtype: str | None = option(None, "fp16, bf16, fp32 of float parts; default: own")
    opset: int | None = option(None, "ONNX opset 21 to 24; default: the lowest that has the needed types")
    attention_op: bool = option(False, "attention as ONNX's operator (opset 23), which TensorRT fuses less often")
    cache: bool | int = option(
        True,
        "decoders: past_key_values inputs and present outputs; a number of tokens: buffers updated in place (2048)",
    )
    logits: str = option(
        "all", "decoders: of all tokens, or of the last one alone (last) for prompts padded on the left"
    )
    own_scales: bool = option(
        False, "fp8: a weight scale for each of q, k, v, gate, up, as ModelOpt has; TensorRT then needs more kernels"
    )
    custom_ops: bool = option(False, "allow TensorRT's own FP4 / MXFP8 ops (domain trt)")
    engine: bool | str = option(
        False, "also build engines: for GPUs by name (rtx4090,rtx5090), or alone with the tensorrt package for this GPU"
    )
    profile: str | Mapping[str, Sequence[int]] | None = option(
        None, "with engine: least, usual and largest extent of axes, batch=1:4:16,past_sequence=0:512:4095"
    )
    stamp: bool = option(True, "export a few layers and stamp the identical rest")


class Trt(OnnxTarget):
    """See `bridge.targets.Target`."""

    name = "trt"
    writes = (*GRAPHS, "model.safetensors", "*.engine", "engine.json", "trtexec.txt", "genai_config.json")
    Options = TrtOptions
    reader = "TensorRT"
    int4_blocks = INT4_BLOCKS
    loaded_by = (
        Program(
            "TensorRT",
            "10.15 (its documented rules), opsets 21 to 24",
            "the file follows the rules that TensorRT documents for explicit quantization (`qbridge check`); no engine "
            "was built, since the development machine has no GPU",
            ("tests/targets/onnx/lint/test_lint.py", "tests/targets/trt/test_engine.py"),
        ),
        Program(
            "ONNX Runtime",
            "1.26 and later",
            "runs the written file on the CPU; codes equal those of ModelOpt's fake-quantized model node by node, "
            "except ties",
            ("tests/targets/trt/test_trt_oracle.py", "tests/targets/trt/test_default_session.py"),
        ),
        Program(
            "OpenVINO",
            "2026.4.1",
            "its outputs equal ONNX Runtime's within 1e-5 for unquantized and weight-only graphs, FP4 too, and within "
            "1e-2 with INT8 activations, if INFERENCE_PRECISION_HINT is f32 and DYNAMIC_QUANTIZATION_GROUP_SIZE 0; it "
            "rounds FP8 activations through float16",
            ("tests/targets/trt/test_other_runtimes.py",),
        ),
        Program(
            "onnxruntime-genai",
            "0.18",
            "generates on the CPU from a float32 decoder with its cache; logits equal ONNX Runtime's to 1e-4",
            ("tests/targets/trt/test_genai.py",),
        ),
    )

    def resolve(
        self, options: TrtOptions, structure: Structure, scheme: Scheme | None, specs: Mapping[str, TensorSpec]
    ) -> TrtOptions:
        engine = _resolve_engine(options.engine)
        cache = _resolve_cache(options.cache)
        task = choose_task(options.task, structure.architecture)
        if options.logits not in ("all", "last"):
            raise UsageError(f"logits={options.logits!r} must be all or last (--logits)")
        if not (tasks()[task].cached and not tasks()[task].parts):
            if options.logits == "last":
                raise UsageError(f"logits='last' (--logits last) is for decoders of one graph, not for task {task}")
            if is_buffered(cache):
                raise UsageError(f"cache={cache} (--cache {cache}) is for decoders of one graph, not for task {task}")
        chosen = float_dtype(options.dtype, specs, "of graphs")
        if isinstance(engine, str) and options.dtype is None and chosen == "float32":
            chosen = "float16"
        least, why = least_opset(chosen, scheme, structure)
        if options.attention_op and least < 23:
            least, why = 23, "older ones have no Attention"
        if is_buffered(cache):
            least, why = 24, "older ones have no TensorScatter, which buffers of the cache need"
        opset = options.opset or least
        if not least <= opset <= NEWEST_OPSET:
            reason = why if opset < least else f"{NEWEST_OPSET} is the newest that bridge writes"
            raise UsageError(f"opset {opset} is not possible: {reason}; use {least} to {NEWEST_OPSET}")
        profile = None if options.profile is None else _resolve_profile(options.profile, engine)
        resolved: dict[str, Any] = {
            "task": task,
            "dtype": chosen,
            "opset": opset,
            "engine": engine,
            "cache": cache,
            "profile": profile,
        }
        return dataclasses.replace(options, **resolved)

    def draft(self, draft: Draft) -> Drafted:
        drafted, options = super().draft(draft), draft.options
        if options.own_scales and not any(isinstance(f, Format) and is_refit(f) for f in draft.formats.values()):
            drafted.notes.append(OWN_SCALES_NOTE)
        limit = context_length(draft.config)
        if is_buffered(options.cache) and limit is not None and options.cache > limit:
            drafted.notes.append(
                f"the model has {limit} positions, and every step reads all {options.cache} of the buffers: "
                f"cache={limit} (--cache {limit}) holds all that it reads"
            )
        if options.engine:
            from bridge.targets.trt.profile import check_positions, parse_ranges

            check_positions(parse_ranges(options.profile or {}), limit)
            drafted.disk = sum(output.spec.nbytes for step in drafted.steps for output in step.outputs)
        if isinstance(options.engine, str):
            from bridge.targets.trt.engine import build_memory
            from bridge.targets.trt.gpus import why_no_engine

            architectures = options.engine.split(",")
            drafted.problems += [("", why) for why in why_no_engine(drafted.steps, options.dtype, architectures)]
            if options.attention_op and options.dtype == "float32":
                drafted.problems.append(("", "TensorRT has no kernel of Attention in float32; leave out attention_op"))
            gpus, need = ", ".join(map(str.upper, architectures)), size(build_memory(drafted.disk))
            drafted.notes.append(f"engine for {gpus}: up to {need} of memory to build it, {size(drafted.disk)} of disk")
            if main_dtype(draft.specs.values()) == "float32" != options.dtype:
                drafted.notes.append(
                    f"float32 is written as {options.dtype}, which TensorRT fuses attention in (--dtype)"
                )
        return drafted

    def check_machine(self, plan: Plan, memory: int | None) -> None:
        if isinstance(plan.options["engine"], str):
            from bridge.targets.trt.engine import check_memory

            check_memory(sum(step.nbytes for step in plan.steps), memory)

    def why_unsupported(self, format_: Format, options: TrtOptions) -> str:
        codes = {n.dtype for n in (*format_.weight, *((format_.input,) if format_.input else ()))}
        entry = format_.input
        if entry and entry.dynamic and entry.per == "token":
            return "TensorRT quantizes activations per tensor with constant scales, not per token; use fp8"
        if entry and entry.per == "block" and (entry.dtype, entry.scale_dtype) not in BLOCKS_AT_RUN_TIME:
            what = f"{entry.dtype} in blocks of {entry.block[-1]} under {entry.scale_dtype} scales"
            return f"TensorRT has no op that quantizes activations to {what}; use fp8"
        if entry and entry.dynamic and not options.custom_ops:
            other = "nvfp4_wo" if entry.dtype == "float4_e2m1fn" else "fp8"
            return (
                f"standard ONNX cannot quantize activations to {entry.dtype} blocks at run time; pass custom_ops=True "
                f"(--custom-ops) for TensorRT's own ops, or use {other}"
            )
        for numeric in format_.weight:
            if numeric.dtype == "int4" and numeric.block not in [(b,) for b in INT4_BLOCKS]:
                return f"TensorRT's INT4 has blocks of 16 to 128 along `in`, not {numeric.block}; {BLOCKS}"
            if numeric.dtype == "float4_e2m1fn" and (numeric.block, numeric.scale_dtype) != ((16,), "float8_e4m3fn"):
                return "TensorRT's FP4 has blocks of 16 with FP8 scales; use nvfp4_wo"
            if numeric.scale_dtype == "float8_e8m0fnu" and not options.custom_ops:
                return "TensorRT takes E8M0 scales only through its own ops; pass custom_ops=True (--custom-ops)"
        if codes <= {"float8_e4m3fn", "int8", "int4", "float4_e2m1fn"}:
            return ""
        return f"TensorRT does not quantize to {', '.join(sorted(codes))}; use fp8 or int8"

    def why_kv_unsupported(self, kv: Numeric, structure: Structure, options: TrtOptions) -> str:
        if kv.dynamic or kv.per != "tensor":
            return f"standard ONNX cannot compute scales at run time, as {kv.dtype} blocks need; use kv='fp8' or 'int8'"
        crosses = any("cross_attn" in name for name in structure.attention)
        if crosses or (options.task and "encoder" in tasks()[options.task].parts):
            return "its keys and values go from one graph to another as they are; leave out kv"
        if not structure.attention:
            kept = ": its layers keep states of fixed size" if structure.states else ""
            return f"{structure.architecture} has no attention module with a cache of its own{kept}; leave out kv"
        return ""

    def why_no_graph(self, draft: Draft) -> str:
        """Why no graph of the model can be made, as far as config and structure tell; "" if they do not."""
        architecture = draft.structure.architecture
        task = tasks()[draft.options.task]
        if why := why_refused(draft.config):
            return f"{architecture} has no graphs: {why}"
        one_graph = "input_ids" in task.inputs and not task.parts and not architecture.endswith("EncoderModel")
        if draft.config.get("is_encoder_decoder") and one_graph:
            why = f"has an encoder and a decoder, and a graph of {draft.options.task} is of one model"
            return f"{architecture} {why}; use a checkpoint that generates text (task seq2seq-lm), or target hf"
        if task.cached and draft.config.get("model_type") in listed("loops", "types"):
            return f"{architecture} reads its tokens one by one in a Python loop, which no graph has; use target hf"
        keeps = bool(draft.structure.attention) or draft.structure.states
        if is_buffered(draft.options.cache) and draft.structure.states:
            length = draft.options.cache
            return f"{architecture} keeps states of fixed size, not keys and values alone; leave out cache={length}"
        if task.cached and draft.options.cache and not keeps:
            reason = "keeps neither keys and values nor states that a graph can take"
            return f"{architecture} {reason}; leave the cache out (cache=False, --no-cache), or use target hf"
        return ""

    def notes(self, structure: Structure, options: TrtOptions) -> tuple[str, ...]:
        notes = []
        experts = {site.expert for site in structure.sites if site.expert is not None}
        if experts:
            notes.append(ALL_EXPERTS.format(len(experts)))
        if is_buffered(options.cache):
            notes.append(
                f"keys and values lie in buffers of {options.cache} tokens: no genai_config.json, since "
                "onnxruntime-genai reads caches that grow (cache=True)"
            )
        if options.dtype == "float32":
            notes.append(
                "float32 graph: TensorRT fuses no attention in it, and takes 3 to 5 times the memory for activations; "
                "for engines write dtype='fp16' (--dtype fp16)"
            )
        if options.dtype == "float16":
            notes.append("float16 graph: verify runs a float32 copy of it")
        if options.dtype == "bfloat16":
            notes.append(
                "bfloat16 graph: ONNX Runtime has no CPU kernels for it, and verify runs a float32 copy; for ONNX "
                "Runtime on a CPU write dtype='fp32' or 'fp16' (--dtype fp32)"
            )
        return tuple(notes)

    def next_command(self, plan: Plan) -> str:
        return "" if plan.program or plan.options["engine"] else "cd {out} && sh trtexec.txt"

    def lint(self, directory: Path, plan: Plan) -> list[str]:
        from bridge.targets.onnx.lint import lint
        from bridge.targets.trt.record import altered_engines

        findings = [str(finding) for finding in lint(directory, custom_ops=plan.options["custom_ops"])]
        return [*findings, *altered_engines(directory)]

    def write(self, context: ConversionContext, directory: Path) -> WriteResult:
        from bridge.targets.onnx.write.genai_config import (
            write_genai_config,
            write_multimodal_config,
            write_parts_config,
        )
        from bridge.targets.onnx.write.side_files import read_image_size, read_pooling
        from bridge.targets.onnx.write.writer import GraphOptions, write_onnx
        from bridge.targets.trt.engine import build_engines, trtexec_lines
        from bridge.targets.trt.profile import parse_ranges

        options, files = context.plan.options, context.source.side_files
        pools = options["task"] == "feature-extraction"
        pooling, why_not = read_pooling(files) if pools else ("", "")
        given = {key: options[key] for key in ("task", "dtype", "opset", "stamp", "attention_op")}
        given |= {"cache": bool(options["cache"]), "rewrite": _rewrite(context.plan)}
        chosen = GraphOptions(**given, image=read_image_size(files), pooling=pooling)
        written, text = write_onnx(context, directory, chosen)
        if "embedding" in tasks()[options["task"]].parts:
            why_not = write_multimodal_config(context.source, text, directory, FLOAT_ACTIVATIONS)
        elif tasks()[options["task"]].parts:
            why_not = write_parts_config(context.source, text, directory, FLOAT_ACTIVATIONS)
        elif _generates(options):
            why_not = write_genai_config(context.source, text, directory, FLOAT_ACTIVATIONS)
        written = dataclasses.replace(written, notes=(*written.notes, *([why_not] if why_not else [])))
        config = context.source.config
        (directory / "trtexec.txt").write_text(trtexec_lines(directory, config))
        if options["engine"]:
            architectures = () if options["engine"] is True else options["engine"].split(",")
            ranges = parse_ranges(options["profile"] or {})
            built = build_engines(directory, config, architectures, ranges=ranges, progress=context.progress)
            for warning in built.warnings:
                warn(warning)
            lines = [f"{engine.file}: {engine.line}" for engine in built.engines]
            written = dataclasses.replace(written, notes=(*written.notes, *lines, *built.warnings))
        return written


def is_buffered(cache: bool | int) -> bool:
    """Whether a cache is a buffer of so many tokens: neither True, a cache that grows, nor False."""
    return not isinstance(cache, bool)


def _resolve_cache(given: Any) -> bool | int:
    """True, False, or the tokens of a buffer, from Python or as a word of the command line."""
    words = {"true": True, "false": False}
    cache = words.get(given.lower(), given) if isinstance(given, str) else given
    if isinstance(cache, bool):
        return cache
    if re.fullmatch(r"\d{1,9}", str(cache)) and int(cache) > 1:
        return int(cache)
    raise UsageError(f"cache={given!r} (--cache) must be True, False, or the tokens of a buffer, 2 or more: 2048")


def _rewrite(plan: Plan) -> Callable[[Graph], None] | None:
    """What a plan changes in a float graph; what that needs is imported once there is a graph."""
    options = plan.options
    last, buffered = options["logits"] == "last", is_buffered(options["cache"])
    alone = {f.weight[0].dtype for f in (step.format for step in plan.quantized) if f and f.input is None}
    own = not alone.isdisjoint(("int8", "int4"))

    def rewrite(graph: Graph) -> None:
        if last:
            from bridge.targets.trt.last_token import keep_last_token

            keep_last_token(graph)
        if buffered:
            from bridge.targets.trt.buffers import write_into_buffers

            write_into_buffers(graph, length=options["cache"])
        if own:
            from bridge.targets.trt.own_inputs import separate_inputs

            separate_inputs(graph, loops="int8" in alone)

    return rewrite if last or buffered or own else None


def _resolve_engine(given: bool | str) -> bool | str:
    """True for this machine's GPU, the architectures of GPUs with commas between, or False; refused if unavailable."""
    from bridge.targets.trt.gpus import parse_gpus
    from bridge.targets.trt.products import FULL, RTX, EngineUnavailable, why_unavailable

    if isinstance(given, str) and given.lower() == "true":  # a bare --engine
        given = True
    if isinstance(given, str) and given.lower() == "false":
        given = False
    if not isinstance(given, bool | str):
        raise UsageError(f"engine={given!r} must be True or False, or names of GPUs: 'rtx4090,rtx5090'")
    engine = ",".join(parse_gpus(given)) if isinstance(given, str) else given
    if engine and (reason := why_unavailable(FULL if engine is True else RTX)):
        named = "\n  or name the GPU that will serve: engine='rtx4090' (--engine rtx4090)" if engine is True else ""
        raise EngineUnavailable(f"engine={given!r} (--engine): no TensorRT engine can be built here: {reason}{named}")
    return engine


def _resolve_profile(given: str | Mapping[str, Sequence[int]], engine: bool | str) -> dict[str, list[int]]:
    """The ranges of axes as `bridge.json` has them; UsageError without an engine, or for an axis that no graph has."""
    from bridge.targets.trt.profile import Profile, check_axes, parse_ranges

    if not engine:
        raise UsageError("profile= (--profile) is for engines: give engine too, for example rtx4090 (--engine rtx4090)")
    ranges = parse_ranges(given)
    check_axes(ranges, Profile().ranges)
    return {name: list(range_) for name, range_ in ranges.items()}


def _generates(options: Mapping[str, Any]) -> bool:
    """True if onnxruntime-genai can generate from the graph: a decoder with a cache, in standard ONNX."""
    return tasks()[options["task"]].cached and options["cache"] is True and not options["custom_ops"]


TARGET = Trt()
