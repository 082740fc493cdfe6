"""The graph of a request from the template of its family."""

from __future__ import annotations

import json
import tarfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from bridge.core.mappings import mappings
from bridge.targets.onnx.export.float_graph import TEXT, Graph, from_plain_bytes, plain_names
from bridge.targets.onnx.export.templates.fill import fill, settle_frequencies
from bridge.targets.onnx.export.templates.sizes import Family, Sizes, read_sizes, sizes_of

if TYPE_CHECKING:
    from bridge.targets.onnx.export.request import GraphRequest

FOLDER, ENDING, ABOUT = "graphs", ".tar.xz", "family.json"
ROUNDED = 1e-6  # torch rounds a power, its inverse and a scaling, each to 24 bits: 8e-7 for theta 1e11


@dataclass(frozen=True)
class Template:
    """The graphs of a family, and the sizes of the model that one of them is filled with."""

    path: Path
    family: Family
    sizes: Sizes
    sentinel: Sizes
    member: str

    @property
    def name(self) -> str:
        """The type of the family's models."""
        return self.path.name.removesuffix(ENDING)

    def graph(self, request: GraphRequest) -> tuple[Graph, dict[str, str]]:
        """Return the float graph, and initializer -> checkpoint tensor; {} if the checkpoint lacks one."""
        graph, _ = from_plain_bytes(_members(self.path)[self.member])
        tied = fill(graph.model, self.sentinel, self.sizes)
        weights = {name: name for name, value in graph.model.graph.initializers.items() if value.const_value is None}
        given = {**self.family.defaults, **request.config}
        text = {name: given[name] for name in TEXT if name in given}
        return Graph(graph.model, weights, "", tied, text), plain_names(weights, request.tensors, request.tied)

    def settle(self, graph: Graph) -> None:
        """Give an export of the same config the frequencies of the template, which torch rounds otherwise."""
        settle_frequencies(graph.model.graph, self.sizes, ROUNDED)


def find_template(request: GraphRequest) -> Template | None:
    """The template that gives the graph of a request; None if its family has none, or its config asks for more."""
    path = _path(request)
    if path is None:
        return None
    family, members = read_family(path)
    sizes = sizes_of(request.config, family)
    if sizes is None or request.config.get("architectures") != [family.architecture]:
        return None
    member = member_name(sizes.variant, request.dtype, request.opset)
    if member not in members:
        return None
    sentinel = read_sizes(family.sentinels[sizes.variant], family)
    return Template(path, family, sizes, sentinel, member) if sizes.exported_kinds == sentinel.kinds else None


def read_family(path: Path) -> tuple[Family, list[str]]:
    """Read what an archive says of its family, and the names of its graphs."""
    members = _members(path)
    return Family(**json.loads(members[ABOUT])), [name for name in members if name != ABOUT]


def member_name(variant: str, dtype: str, opset: int) -> str:
    """The file of an archive with the graphs of `variant`."""
    return f"{variant}-{dtype}-{opset}"


def _path(request: GraphRequest) -> Path | None:
    """The archive of the request's family; None if it has none, or the graph is not a decoder's with its cache."""
    is_plain_decoder = request.task == "causal-lm" and request.cache and not request.part and not request.pooling
    if not is_plain_decoder or not request.stamp or request.stacked:
        return None
    # looked up in the list, never joined to a path
    name = f"{request.config.get('model_type')}{ENDING}"
    return next((path for path in (mappings() / FOLDER).glob(f"*{ENDING}") if path.name == name), None)


@lru_cache(maxsize=1)  # a conversion asks twice
def _members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        files = ((member.name, archive.extractfile(member)) for member in archive)
        return {name: file.read() for name, file in files if file}
