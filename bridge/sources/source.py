"""The Protocols of sources and their kinds; what most sources share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from bridge.core.values import LazyTensor, Program, TensorSpec

if TYPE_CHECKING:
    import numpy as np

    from bridge.core.files.span import Extent
    from bridge.quant.calibration import Calibration
    from bridge.sources.adapted.adapter import Adapter
    from bridge.sources.live_models.distillation import Distillation
    from bridge.sources.pruned.kept import Kept
    from bridge.sources.pruned.sparse import Sparse
    from bridge.sources.pruned.summary import Pruning
    from bridge.sources.quantized.checkpoint import Quantized


class Source(Protocol):
    """A stored model, in checkpoint names. Opening one checks everything that headers and config can tell.

    The members from `root` on are not for every source. `SourceBase` has their defaults, which opening also gives to a
    source that has only the members before.
    """

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
        """Return the tokenizer, the same object each time; SourceError without one. Do not change it."""

    @property
    def root(self) -> Path | None:
        """The directory or file that is read, local or remote; None without one. An output never replaces it."""

    @property
    def folder(self) -> str:
        """The part of a diffusion pipeline that the tensors are of, for example `transformer`; "" for other models."""

    @property
    def runs_in(self) -> str:
        """The dtype that `load_model` casts to, for example `float32`; "" for that of the stored weights."""

    @property
    def merge_memory(self) -> int:
        """Bytes that merging an adapter takes on top of what is read; 0 without an adapter."""

    @property
    def kept(self) -> Kept | None:
        """The sizes and parts that a pruned model keeps; None for a whole one."""

    @property
    def sparse(self) -> Sparse | None:
        """The tensors that get 2:4 zeros; None without any."""

    @property
    def adapter(self) -> Adapter | None:
        """The LoRA adapter that is merged while reading, or is copied; None without one."""

    @property
    def adapter_is_copied(self) -> bool:
        """Whether the output has the adapter as files of its own, which a server must be asked to load."""

    @property
    def note(self) -> str:
        """What a plan says about the adapter; "" without one."""

    @property
    def summary(self) -> Pruning | None:
        """What a report says about the pruning; None for a whole model."""

    @property
    def distillation(self) -> Distillation | None:
        """What a report says about the distillation; None for a model that was not distilled."""

    @property
    def rotation(self) -> str:
        """The rotation that is folded into the weights, `hadamard`; "" without one."""

    def served(self, command: str) -> str:
        """Return the command of a server with the options that load the adapter; "" if the server is unknown."""

    def extent(self, name: str) -> Extent | None:
        """The bytes of a tensor that a file holds as it is, for who reads parts of rows; None of any other."""


class SourceKind(Protocol):
    """What a module of this package (or of an entry point) offers to `open_source`."""

    WRITTEN_BY: tuple[Program, ...]
    """Programs and versions whose models are read, and the proof."""

    def recognizes(self, model: object) -> bool:
        """Whether `model` is of this kind, by its type or the names in its directory."""

    def open_model(self, model: Any, config: Any, tokenizer: Any) -> Source:
        """Open it, or raise one SourceError with all its problems."""


class SourceBase:
    """Defaults for the members that only some sources have; a source that derives from it need not name them."""

    root: Path | None = None
    folder: str = ""
    runs_in: str = ""
    quantized: Quantized | None = None
    calibration: Calibration | None = None
    kept: Kept | None = None
    sparse: Sparse | None = None
    adapter: Adapter | None = None
    adapter_is_copied: bool = False
    distillation: Distillation | None = None
    rotation: str = ""

    @property
    def merge_memory(self) -> int:
        return 0

    @property
    def note(self) -> str:
        return ""

    @property
    def summary(self) -> Pruning | None:
        return None

    def served(self, command: str) -> str:
        return command

    def extent(self, name: str) -> Extent | None:
        return None


class Wrapped(SourceBase):
    """A source that reads another one, `base`: the same names, configuration, files and model, unless it has others."""

    def __init__(self, base: Source) -> None:
        self.base = base
        self.dialect, self.can_run, self.where, self.name = base.dialect, base.can_run, base.where, base.name
        self.config: Mapping[str, Any] = base.config
        self.specs: Mapping[str, TensorSpec] = base.specs
        self.dropped: Mapping[str, str] = base.dropped
        self.root = base.root

    @property
    def side_files(self) -> Mapping[str, Path | bytes]:
        return self.base.side_files

    @property
    def fingerprint(self) -> str:
        return self.base.fingerprint

    def read(self, name: str) -> np.ndarray:
        return self.base.read(name)

    def read_rows(self, name: str, begin: int, end: int, out: np.ndarray | None = None) -> np.ndarray:
        return self.base.read_rows(name, begin, end, out)

    def place(self, name: str) -> tuple[str, int]:
        return self.base.place(name)

    def load_model(self) -> Any:
        return self.base.load_model()

    def load_skeleton(self) -> Any:
        return self.base.load_skeleton()

    def load_tokenizer(self) -> Any:
        return self.base.load_tokenizer()


class Delegate:
    """A source that is another one in everything but the members that a subclass defines."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # of copy and pickle, which ask before `_source` is there
            raise AttributeError(name)
        return getattr(self._source, name)


_DEFAULTS = SourceBase()
_OPTIONAL = [name for name in vars(SourceBase) if not name.startswith("_")]


class _Completed(Delegate):
    """A source of somebody else's, with the defaults of those members of `SourceBase` that it lacks."""

    def __getattr__(self, name: str) -> Any:
        missing = name in _OPTIONAL and not _has(self._source, name)
        return getattr(_DEFAULTS, name) if missing else super().__getattr__(name)


def _has(source: Any, name: str) -> bool:
    """Whether a source has an optional member of its own; one that derives from the protocol inherits empty bodies."""
    inherited = getattr(type(source), name, None)
    return hasattr(source, name) if inherited is None else inherited is not vars(Source).get(name)


def is_source(model: object) -> bool:
    """Whether `model` is a source, and no model to open."""
    needed = ("read", "load_model", "load_tokenizer")
    return isinstance(model, Delegate) or all(hasattr(type(model), name) for name in needed)


def completed(source: Any) -> Source:
    """Return `source`, with the defaults of `SourceBase` if it implements only what every source must have."""
    whole = isinstance(source, SourceBase | Delegate) or all(_has(source, name) for name in _OPTIONAL)
    return cast("Source", source if whole else _Completed(source))


def lazy(source: Source, name: str) -> LazyTensor:
    """Return one tensor of `source` that is read on request and then checked against its spec."""
    return LazyTensor(source.specs[name], lambda: source.read(name))
