"""Target `mlx`: checkpoints that Apple's mlx-lm loads.

Names are rows of `mappings/dialects/mlx.toml`; what mlx-lm's classes fix, of `mappings/runtimes/mlx.toml`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.core.errors import PlanError, UsageError
from bridge.core.text import byte_count, nearest
from bridge.core.values import Format, Numeric, Program, Site, Structure, TensorSpec
from bridge.planning.plan import Plan
from bridge.planning.target import Draft, Drafted
from bridge.targets.checkpoint import StreamedTarget, float_dtype, option, write_checkpoint
from bridge.targets.config_json import generation_problems
from bridge.targets.mlx.layout import why_unsupported

if TYPE_CHECKING:
    from bridge.quant.schemes.scheme import Scheme
    from bridge.streaming.context import ConversionContext, WriteResult
    from bridge.targets.generation import Generator

INDEX = "model.safetensors.index.json"
VOCABULARY = ("keep", "quantize")


@dataclass(frozen=True)
class MlxOptions:
    """Options of target `mlx`."""

    dtype: str | None = option(None, "fp16, bf16, fp32 of float parts; default: source's")
    vocabulary: str = option("quantize", "embedding and head: quantize as mlx_lm.convert does, or keep")
    shard_size: str = option("5GiB", "maximum size of a weight file: 300MB, 5GiB")


class Mlx(StreamedTarget):
    """See `bridge.targets.Target`."""

    name = "mlx"
    writes = ("model*.safetensors", INDEX, "config.json")
    loads = writes
    metadata: Mapping[str, str] = {"format": "mlx"}
    Options = MlxOptions
    loaded_by = (
        Program(
            "mlx-lm",
            "0.32.2 with mlx 0.32.4 (CPU)",
            "loads every architecture and computes the logits of the written weights; tensors of affine schemes equal "
            "those of mlx_lm.convert, byte for byte, except for a named list; its Metal kernels were not run",
            ("tests/targets/mlx/test_mlx.py", "tests/targets/mlx/test_codes.py"),
        ),
    )

    def resolve(
        self, options: MlxOptions, structure: Structure, scheme: Scheme | None, specs: Mapping[str, TensorSpec]
    ) -> MlxOptions:
        from bridge.tables.dialects.dialect import load_dialect
        from bridge.targets.dialect_steps import ANY_CLASS

        dialect = load_dialect(self.name)
        if structure.architecture not in dialect.architectures:
            known = nearest(structure.architecture, dialect.architectures)
            raise PlanError(f"{dialect.file.name} has no layout for {structure.architecture}: {known}; {ANY_CLASS}")
        if options.vocabulary not in VOCABULARY:
            raise UsageError(f"vocabulary={options.vocabulary!r} (--vocabulary): use {' or '.join(VOCABULARY)}")
        byte_count(options.shard_size, "shard_size")
        return dataclasses.replace(options, dtype=float_dtype(options.dtype, specs, "that MLX computes in"))

    def why_unsupported(self, format_: Format, options: MlxOptions) -> str:
        return why_unsupported(format_)

    def why_kv_unsupported(self, kv: Numeric, structure: Structure, options: MlxOptions) -> str:
        return "mlx-lm chooses the bits of its cache when it runs (--kv-bits); leave out kv"

    def why_kept(self, format_: Format, site: Site) -> str:
        return "convolution: MLX's groups are of matrices" if site.layout == "conv" else ""

    def draft(self, draft: Draft) -> Drafted:
        from bridge.tables.architectures.structure import match_table
        from bridge.tables.dialects.dialect import load_dialect
        from bridge.targets.mlx.config import problems, window_notes
        from bridge.targets.mlx.steps import Drafting

        matched = match_table(draft.config, draft.specs)
        drafted = Drafting(draft, load_dialect(self.name), matched).drafted()
        if not drafted.problems:
            drafted.problems += [("", text) for text in problems(matched)]
            drafted.notes += window_notes(matched)
        drafted.problems += generation_problems(draft.side_files)
        return drafted

    def notes(self, structure: Structure, options: MlxOptions) -> tuple[str, ...]:
        return ()

    def next_command(self, plan: Plan) -> str:
        return "mlx_lm.generate --model {out} --prompt 'The sun is'"

    def lint(self, directory: Path, plan: Plan) -> list[str]:
        from bridge.targets.mlx.lint import lint

        return lint(directory)

    def runtime(self, directory: Path) -> Any:
        from bridge.targets.mlx.runtime import Runtime

        return Runtime(directory)

    def why_no_generator(self, directory: Path) -> str:
        return ""

    def generator(self, directory: Path) -> Generator:
        from bridge.targets.mlx import runtime

        return runtime.Generator(directory)

    def write(self, context: ConversionContext, directory: Path) -> WriteResult:
        from bridge.targets.mlx.config import config_file

        plan, source = context.plan, context.source
        files = {"config.json": config_file(plan, source), INDEX: _index(plan)}
        return write_checkpoint(context, directory, files)


def _index(plan: Plan) -> bytes:
    """The index as mlx_lm writes it, also of one file; parameters are counted as they were before they were coded."""
    total = sum(spec.nbytes for specs in plan.files.values() for spec in specs)
    count = 0
    for step in plan.steps:
        weight = step.outputs[0].spec
        count += weight.size * 32 // step_bits(step) if step.format else weight.size
    names = {spec.name: file for file, specs in plan.files.items() for spec in specs}
    content = {"metadata": {"total_size": total, "total_parameters": count}, "weight_map": dict(sorted(names.items()))}
    return json.dumps(content, indent=4).encode()


def step_bits(step: Any) -> int:
    """Bits of a code of a quantized step."""
    from bridge.core.values import code_bits

    return code_bits(step.format.weight[0].dtype)


TARGET = Mlx()
