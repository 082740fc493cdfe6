"""Export each float graph once and read it from the cache.

Later conversions with the same config need neither torch nor transformers.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bridge.core.output import cache
from bridge.core.version import __version__, changed, installed, loads_transformers, transformers_is_as_installed
from bridge.targets.trt.graph.float_graph import Graph, from_bytes, to_bytes
from bridge.targets.trt.graph.light_import import load_sympy, without_collection

KIND = "graphs"
# Whose code makes the graph, and packages for which transformers has code of its own if they are there.
MADE_BY = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "numpy", "ml-dtypes", "sympy")
NOTICED = (
    "accelerate", "causal-conv1d", "flash-attn", "flash-linear-attention", "kernels", "mamba-ssm", "mambapy", "natten",
    "timm", "torchvision", "xlstm",
)  # fmt: skip
VARIABLES = ("ONNX", "PYTORCH", "TORCH", "TRANSFORMERS_", "USE_HUB_KERNELS", "USE_TORCH", "XLA_")  # of the environment
UNREAD = (
    "CACHE",
    "DIR",
    "HOME",
    "LOGS",
    "OFFLINE",
    "VERBOSITY",
    "WARNINGS",
)  # ends of variables that change no graph; torch sets one of them


@dataclass(frozen=True)
class GraphRequest:
    """All that decides a float graph beside the code that makes it.

    `config`: the content of config.json. `tensors`: the checkpoint's names, for models whose live names differ. `tied`:
    alias -> tensor. `part`, `image`, `pooling`: see `export_graph`.
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

    @property
    def key(self) -> str:
        """The digest of everything that decides the graph's bytes."""
        options = [self.task, self.dtype, self.opset, self.cache, self.stamp]
        options += [self.part, self.image, self.pooling]
        return cache.digest_of([_made_by(), _deciding(self.config), options, self.tensors, dict(self.tied)])

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

    A graph that is made goes through the same bytes as one that is read, so both give the same file.
    """
    if not _as_installed(request):
        return from_bytes(_make(request, progress))
    body = cache.made_once(KIND, request.key, lambda: (request.what, _make(request, progress)))
    with suppress(ValueError):
        return from_bytes(body)
    return from_bytes(_make(request, progress))


def is_kept(request: GraphRequest) -> bool:
    """Whether the graph will be read, not made: then making it takes no core for seconds."""
    return _as_installed(request) and cache.load(KIND, request.key) is not None


def _make(request: GraphRequest, progress: Callable[[str], None]) -> bytes:
    loads_transformers()
    load_sympy()
    with without_collection():
        from bridge.targets.trt.graph.export import export_graph
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
            progress=progress,
        )
        names = checkpoint_names(graph, request.config, request.task, request.tensors, request.tied)
        return to_bytes(graph, names)


def _as_installed(request: GraphRequest) -> bool:
    """False if the process may hold other code of the model than what is installed: then no graph is read or kept.

    A process in which somebody else loaded transformers may have patched it. Where we loaded it, somebody may have
    registered a class since.
    """
    if not transformers_is_as_installed():
        return False
    if not {"torch", "transformers"} <= sys.modules.keys():
        return True  # nobody can have
    from bridge.sources.live_models.meta_device import resolve_config
    from bridge.targets.trt.graph.tasks import model_class

    try:
        config = resolve_config(dict(request.config))
        used = (type(config), model_class(config, request.task))
    except Exception:  # the export says what is wrong with the config
        return False
    return all(cls.__module__.partition(".")[0] == "transformers" for cls in used)


def _made_by() -> list[object]:
    """Versions of the code that decides a graph, and what else it looks at. Nothing of it is imported."""
    variables = sorted((k, v) for k, v in os.environ.items() if k.startswith(VARIABLES) and not k.endswith(UNREAD))
    machine = [platform.machine(), platform.system(), sys.version_info[:2]]
    return [__version__, changed(), {name: installed(name) for name in (*MADE_BY, *NOTICED)}, machine, variables]


def _deciding(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config without where it came from: fine-tunes differ in that alone.

    transformers looks whether the version that wrote it is there, not at its value.
    """
    return {
        name: bool(value) if name == "transformers_version" else value
        for name, value in config.items()
        if name != "_name_or_path"
    }
