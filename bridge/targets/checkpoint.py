"""Base class and write function of targets that stream tensors into files."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from bridge.core.dtypes import FLOATS, SHORT, dtype_word
from bridge.core.errors import CannotRun, UsageError
from bridge.core.values import Format, Site, TensorSpec, main_dtype
from bridge.planning.plan import STACKED

if TYPE_CHECKING:
    import numpy as np

    from bridge.planning.plan import Plan
    from bridge.sources.source import Source
    from bridge.streaming.context import ConversionContext, WriteResult
    from bridge.targets.generation import Generator

T = TypeVar("T")


def option(default: T, text: str, words: tuple[str, ...] = ()) -> T:
    """A field of a target's options, with the help text of its flag, and its `words` where these are all it takes."""
    return field(default=default, metadata={"help": text, "words": words})


class StreamedTarget:
    """Defaults of targets whose output `convert` does not run; see `bridge.targets.Target`."""

    name: str
    metadata: Mapping[str, str] = {}
    align = 8  # as the safetensors library writes
    runs = False
    base_memory = 48 << 20  # the interpreter and NumPy

    def why_kept(self, format_: Format, site: Site) -> str:
        return ""

    def why_stack_unsupported(self, format_: Format, site: Site, options: Any) -> str:
        return STACKED

    def file_metadata(self, plan: Plan, source: Source) -> Mapping[str, Any]:
        return self.metadata

    def audit(self, directory: Path) -> list[str]:
        return []

    def why_no_generator(self, directory: Path) -> str:
        return f"no program here generates text from an output of target {self.name}; convert to hf or trt"

    def generator(self, directory: Path) -> Generator:
        raise CannotRun(self.why_no_generator(directory))

    def layer_errors(
        self, directory: Path, plan: Plan, source: Source, batch: Mapping[str, np.ndarray], runtime: Any
    ) -> tuple[tuple[str, float], ...]:
        return ()

    def why_not_loaded(self, plan: Plan) -> str:
        return ""

    def next_command(self, plan: Plan) -> str:
        return ""

    def check_machine(self, plan: Plan, memory: int | None) -> None:
        pass


def float_dtype(given: str | None, specs: Mapping[str, TensorSpec], purpose: str) -> str:
    """The dtype of what stays unquantized: `given`, else the source's; UsageError unless models compute in it."""
    word = dtype_word(given) if given else main_dtype(specs.values())
    chosen = SHORT.get(word, word)
    if chosen not in FLOATS:
        raise UsageError(f"dtype {word!r} is not a dtype {purpose}; use fp32, fp16 or bf16")
    return chosen


def check_ranks(**given: object) -> None:
    """UsageError if an option that counts ranks, given by its name, is no whole number of them."""
    for name, value in given.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UsageError(f"{name}={value!r} must be a whole number of ranks, at least 1")


def out_in(spec: TensorSpec, site: Site) -> tuple[int, int]:
    """The extents of a weight, or of each matrix of a stack, in this order whatever its layout."""
    if site.layout in ("out_in", "conv"):
        return spec.shape[0], spec.shape[1]
    return spec.shape[-1], spec.shape[-2]


def write_checkpoint(context: ConversionContext, directory: Path, metadata_files: Mapping[str, bytes]) -> WriteResult:
    """Run the plan into its files, then write `metadata_files`: name -> content."""
    from bridge.streaming.context import WriteResult
    from bridge.streaming.run import run

    summary = run(context, directory, threading.Event())
    for name, content in metadata_files.items():
        (directory / name).write_bytes(content)
    return WriteResult(policies=summary.policies, notes=summary.notes())
