"""Where a model comes from: opens anything a user may call a model as a `Source`; never reads a weight while opening.

A source kind is one file here that has `recognizes` and `open_model` and stands in `KINDS`, or an entry point of the
group `bridge.sources` that names such a module.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from bridge.errors import UsageError
from bridge.paths import check_length
from bridge.remote.address import check_here, is_remote
from bridge.values import LazyTensor, Program, TensorSpec

if TYPE_CHECKING:
    from bridge.quant.calibration import Calibration
    from bridge.sources.quantized import Quantized

# In the order in which they are asked; the last takes every string and path that is left, and says what is wrong.
# By name, because looking into every file here would import what most models do not need: a third of opening one.
KINDS = ("memory", "megatron", "meta", "torchtitan", "hf")


class Source(Protocol):
    """A model at rest, in checkpoint names. Opening one checks everything that headers and config can tell."""

    @property
    def dialect(self) -> str:
        """Which spelling the stored tensors have, `megatron`, say; `specs` has Hugging Face's names whatever it is."""

    @property
    def where(self) -> str:
        """What the user calls it, for messages and the report: a path, a hub id, a class name."""

    @property
    def name(self) -> str:
        """A short name that can be part of a file name."""

    @property
    def can_run(self) -> bool:
        """Whether `load_model` has what it needs here, without trying."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The content of config.json; `architectures` is there."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """Every tensor, sorted naturally (`layers.2` before `layers.10`)."""

    @property
    def side_files(self) -> Mapping[str, Path | bytes]:
        """Relative name -> file to copy, or its content: everything except weights and their index."""

    @property
    def dropped(self) -> Mapping[str, str]:
        """File or tensor alias that is there and will not be carried -> why."""

    def read(self, name: str) -> np.ndarray:
        """Return the storage array of one tensor; it may be read-only."""

    def read_rows(self, name: str, begin: int, end: int, out: np.ndarray | None = None) -> np.ndarray:
        """Return rows `begin` to `end` of the first axis: in `out`, which is C-contiguous, or where they lie anyway."""

    def place(self, name: str) -> tuple[str, int]:
        """File and offset of a tensor, so that reading follows the file; ("", 0) where there is none."""

    @property
    def quantized(self) -> Quantized | None:
        """What the checkpoint holds in place of its weights, where it is quantized already."""

    @property
    def calibration(self) -> Calibration | None:
        """What the model's quantizers saw where it was trained, if the checkpoint says."""

    @property
    def fingerprint(self) -> str:
        """A digest that changes when the weights do, so that a resumed run notices another model."""

    def load_model(self) -> Any:
        """Return the `transformers` model, for calibration and verification; in memory it is the caller's own."""

    def load_tokenizer(self) -> Any:
        """Return the tokenizer; SourceError where there is none."""


class SourceKind(Protocol):
    """What a module of this package (or of an entry point) offers to be asked by `open_source`."""

    WRITTEN_BY: tuple[Program, ...]
    """Whose models of which versions are read, and how that is known."""

    def recognizes(self, model: object) -> bool:
        """Tell whether `model` is of this kind, from its type or the names in its directory."""

    def open_model(self, model: Any, config: Any, tokenizer: Any) -> Source:
        """Open it, or raise one SourceError with everything that is wrong with it."""


def open_source(model: Any, config: Any = None, tokenizer: Any = None) -> Source:
    """Open a `transformers` model in memory, a directory, a .nemo, a hub id (`org/name@revision`), or a Source.

    A directory may lie at s3://, gs://, https:// or hf://: it is read there, by byte range.

    `config`: a dict whose entries replace those of config.json, a config object, or a path to a JSON file.
    `tokenizer`: an object, or a directory or hub id to load it from instead of the model's own.

    >>> source = open_source("examples/models/tiny-llama")
    >>> source.dialect, source.specs["model.norm.weight"].shape
    ('hf', (128,))
    """
    if all(hasattr(type(model), name) for name in ("read", "load_model", "load_tokenizer")):
        if config is not None or tokenizer is not None:
            raise UsageError("config= and tokenizer= go to the source itself when `model` is a Source already")
        return cast(Source, model)
    if isinstance(model, str) and not model.strip():
        raise UsageError("model is an empty string; give a directory or a hub id")
    check_length(model)
    check_here(config=config, tokenizer=tokenizer)
    for kind in _entered():
        if kind.recognizes(model):
            return kind.open_model(model, config, tokenizer)
    if is_remote(model):
        from bridge.remote.opening import open_remote

        model = open_remote(model)
    for kind in _built_in():
        if kind.recognizes(model):
            return kind.open_model(model, config, tokenizer)
    raise UsageError(
        f"cannot take a model from {type(model).__name__}; give a transformers model, a directory or a hub id"
    )


def lazy(source: Source, name: str) -> LazyTensor:
    """Return one tensor of `source` that is read when asked for, and then held to its spec."""
    return LazyTensor(source.specs[name], lambda: source.read(name))


def _entered() -> Iterator[SourceKind]:
    """Yield entry points, which come first, so that they can take what the built-in kinds would."""
    for entry in sorted(entry_points(group="bridge.sources"), key=lambda entry: entry.name):
        yield cast(SourceKind, entry.load())


def _built_in() -> Iterator[SourceKind]:
    for name in KINDS:
        yield cast(SourceKind, importlib.import_module(f"{__name__}.{name}"))
