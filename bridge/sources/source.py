"""The Protocols of a source and of a kind of sources."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

from bridge.core.values import LazyTensor, Program, TensorSpec

if TYPE_CHECKING:
    import numpy as np

    from bridge.quant.calibration import Calibration
    from bridge.sources.adapted.kept import KeptSource
    from bridge.sources.adapted.source import AdaptedSource
    from bridge.sources.pruned.source import PrunedSource
    from bridge.sources.quantized.checkpoint import Quantized


class Source(Protocol):
    """A stored model, in checkpoint names. Opening one checks everything that headers and config can tell."""

    @property
    def dialect(self) -> str:
        """Whose names the stored tensors have, for example `megatron`; `specs` always has Hugging Face's names."""

    @property
    def where(self) -> str:
        """The user's name for it, in messages and the report: a path, a hub id, a class name."""

    @property
    def name(self) -> str:
        """A short name that can be part of a file name."""

    @property
    def can_run(self) -> bool:
        """Whether the packages that `load_model` needs are installed; imports none of them."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json, with `architectures`."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor, sorted naturally (`layers.2` before `layers.10`)."""

    @property
    def side_files(self) -> Mapping[str, Path | bytes]:
        """Relative name -> file to copy, or its content: all but weights and their index."""

    @property
    def dropped(self) -> Mapping[str, str]:
        """File or tensor alias of the source that is not copied -> why."""

    def read(self, name: str) -> np.ndarray:
        """Return the storage array of one tensor; it may be read-only."""

    def read_rows(self, name: str, begin: int, end: int, out: np.ndarray | None = None) -> np.ndarray:
        """Return rows `begin` to `end` of the first axis: in `out`, which is C-contiguous, or in place."""

    def place(self, name: str) -> tuple[str, int]:
        """File and offset of a tensor, so that reading follows the file; ("", 0) without a file."""

    @property
    def quantized(self) -> Quantized | None:
        """The stored codes and scales of a checkpoint that is quantized already."""

    @property
    def calibration(self) -> Calibration | None:
        """The statistics of the model's quantizers, if the checkpoint has them."""

    @property
    def fingerprint(self) -> str:
        """A digest that changes with the weights, so that a resumed run notices another model."""

    def load_model(self) -> Any:
        """Return the `transformers` model, for calibration and verification; in memory it is the caller's own."""

    def load_skeleton(self) -> Any:
        """Return a copy of that model with its parameters on the meta device, and its buffers in memory."""

    def load_tokenizer(self) -> Any:
        """Return the tokenizer; SourceError without one."""


class SourceKind(Protocol):
    """What a module of this package (or of an entry point) offers to `open_source`."""

    WRITTEN_BY: tuple[Program, ...]
    """Programs and versions whose models are read, and the proof."""

    def recognizes(self, model: object) -> bool:
        """Whether `model` is of this kind, by its type or the names in its directory."""

    def open_model(self, model: Any, config: Any, tokenizer: Any) -> Source:
        """Open it, or raise one SourceError with all its problems."""


def is_pruned(source: Source) -> TypeGuard[PrunedSource]:
    """Whether it is a `PrunedSource`; imports none of its modules, which most conversions do not need."""
    return hasattr(source, "kept")


def is_adapted(source: Source) -> TypeGuard[AdaptedSource | KeptSource]:
    """Whether it has an adapter, merged or kept; imports none of its modules."""
    return hasattr(source, "adapter")


def merge_memory(source: Source) -> int:
    """Bytes that merging an adapter takes beside what is read; 0 without one."""
    return int(getattr(source, "merge_memory", 0))


def lazy(source: Source, name: str) -> LazyTensor:
    """Return one tensor of `source` that is read on request and then checked against its spec."""
    return LazyTensor(source.specs[name], lambda: source.read(name))
