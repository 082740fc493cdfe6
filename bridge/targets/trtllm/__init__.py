"""Target `trtllm`: the checkpoint for TensorRT-LLM's engine builder.

The builder exists up to TensorRT-LLM 1.2. Layouts are rows of `mappings/dialects/trtllm.toml`; no code here depends on
an architecture.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.core.dtypes import SHORT, dtype_word
from bridge.core.errors import CannotRun, PlanError, UsageError
from bridge.core.text import nearest
from bridge.core.values import Format, Numeric, Program, Structure, TensorSpec, main_dtype
from bridge.planning.plan import Plan
from bridge.planning.target import Draft, Drafted
from bridge.targets.checkpoint import StreamedTarget, check_ranks, option, write_checkpoint

if TYPE_CHECKING:
    from bridge.quant.schemes.scheme import Scheme
    from bridge.streaming.context import ConversionContext, WriteResult
    from bridge.tables.dialects.dialect import Dialect

HALVES = ("bfloat16", "float16")  # what TensorRT-LLM's plugins compute in
# ModelOpt's names in config.json that TensorRT-LLM up to 1.2 does not list.
UNKNOWN = ("fp8_pb_wo", "W4A16_NVFP4", "MXFP8")


@dataclass(frozen=True)
class TrtllmOptions:
    """Options of target `trtllm`."""

    tp: int = option(1, "ranks that share each layer (tensor parallelism)")
    pp: int = option(1, "stages that share the layers (pipeline parallelism)")
    dtype: str | None = option(None, "fp16, bf16 of unquantized parts; default: source's, or fp16")


class Trtllm(StreamedTarget):
    """See `bridge.targets.Target`."""

    name = "trtllm"
    writes = ("config.json", "quant_cfg.json", "rank*.safetensors")
    loads = writes
    Options = TrtllmOptions
    loaded_by = (
        Program(
            "TensorRT-LLM (engine builder)",
            "up to 1.2, the last with a TensorRT backend",
            "every rank's file and config.json equal what `export_tensorrt_llm_checkpoint` of ModelOpt 0.47 writes, "
            "byte for byte; the engine builder needs a GPU and was not run",
            ("tests/targets/trtllm/test_trtllm_parity.py", "tests/targets/trtllm/test_trtllm.py"),
        ),
    )

    def resolve(
        self, options: TrtllmOptions, structure: Structure, scheme: Scheme | None, specs: Mapping[str, TensorSpec]
    ) -> TrtllmOptions:
        from bridge.tables.dialects.dialect import load_dialect

        known = load_dialect(self.name).architectures
        if structure.architecture not in known:
            raise PlanError(
                f"bridge has no layout of TensorRT-LLM's checkpoint up to 1.2 for {structure.architecture}; "
                f"{nearest(structure.architecture, known)}\n"
                "  hint   target hf: TensorRT-LLM loads unified Hugging Face checkpoints through its PyTorch backend"
            )
        check_ranks(tp=options.tp, pp=options.pp)
        model_dtype = main_dtype(specs.values())
        chosen = options.dtype or (model_dtype if model_dtype in HALVES else "float16")
        chosen = SHORT.get(word := dtype_word(chosen), word)
        if chosen not in HALVES:
            raise UsageError(f"dtype {options.dtype!r} is not a dtype of the checkpoint; use fp16 or bf16")
        return dataclasses.replace(options, dtype=chosen)

    def why_unsupported(self, format_: Format, options: TrtllmOptions) -> str:
        from bridge.targets.trtllm.companions import why_unsupported

        return why_unsupported(format_, options.tp)

    def why_kv_unsupported(self, kv: Numeric, structure: Structure, options: TrtllmOptions) -> str:
        if kv.dynamic or kv.per != "tensor":
            return f"{kv.dtype} has a scale for each block, but ranks hold one for each layer; use kv='fp8' or 'int8'"
        return ""

    def draft(self, draft: Draft) -> Drafted:
        from bridge.tables.architectures.meaning import window_of
        from bridge.tables.architectures.structure import match_table
        from bridge.tables.dialects.dialect import load_dialect
        from bridge.targets.trtllm import config
        from bridge.targets.trtllm.ranks import Ranks, vocab_multiple

        matched, dialect = match_table(draft.config, draft.specs), load_dialect(self.name)
        config.shape(matched, vocab_multiple(draft.quantized.values()))
        drafted = Ranks(draft, dialect, matched).drafted()
        drafted.problems += _uneven(drafted, draft.options, dialect)
        drafted.problems += [("config.json", text) for text in config.unlike(matched, dialect)]
        if window := window_of(matched.config):
            drafted.notes.append(f"attention has a window of {window}: run with --max_attention_window_size {window}")
        return drafted

    def notes(self, structure: Structure, options: TrtllmOptions) -> tuple[str, ...]:
        return ("for the engine builder of TensorRT-LLM up to 1.2; later versions load the output of target hf",)

    def next_command(self, plan: Plan) -> str:
        return "trtllm-build --checkpoint_dir {out} --output_dir {out}-engine"

    def lint(self, directory: Path, plan: Plan) -> list[str]:
        from bridge.targets.trtllm.lint import lint

        return lint(directory)

    def runtime(self, directory: Path) -> Any:
        raise CannotRun("TensorRT-LLM's engine builder needs a GPU")

    def why_no_generator(self, directory: Path) -> str:
        return (
            f"TensorRT-LLM up to 1.2 generates text from it, on a GPU: trtllm-build --checkpoint_dir {directory} "
            f"--output_dir {directory}-engine, then its examples/run.py"
        )

    def write(self, context: ConversionContext, directory: Path) -> WriteResult:
        from bridge.tables.architectures.structure import match_table
        from bridge.tables.dialects.dialect import load_dialect
        from bridge.targets.trtllm import config

        plan, source = context.plan, context.source
        matched = match_table(source.config, source.specs)
        files = config.files(plan, matched, load_dialect(self.name))
        written = write_checkpoint(context, directory, files)
        algorithm = json.loads(files["config.json"])["quantization"]["quant_algo"]
        unknown = f"quant_algo {algorithm} is ModelOpt's name; TensorRT-LLM up to 1.2 does not list it"
        return dataclasses.replace(written, notes=written.notes + ((unknown,) if algorithm in UNKNOWN else ()))


def _uneven(drafted: Drafted, options: TrtllmOptions, dialect: Dialect) -> list[tuple[str, str]]:
    """Problems of stages that differ in quantized modules: config.json has one list, with layers counted per stage."""
    stages: dict[int, set[tuple[str, Format | None]]] = {}
    for step in drafted.steps:
        for output in step.outputs:
            if step.site and output.part == "weight" and output.spec.name.startswith(dialect.cache.split("{l}")[0]):
                rank = int(output.file.removeprefix("rank").removesuffix(".safetensors"))
                stages.setdefault(rank // options.tp, set()).add((output.spec.name, step.format))
    if len({frozenset(modules) for modules in stages.values()}) < 2:
        return []
    why = (
        "the stages differ in their quantized modules, but config.json has one list for all; give the layers of every "
        "stage the same rules in the recipe, or use pp=1"
    )
    return [(f"pp={options.pp}", why)]


TARGET = Trtllm()
