"""Target `hf`: the unified Hugging Face checkpoint that vLLM, SGLang, TensorRT-LLM and transformers load.

Planning is here and reads names and shapes only; how tensors and JSON are spelled is in `bridge.unified`. Tensors keep
the source's names, so an architecture needs no table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.dtypes import FLOATS, dtype
from bridge.errors import UsageError, nearest
from bridge.planning import Draft, Drafted, Plan
from bridge.targets._streamed import Streamed, main_dtype, write
from bridge.unified import SPELLINGS, spelling
from bridge.unified.config import generation_config
from bridge.unified.departures import departures
from bridge.unified.shards import parse_size
from bridge.unified.steps import Drafting
from bridge.values import Format, Numeric, Program, Site, Structure, TensorSpec

if TYPE_CHECKING:
    from bridge.conversion import Conversion, Written
    from bridge.quant.scheme import Scheme

GENERATION = "generation_config.json"


@dataclass(frozen=True)
class HfOptions:
    """Options of target `hf`."""

    format: str = field(default="modelopt", metadata={"help": f"one of {', '.join(SPELLINGS)}"})
    shard_size: str = field(default="10GB", metadata={"help": "bytes of a weight file at most: 300MB, 10GB"})
    dtype: str | None = field(
        default=None,
        metadata={"help": "fp16, bf16 or fp32: weights are rounded to it before they are coded; default: the source's"},
    )


class Hf(Streamed):
    """See `bridge.targets.Target`."""

    name = "hf"
    writes = ("model*.safetensors", "model.safetensors.index.json", "config.json", GENERATION, "hf_quant_config.json")
    loads = ("model*.safetensors", "model.safetensors.index.json", "config.json")
    metadata: Mapping[str, str] = {"format": "pt"}
    Options = HfOptions
    loaded_by = (
        Program(
            "vLLM, SGLang, TensorRT-LLM (PyTorch backend)",
            "those that read the unified checkpoint of ModelOpt 0.47",
            "every file equals the one that ModelOpt's `export_hf_checkpoint` writes, byte for byte, but for a named "
            "list of exceptions; the engines themselves need a GPU and were not run",
            ("tests/targets/test_hf_parity.py", "tests/targets/test_hf.py"),
        ),
        Program(
            "vLLM, transformers (`--format compressed-tensors`)",
            "compressed-tensors 0.20, transformers 5.20 and later",
            "tensors and config equal llm-compressor 0.14's; transformers loads them, and its logits are those of the "
            "written weights; vLLM was not run",
            ("tests/targets/test_compressed.py",),
        ),
    )

    def resolve(
        self, options: HfOptions, structure: Structure, scheme: Scheme | None, specs: Mapping[str, TensorSpec]
    ) -> HfOptions:
        if options.format not in SPELLINGS:
            raise UsageError(f"format {options.format!r} is unknown; {nearest(options.format, SPELLINGS)}")
        parse_size(options.shard_size)
        chosen = dtype(options.dtype).name if options.dtype else main_dtype(specs)
        if chosen not in FLOATS:
            raise UsageError(f"dtype {chosen!r} is none that weights are rounded to; known: fp32, fp16, bf16")
        return dataclasses.replace(options, dtype=chosen)

    def refuse(self, format_: Format, options: HfOptions) -> str:
        return spelling(options.format).refuse(format_)

    def refuse_kv(self, kv: Numeric, structure: Structure, options: HfOptions) -> str:
        if not structure.attention:
            return f"{structure.architecture} has no attention module with a cache"
        return spelling(options.format).refuse_kv(kv)

    def refuse_stack(self, format_: Format, site: Site, options: HfOptions) -> str:
        return spelling(options.format).refuse_stack(format_, site)

    def keeps(self, format_: Format, site: Site) -> str:
        return "convolution: unified checkpoints hold quantized matrices only" if site.layout == "conv" else ""

    def draft(self, draft: Draft) -> Drafted:
        return Drafting(draft, spelling(draft.options.format)).drafted()

    def notes(self, structure: Structure, options: HfOptions) -> tuple[str, ...]:
        if not structure.ungrouped:
            return ()
        return (f"which modules read one input is not known: {structure.ungrouped}; none of them share a scale",)

    def lint(self, directory: Path, plan: Plan) -> list[str]:
        from bridge.unified.lint import lint

        return lint(directory)

    def runtime(self, directory: Path) -> Any:
        from bridge.unified.runtime import Runtime

        return Runtime(directory)

    def write(self, conversion: Conversion, directory: Path) -> Written:
        plan, source = conversion.plan, conversion.source
        beside = spelling(plan.options["format"]).beside(plan, source.config)
        if GENERATION in source.side_files:
            content = source.side_files[GENERATION]
            beside[GENERATION] = generation_config(content if isinstance(content, bytes) else content.read_bytes())
        written = write(conversion, directory, beside)
        return dataclasses.replace(written, notes=(*written.notes, *departures(plan)))


TARGET = Hf()
