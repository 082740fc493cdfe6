"""Fill in a template, or export a graph and keep it.

Neither a template nor a graph that is kept needs torch or transformers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from bridge.core.machine import without_collection
from bridge.core.output import cache
from bridge.core.output.provenance import provenance, without_origin
from bridge.core.version import loads_transformers
from bridge.sources.configs.diffusion import is_diffusion
from bridge.sources.live_models.as_installed import is_as_installed
from bridge.targets.trt.graph.float_graph import Graph, from_bytes, to_bytes
from bridge.targets.trt.graph.light_import import load_sympy
from bridge.targets.trt.graph.templates.find import find_template

KIND = "graphs"
PACKAGES = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "numpy", "ml-dtypes", "sympy")
# Entries of a config that change no operator: training, and, of a decoder alone, whether it caches and its tokens.
TRAINING = ("attention_dropout", "gradient_checkpointing", "hidden_dropout", "initializer_range")
DECODING = ("bos_token_id", "eos_token_id", "use_cache")
# One thread of a process makes a graph at a time: lazy modules would load twice, and collection is turned off for all.
_MAKING = threading.Lock()


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


def float_graph(request: GraphRequest, progress: Callable[[str], None]) -> tuple[Graph, dict[str, str]]:
    """The float graph, and initializer -> checkpoint tensor. The graph is the caller's own.

    A graph that is made goes through the same bytes as one that is read, so both give the same file. `progress` hears
    whether it is from a template ("graph: template of llama"), was read ("graph: kept"), is made ("export ... layers")
    or waited for.
    """
    template = find_template(request)
    if not _may_be_kept(request):
        exported = from_bytes(_make(request, progress))
        if template:  # the same bytes, whoever imported transformers
            template.settle(exported[0])
        return exported
    if template:
        graph, names = template.graph(request)
        if names:
            progress(f"graph: template of {template.name}")
            return graph, names
    making: list[bool] = []

    def make() -> tuple[str, bytes]:
        making.append(True)
        return request.what, _make(request, progress)

    def waiting() -> None:
        progress("graph: another process makes it")

    graph, names = cache.get_or_make(KIND, request.key, make, from_bytes, waiting)
    if not making:
        progress("graph: kept")
    if template:
        template.settle(graph)
    return request.own(graph), names


def is_kept(request: GraphRequest) -> bool:
    """Whether the graph will be read, not made: then making it takes no core for seconds."""
    if not _may_be_kept(request):
        return False
    return find_template(request) is not None or cache.load(KIND, request.key) is not None


def _make(request: GraphRequest, progress: Callable[[str], None]) -> bytes:
    if not _MAKING.acquire(blocking=False):
        progress("graph: another thread makes one")
        _MAKING.acquire()
    try:
        return _export(request, progress)
    finally:
        _MAKING.release()


def _export(request: GraphRequest, progress: Callable[[str], None]) -> bytes:
    loads_transformers()
    load_sympy()
    with without_collection():
        from bridge.targets.trt.graph.export import export_graph
        from bridge.targets.trt.graph.joined import splits
        from bridge.targets.trt.graph.weight_names import checkpoint_names

        graph = export_graph(
            dict(request.config),
            task=request.task,
            dtype=request.dtype,
            opset=request.opset,
            cache=request.cache,
            stamp=request.stamp,
            part=request.part,
            image=request.image,
            pooling=request.pooling,
            stacked=request.stacked,
            tensors=request.tensors if splits(request.config) else (),
            progress=progress,
        )
        names = checkpoint_names(graph, request.config, request.task, request.tensors, request.tied)
        return to_bytes(graph, names)


def _may_be_kept(request: GraphRequest) -> bool:
    def class_of(config: Any) -> type:
        from bridge.targets.trt.graph.tasks import model_class

        cls: type = model_class(config, request.task)
        return cls

    return is_as_installed(request.packages, request.config, class_of)
