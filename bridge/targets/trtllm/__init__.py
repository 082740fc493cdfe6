"""Target `trtllm`: the checkpoint that TensorRT-LLM up to 1.2 builds engines from, cut for its ranks.

Layouts are rows of `mappings/dialects/trtllm.toml`; nothing here knows an architecture.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.dtypes import SHORT, dtype
from bridge.errors import CannotRun, PlanError, UsageError, nearest
from bridge.planning import Draft, Drafted, Plan
from bridge.targets._streamed import Streamed, main_dtype, write
from bridge.values import Format, Numeric, Program, Site, Structure, TensorSpec

if TYPE_CHECKING:
    from bridge.conversion import Conversion, Written
    from bridge.quant.scheme import Scheme
    from bridge.tables.dialect import Dialect

HALVES = ("bfloat16", "float16")  # what TensorRT-LLM's plugins compute in
# What ModelOpt calls them in config.json, but TensorRT-LLM's list of algorithms up to 1.2 does not have.
UNKNOWN = ("fp8_pb_wo", "W4A16_NVFP4", "MXFP8")


@dataclass(frozen=True)
class TrtllmOptions:
    """Options of target `trtllm`."""

    tp: int = field(default=1, metadata={"help": "ranks that share every layer (tensor parallelism)"})
    pp: int = field(default=1, metadata={"help": "stages that share the layers (pipeline parallelism)"})
    dtype: str | None = field(
        default=None, metadata={"help": "fp16 or bf16 for what stays unquantized; default: the source's, or fp16"}
    )


class Trtllm(Streamed):
    """See `bridge.targets.Target`."""

    name = "trtllm"
    writes = ("config.json", "quant_cfg.json", "rank*.safetensors")
    loads = writes
    metadata: Mapping[str, str] = {}
    Options = TrtllmOptions
    loaded_by = (
        Program(
            "TensorRT-LLM (engine builder)",
            "up to 1.2, the last with a TensorRT backend",
            "every rank's file and config.json equal what `export_tensorrt_llm_checkpoint` of ModelOpt 0.47 writes, "
            "byte for byte; the engine builder needs a GPU and was not run",
            ("tests/targets/test_trtllm_parity.py", "tests/targets/test_trtllm.py"),
        ),
    )

    def resolve(
        self, options: TrtllmOptions, structure: Structure, scheme: Scheme | None, specs: Mapping[str, TensorSpec]
    ) -> TrtllmOptions:
        from bridge.tables.dialect import load_dialect

        known = load_dialect(self.name).architectures
        if structure.architecture not in known:
            raise PlanError(
                f"TensorRT-LLM's checkpoint up to 1.2 has no layout for {structure.architecture} that bridge knows; "
                f"{nearest(structure.architecture, known)}\n"
                "  hint   target hf: TensorRT-LLM loads unified Hugging Face checkpoints through its PyTorch backend"
            )
        for name in ("tp", "pp"):
            value = getattr(options, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UsageError(f"{name}={value!r} must be a whole number of ranks, at least 1")
        most = main_dtype(specs)
        chosen = options.dtype or (most if most in HALVES else "float16")
        chosen = SHORT.get(chosen, chosen)
        if chosen not in HALVES:
            raise UsageError(
                f"dtype {options.dtype!r} cannot be the checkpoint's; {nearest(chosen, [*HALVES, *SHORT])}"
            )
        return dataclasses.replace(options, dtype=dtype(chosen).name)

    def refuse(self, format_: Format, options: TrtllmOptions) -> str:
        from bridge.trtllm.companions import refuse

        return refuse(format_, options.tp)

    def refuse_kv(self, kv: Numeric, structure: Structure, options: TrtllmOptions) -> str:
        if kv.dynamic or kv.per != "tensor":
            return f"{kv.dtype} has a scale a block, and ranks hold one scale a layer; use kv='fp8' or 'int8'"
        return ""

    def keeps(self, format_: Format, site: Site) -> str:
        return ""

    def draft(self, draft: Draft) -> Drafted:
        from bridge.tables.dialect import load_dialect
        from bridge.tables.structure import match_table
        from bridge.trtllm import config
        from bridge.trtllm.ranks import Ranks, vocab_multiple

        matched, dialect = match_table(draft.config, draft.specs), load_dialect(self.name)
        config.shape(draft.config, matched, vocab_multiple(draft.quantized.values()))
        drafted = Ranks(draft, dialect, matched).draft()
        drafted.problems += _uneven(drafted, draft.options, dialect)
        return drafted

    def notes(self, structure: Structure, options: TrtllmOptions) -> tuple[str, ...]:
        return ("for TensorRT-LLM up to 1.2, whose engine builder reads it; later versions load what target hf writes",)

    def lint(self, directory: Path, plan: Plan) -> list[str]:
        from bridge.trtllm.lint import lint

        return lint(directory)

    def runtime(self, directory: Path) -> Any:
        raise CannotRun("TensorRT-LLM's engine builder needs a GPU")

    def write(self, conversion: Conversion, directory: Path) -> Written:
        from bridge.tables.dialect import load_dialect
        from bridge.tables.structure import match_table
        from bridge.trtllm import config

        plan, source = conversion.plan, conversion.source
        matched = match_table(source.config, source.specs)
        found = config.files(plan, source.config, matched, load_dialect(self.name))
        written = write(conversion, directory, found)
        algorithm = json.loads(found["config.json"])["quantization"]["quant_algo"]
        unknown = f"quant_algo {algorithm} is ModelOpt's word; TensorRT-LLM up to 1.2 does not list it"
        return dataclasses.replace(written, notes=written.notes + ((unknown,) if algorithm in UNKNOWN else ()))


def _uneven(drafted: Drafted, options: TrtllmOptions, dialect: Dialect) -> list[tuple[str, str]]:
    """Stages that differ in what is quantized: config.json has one list, in which layers count inside their stage."""
    stages: dict[int, set[tuple[str, Format | None]]] = {}
    for step in drafted.steps:
        for output in step.outputs:
            if step.site and output.part == "weight" and output.spec.name.startswith(dialect.cache.split("{l}")[0]):
                rank = int(output.file.removeprefix("rank").removesuffix(".safetensors"))
                stages.setdefault(rank // options.tp, set()).add((output.spec.name, step.format))
    if len({frozenset(found) for found in stages.values()}) < 2:
        return []
    why = (
        "the stages differ in what is quantized, and config.json has one list for all; let the recipe treat the layers "
        "of every stage alike, or use pp=1"
    )
    return [(f"pp={options.pp}", why)]


TARGET = Trtllm()
