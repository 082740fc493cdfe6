"""What decides a float graph beside the code that makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from bridge.core.output import cache
from bridge.core.output.provenance import provenance
from bridge.sources.configs.diffusion import is_diffusion
from bridge.tables.architectures.meaning import without_origin
from bridge.targets.onnx.export.float_graph import Graph

PACKAGES = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "numpy", "ml-dtypes", "sympy")
# Entries of a config that change no operator: training, and, of a decoder alone, whether it caches and its tokens.
TRAINING = ("attention_dropout", "gradient_checkpointing", "hidden_dropout", "initializer_range")
DECODING = ("bos_token_id", "eos_token_id", "use_cache")


@dataclass(frozen=True)
class GraphRequest:
    """All that decides a float graph beside the code that makes it.

    `config`: the content of config.json. `tensors`: the checkpoint's names, for models whose live names differ. `tied`:
    alias -> tensor. `part`, `image`, `pooling`, `stacked`: see `export_graph`.
    """

    config: Mapping[str, Any]
    task: str
    dtype: str
    opset: int
    cache: bool
    stamp: bool
    tensors: tuple[str, ...]
    tied: Mapping[str, str]
    part: str = ""
    image: tuple[int, int] | None = None
    pooling: str = ""
    stacked: bool = False

    @property
    def packages(self) -> tuple[str, ...]:
        """Whose code makes the graph."""
        return (*PACKAGES, "diffusers") if is_diffusion(self.config) else PACKAGES

    @cached_property
    def key(self) -> str:
        """The digest of everything that decides the graph's bytes."""
        options = [self.task, self.dtype, self.opset, self.cache, self.stamp]
        options += [self.part, self.image, self.pooling, self.stacked]
        config = {name: value for name, value in without_origin(self.config).items() if name not in TRAINING}
        config |= {name: config.get(name) is not None for name in self._own_entries}
        return cache.digest_of([provenance(self.packages), config, options, self.tensors, dict(self.tied)])

    @property
    def _own_entries(self) -> tuple[str, ...]:
        """Entries that are the model's own where a graph of another one is read."""
        return DECODING if self.task == "causal-lm" and not self.part else ()

    def own(self, graph: Graph) -> Graph:
        """The graph of a model that differs in those entries, with this model's tokens."""
        tokens = {name: self.config[name] for name in self._own_entries if name in graph.text and name in self.config}
        return replace(graph, text={**graph.text, **tokens})

    @property
    def what(self) -> str:
        """What `qbridge cache` shows."""
        architecture = (self.config.get("architectures") or ["?"])[0]
        layers = self.config.get("num_hidden_layers")
        of = f"{self.part} of {self.task}" if self.part else self.task
        parts = [str(architecture), f"{layers} layers" if layers else "", of, self.dtype, f"opset {self.opset}"]
        return ", ".join(filter(None, [*parts, "" if self.cache else "no cache", "" if self.stamp else "not stamped"]))
