"""A Hugging Face checkpoint as a Source."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.core.errors import SourceError
from bridge.core.formats.weight_file import WeightFile
from bridge.core.output.names import GENERATION
from bridge.core.remote.path import remote
from bridge.core.values import TensorSpec
from bridge.sources.config_json import config_file
from bridge.sources.configs.diffusion import config_text, is_diffusion, without_architecture
from bridge.sources.configs.tokenizer_files import given_files
from bridge.sources.live_models import loading
from bridge.sources.quantized.fields import MODELOPT_FILE
from bridge.sources.side_files import OWN_TOKENIZER, SideFiles, pipeline_side_files, plain_side_files
from bridge.sources.source import Source, SourceBase
from bridge.sources.weights.shards import Weights
from bridge.tables.model_types import names_with

if TYPE_CHECKING:
    import numpy as np

    from bridge.core.files.span import Extent
    from bridge.quant.calibration import Calibration
    from bridge.sources.quantized.checkpoint import Quantized
    from bridge.sources.quantized.megatron import Statistics

PLAIN = {"config.json", GENERATION}  # beside the weights; without more, transformers is imported only to fail


class HfSource(SourceBase):
    """A directory with config.json and weights in the layout of `save_pretrained` or the hub.

    A checkpoint of another dialect is one too, with its tensors under these names; it gives its own `side_files`.
    `folder`: the part of a pipeline that the tensors are of; all other files of the pipeline are then side files.
    """

    def __init__(
        self,
        root: Path,
        where: str,
        config: dict[str, Any],
        weights: Weights,
        tokenizer: Any = None,
        quantized: Quantized | None = None,
        side_files: SideFiles | None = None,
        folder: str = "",
    ) -> None:
        self.root: Path = root
        self.folder = folder
        self.where = where
        here = Path(where)
        self.name = (here.resolve().name if here.exists() else where.split("/")[-1]).split("@")[0].removesuffix(".nemo")
        self.config: Mapping[str, Any] = config
        self.specs: Mapping[str, TensorSpec] = weights.specs
        self.dialect = weights.dialect
        self._weights = weights
        self._tokenizer = tokenizer
        self.quantized = quantized
        self.statistics: Statistics | None = None  # of ModelOpt's quantizers, which a foreign checkpoint may have
        self._foreign = side_files is not None
        copied = side_files or (pipeline_side_files(root, folder) if folder else plain_side_files(root, weights))
        self.side_files, self.dropped = {**copied.files}, {**copied.dropped}
        if tokenizer is not None and not folder and (given := given_files(tokenizer)):
            own = {name: file for name, file in self.side_files.items() if name not in OWN_TOKENIZER}
            self.side_files = {**own, **given}
        if quantized and self.side_files.pop(MODELOPT_FILE, None):
            self.dropped[MODELOPT_FILE] = "says how the source is quantized, which the output says for itself"
        part = root / folder if folder else root
        if self._foreign or without_architecture(config) != config_file(part):
            name = f"{folder}/config.json" if folder else "config.json"
            self.side_files[name] = config_text(config)

    @property
    def can_run(self) -> bool:
        needed = ("torch", "transformers", *(("diffusers",) if is_diffusion(self.config) else ()))
        return all(find_spec(name) is not None for name in needed)

    def read(self, name: str) -> np.ndarray:
        return self._weights.read(name)

    def read_rows(self, name: str, begin: int, end: int, out: np.ndarray | None = None) -> np.ndarray:
        return self._weights.read_rows(name, begin, end, out)

    def extent(self, name: str) -> Extent | None:
        shard = self._weights.holder[name]
        return shard.extent(name) if isinstance(shard, WeightFile) else None

    def as_stored(self) -> HfSource:
        """The same with rotated weights as they are stored, for who copies their codes and says how they turn."""
        result = copy.copy(self)
        result._weights = self.quantized.stored if self.quantized else self._weights
        return result

    def place(self, name: str) -> tuple[str, int]:
        shard = self._weights.holder[name]
        return shard.path.name, shard.offset(name)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of config, headers, layout, and each weight file's size and modification time; reads no weight."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True, default=str).encode())
        for spec in self.specs.values():
            digest.update(repr((spec.name, spec.shape, spec.dtype)).encode())
        for path in self._weights.files:
            stat = path.stat()
            try:
                name = path.relative_to(self.root).as_posix()
            except ValueError:  # a copy of a compressed archive is elsewhere
                name = path.name
            digest.update(repr((name, stat.st_size, stat.st_mtime_ns)).encode())
        digest.update(self._weights.layout.encode())
        return digest.hexdigest()

    @cached_property  # read when it is asked for
    def calibration(self) -> Calibration | None:  # type: ignore[override]
        return self.statistics.read() if self.statistics else None

    def load_model(self) -> Any:
        """Build the model with these weights, in their stored dtype and in eval mode."""
        return loading.load_model(self)

    def load_skeleton(self) -> Any:
        """Build the same model without weights; reads none."""
        from bridge.sources.live_models.meta_device import load_skeleton

        return load_skeleton(self)

    def load_tokenizer(self) -> Any:
        return self._loaded_tokenizer

    @cached_property  # one of 262,144 tokens takes seconds, and preparing data asks for it some times
    def _loaded_tokenizer(self) -> Any:
        if self._tokenizer is None and self.side_files.keys() <= PLAIN and not self._names_tokenizer():
            raise SourceError(f"{self.where}: the checkpoint has no tokenizer; give tokenizer= (--tokenizer)")
        if self._tokenizer is None and (self._foreign or remote(self.root)):
            return loading.gathered_tokenizer(self.side_files, self.where)
        return loading.load_tokenizer(self._tokenizer, self.root, self.where)

    def _names_tokenizer(self) -> bool:
        """Whether transformers may make a tokenizer of the config alone: those of characters have no file."""
        own = self.config.get("model_type") in names_with("tokenizer_without_file")
        return own or "tokenizer_class" in self.config


def as_stored(source: Source) -> Source:
    """`HfSource.as_stored` of a source that holds codes; any other as it is."""
    return source.as_stored() if isinstance(source, HfSource) and source.quantized else source
