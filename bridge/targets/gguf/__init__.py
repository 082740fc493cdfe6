"""Target `gguf`: the file that llama.cpp loads.

Names and layouts are rows of `mappings/dialects/gguf.toml`; what llama.cpp's graphs fix, of
`mappings/runtimes/llama.cpp.toml`.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.core.errors import PlanError, SourceError
from bridge.core.text import nearest
from bridge.core.values import Format, Numeric, Program, Site, Structure, TensorSpec
from bridge.planning.drafts import promised, without_promise
from bridge.planning.plan import PASSTHROUGH, Plan
from bridge.planning.target import Draft, Drafted
from bridge.quant.codec.ggml_library import INSTALL, is_installed
from bridge.quant.schemes.catalog import RULE
from bridge.targets.checkpoint import StreamedTarget, float_dtype, option, write_checkpoint
from bridge.targets.config_json import config_json, generation_problems
from bridge.targets.gguf.encodings import block_type, file_number, why_unsupported
from bridge.targets.gguf.file_types import FILE_TYPES, file_type_of

if TYPE_CHECKING:
    from bridge.quant.schemes.scheme import Scheme
    from bridge.sources.source import Source
    from bridge.streaming.context import ConversionContext, WriteResult
    from bridge.targets.generation import Generator

QUANTIZATION_VERSION = 2  # of ggml's block types
OUTER = ("token_embd.", "output.")  # llama-quantize gives them types of their own
VOCABULARY = ("keep", "quantize")
LATENT_KEYS = "mla.k_b.weight"


@dataclass(frozen=True)
class GgufOptions:
    """Options of target `gguf`."""

    dtype: str | None = option(None, "fp16, bf16, fp32 of float matrices; default: source's")
    drafts: str | None = option(None, "draft layers (MTP): keep, quantize, drop; default: keep if llama.cpp reads them")
    vocabulary: str | None = option(
        None, "embedding and head: keep, or quantize as llama-quantize does; default: quantize in q4_k_m and its like"
    )


class Gguf(StreamedTarget):
    """See `bridge.targets.Target`."""

    name = "gguf"
    writes = ("model.gguf",)
    loads = writes
    align = 32
    Options = GgufOptions
    loaded_by = (
        Program(
            "llama.cpp",
            "of xllamacpp 2026.10 (CPU)",
            "loads every architecture, and its log probabilities are those of the written weights; tokens are those "
            "of the model's tokenizer",
            ("tests/targets/gguf/test_llama_cpp.py", "tests/targets/gguf/test_gguf.py"),
        ),
    )

    def resolve(
        self, options: GgufOptions, structure: Structure, scheme: Scheme | None, specs: Mapping[str, TensorSpec]
    ) -> GgufOptions:
        from bridge.tables.dialects.dialect import load_dialect
        from bridge.tables.llama_cpp import graphs
        from bridge.targets.dialect_steps import ANY_CLASS, chosen_drafts

        dialect = load_dialect(self.name)
        if structure.architecture not in dialect.architectures:
            graph = graphs().get(structure.architecture)
            why = graph.refused if graph else nearest(structure.architecture, dialect.architectures)
            raise PlanError(f"{dialect.file.name} has no layout for {structure.architecture}: {why}; {ANY_CLASS}")
        place = bool(dialect.draft_rows(structure.architecture))
        name = f"llama.cpp's {graphs()[structure.architecture].name}"
        drafts = chosen_drafts(options.drafts, scheme, "" if place else f"{name} has no place for draft layers")
        dtype = float_dtype(options.dtype, specs, "that GGUF has")
        vocabulary = options.vocabulary or ("quantize" if scheme and scheme.file_type else "keep")
        if problem := _vocabulary_problem(vocabulary, scheme):
            raise PlanError(problem)
        return dataclasses.replace(options, dtype=dtype, drafts=drafts, vocabulary=vocabulary)

    def why_unsupported(self, format_: Format, options: GgufOptions) -> str:
        return why_unsupported(format_)

    def why_kv_unsupported(self, kv: Numeric, structure: Structure, options: GgufOptions) -> str:
        return "llama.cpp chooses the type of its cache when it runs (--cache-type-k, --cache-type-v); leave out kv"

    def why_kept(self, format_: Format, site: Site) -> str:
        if LATENT_KEYS in site.roles:
            return "latent keys and values: llama.cpp has them by head, and the keys turned"
        return "convolution: ggml's blocks are of matrices" if site.layout == "conv" else ""

    def draft(self, draft: Draft) -> Drafted:
        from bridge.tables.architectures.structure import match_table
        from bridge.tables.dialects.dialect import load_dialect
        from bridge.targets.dialect_steps import with_drafts
        from bridge.targets.gguf.metadata import malformed, problems, window_notes
        from bridge.targets.gguf.steps import Drafting
        from bridge.targets.gguf.tokenizer import describe, tokenizer_memory

        matched, dialect = match_table(draft.config, draft.specs), load_dialect(self.name)
        drafted = Drafting(draft, dialect, *with_drafts(draft, dialect, matched)).drafted()
        wrong = malformed(matched)
        drafted.problems = [*dict.fromkeys([*drafted.problems, *(("config.json", text) for text in wrong)])]
        if not wrong:
            drafted.problems += [("", text) for text in problems(matched)]
            drafted.notes += window_notes(matched)
        vocab = int(str(matched.names["vocab"]))
        tokenizer = describe(draft.side_files, vocab, draft.config)
        drafted.memory = tokenizer_memory(draft.side_files, vocab)
        drafted.problems += [*tokenizer.problems, *generation_problems(draft.side_files)]
        drafted.notes += tokenizer.notes
        return drafted

    def notes(self, structure: Structure, options: GgufOptions) -> tuple[str, ...]:
        return ("norms and biases are float32, as llama.cpp computes them",)

    def file_metadata(self, plan: Plan, source: Source) -> Mapping[str, Any]:
        from bridge.core.formats.gguf import u32
        from bridge.tables.architectures.structure import match_table
        from bridge.tables.llama_cpp import graphs
        from bridge.targets.gguf.metadata import NEXTN, hyperparameters
        from bridge.targets.gguf.tokenizer import describe

        matched = match_table(source.config, source.specs)
        vocab = int(str(matched.names["vocab"]))
        tokens = describe(source.side_files, vocab, source.config).keys
        return {
            "general.architecture": graphs()[plan.architecture].name,
            "general.type": "model",
            **({} if _misread(source.name, tokens) else {"general.name": source.name}),
            "general.quantization_version": u32(QUANTIZATION_VERSION),
            "general.alignment": u32(self.align),
            "general.file_type": u32(_file_type(plan)),
            **hyperparameters(matched, sum(NEXTN in output.spec.name for output in plan.outputs)),
            **tokens,
        }

    def why_not_loaded(self, plan: Plan) -> str:
        from bridge.targets.gguf.tokenizer import NO_TOKENS

        return NO_TOKENS if NO_TOKENS in plan.notes else ""

    def next_command(self, plan: Plan) -> str:
        return "" if self.why_not_loaded(plan) else "llama-server -m {out}/model.gguf"

    def lint(self, directory: Path, plan: Plan) -> list[str]:
        from bridge.targets.gguf.lint import lint

        return lint(directory / "model.gguf")

    def changed(self, directory: Path, plan: Plan, source: Source) -> list[str]:
        """What of the file's header is not what was written for this source."""
        from bridge.targets.gguf.lint import changed_keys

        return changed_keys(directory / "model.gguf", self.file_metadata(plan, source))

    def runtime(self, directory: Path) -> Any:
        from bridge.targets.gguf.runtime import Runtime

        return Runtime(directory / "model.gguf")

    def why_no_generator(self, directory: Path) -> str:
        from bridge.core.formats.gguf import GgufFile
        from bridge.targets.gguf.tokenizer import NO_TOKENS

        try:
            metadata = GgufFile(directory / "model.gguf").metadata
        except (SourceError, OSError):
            return ""  # told by what reads it
        return NO_TOKENS if metadata.get("tokenizer.ggml.model") == "no_vocab" else ""

    def generator(self, directory: Path) -> Generator:
        from bridge.targets.gguf import runtime

        return runtime.Generator(directory / "model.gguf")

    def write(self, context: ConversionContext, directory: Path) -> WriteResult:
        from bridge.targets.gguf.metadata import NEXTN

        plan, config = context.plan, context.source.config
        dropped = promised(config) and not any(NEXTN in output.spec.name for output in plan.outputs)
        changed = dropped and "config.json" in plan.side_files
        files = {"config.json": config_json(without_promise(config, ()), None, False)} if changed else {}
        return write_checkpoint(context, directory, files)


def _vocabulary_problem(choice: str, scheme: Scheme | None) -> str:
    """Why the option `vocabulary` or a scheme's file type cannot be followed; "" if both can."""
    if scheme and scheme.file_type and file_type_of(scheme.file_type) != scheme.file_type:
        return f"{scheme.origin}: file_type = {scheme.file_type!r}; {nearest(scheme.file_type, FILE_TYPES)}"
    where = f"vocabulary={choice!r} (--vocabulary {choice})"
    if choice not in VOCABULARY:
        return f"{where}: use {' or '.join(VOCABULARY)}"
    if choice == "keep":
        return ""
    if scheme is None or scheme.name == PASSTHROUGH:
        return f"{where} takes the types that llama-quantize has for a scheme, and none was asked for; give quant"
    return "" if is_installed() else f"{where}: {INSTALL}"


def _misread(name: str, tokens: Mapping[str, Any]) -> bool:
    """Whether llama.cpp would take the model for another by its name, and ask for tokens that it has not."""
    from bridge.tables.llama_cpp import token_rows

    listed = tokens.get("tokenizer.ggml.tokens")
    known = set(listed.value) if listed else set()
    required = token_rows("required")
    return any(word in name.lower() and not known.issuperset(required[word]) for word in required)


def _file_type(plan: Plan) -> int:
    """llama.cpp's number of the file type, or of the dtype of most quantized values, of most if none are quantized."""
    if named := file_type_of(plan.scheme.partition(RULE)[0]):
        return file_number(named)
    sizes: Counter[str] = Counter()
    layers = [step for step in plan.quantized if not step.outputs[0].spec.name.startswith(OUTER)]
    for step in layers or plan.steps:
        kind = block_type(step.format) if step.format else step.outputs[0].spec.dtype
        sizes[kind] += step.outputs[0].spec.size
    return file_number(max(sizes, key=lambda kind: sizes[kind]))


TARGET = Gguf()
