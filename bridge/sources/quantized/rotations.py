"""Rotations of activations that `transform_config` of compressed-tensors names, folded into decoded weights.

A runtime multiplies the input of a Linear by V and its output by U: y = (x V) W^T U, as in the plain model with
the weight U^T W V^T. Rotations of weights are in the stored ones already, and change nothing here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.dtypes import DTYPES, FLOATS, to_float32
from bridge.core.errors import BridgeError
from bridge.core.text import described
from bridge.core.values import TensorSpec
from bridge.quant.codec.arrays import CHUNK, cast
from bridge.sources.quantized import fields as words
from bridge.sources.quantized.fields import ROTATED as ENTRY
from bridge.sources.quantized.parts import Array
from bridge.sources.weights.shards import Shard, Weights
from bridge.tables.architectures.structure import structure

ONLINE, OFFLINE = ("input", "output"), ("weight_input", "weight_output")
TYPES = ("hadamard", "random-hadamard", "random-matrix")
_GROUP = {"type", "apply", "randomize", "requires_grad", "head_dim", "precision"}
_APPLY = {"targets", "location", "inverse", "ignore"}
Product = Callable[[Array, bool], Array]
"""Rows [.., size] times a matrix, or times its transpose (True)."""


@dataclass(frozen=True)
class Rotation:
    """What the input and the output of one Linear are multiplied by, block by block, and the sizes of the blocks."""

    before: tuple[Product, int] | None = None
    after: tuple[Product, int] | None = None


@dataclass(frozen=True)
class Rotations:
    """Module -> its rotation; the matrices that the checkpoint stores; why the rest cannot be undone."""

    modules: dict[str, Rotation] = field(default_factory=dict)
    matrices: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rotated:
    """A weight [out, in], or a bias, as the plain model has it: `inner` has it rotated, in `stored`."""

    inner: Shard
    stored: TensorSpec
    spec: TensorSpec
    rotation: Rotation

    @property
    def path(self) -> Path:
        return self.inner.path

    def offset(self, name: str) -> int:
        return self.inner.offset(name)

    def read(self, name: str) -> Array:
        return self.read_rows(name, 0, self.spec.shape[0])

    def read_rows(self, name: str, begin: int, end: int, out: Array | None = None) -> Array:
        if out is None:
            out = np.empty((end - begin, *self.spec.shape[1:]), DTYPES[self.spec.dtype].storage)
        after = self.rotation.after
        down = after[1] if after else 1
        step = max(CHUNK // max(self.spec.size // self.spec.shape[0], 1) // down, 1) * down
        for first in range(begin // down * down, end, step):
            stop = min(first + step, -(-end // down) * down)
            low, high = max(first, begin), min(stop, end)
            rows = self._undone(to_float32(self.inner.read_rows(name, first, stop), self.stored.dtype))
            kept = np.ascontiguousarray(rows[low - first : high - first], dtype=np.float32)
            out[low - begin : high - begin] = cast(kept, "float32", self.spec.dtype)
        return out

    def _undone(self, rows: Array) -> Array:
        """Rows of U^T W V^T, or of b U, in float64."""
        rows, matrix = rows.astype(np.float64), rows.ndim == 2
        if (before := self.rotation.before) and matrix:
            rows = before[0](rows.reshape(-1, before[1]), True).reshape(rows.shape)
        if after := self.rotation.after:
            turned = np.ascontiguousarray(rows.T).reshape(-1, after[1])
            rows = after[0](turned, False).reshape(rows.T.shape).T
        return rows


def rotations(
    section: Mapping[str, Any],
    config: Mapping[str, Any],
    weights: Weights,
    specs: Mapping[str, TensorSpec],
    linear: Collection[str],
) -> Rotations:
    """Read `transform_config`. specs: of the tensors once decoded. linear: modules with codes, which are Linear."""
    said = words.mapping(section.get(ENTRY), ENTRY)
    groups = words.mapping(said.get("config_groups"), f"{ENTRY}: config_groups")
    ends = tuple(f".{name}_{location}.{part}" for name in groups for location in ONLINE for part in ("weight", "perm"))
    stored = {name: spec for name, spec in weights.specs.items() if ends and name.endswith(ends)}
    reading = _Reading(config, weights, stored, {n: s for n, s in specs.items() if n not in stored}, frozenset(linear))
    if unknown := sorted(said.keys() - {"config_groups"}):
        reading.problems.append(f"{ENTRY}: {', '.join(unknown)} is not known here")
    for name, group in groups.items():
        reading.group(name, words.mapping(group, f"{ENTRY}: {name}"))
    return Rotations(reading.modules, tuple(stored), tuple(dict.fromkeys(reading.problems)))


@dataclass
class _Reading:
    config: Mapping[str, Any]
    weights: Weights
    stored: Mapping[str, TensorSpec]
    specs: Mapping[str, TensorSpec]
    linear: frozenset[str]
    modules: dict[str, Rotation] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def group(self, name: str, group: Mapping[str, Any]) -> None:
        where = f"{ENTRY}: {name}"
        applied = group.get("apply") or []
        kind = group.get("type")
        if unknown := sorted(group.keys() - _GROUP):
            self.problems.append(f"{where}: {', '.join(unknown)} is not known here")
        elif kind not in TYPES:
            self.problems.append(f"{where}: type {described(kind)} is not known; known: {', '.join(TYPES)}")
        elif not isinstance(applied, list):
            self.problems.append(f"{where}: apply is {described(applied)}; expected a list")
        else:
            for entry in applied:
                self._apply(name, str(kind), group, words.mapping(entry, f"{where}: apply"))

    def _apply(self, name: str, kind: str, group: Mapping[str, Any], entry: Mapping[str, Any]) -> None:
        where, location = f"{ENTRY}: {name}", entry.get("location")
        if unknown := sorted(entry.keys() - _APPLY):
            self.problems.append(f"{where}: {', '.join(unknown)} is not known here")
        elif location in ONLINE:
            for module in self._targets(entry, where):
                spec = self.specs[f"{module}.weight"]
                self._rotate(module, spec, _Group(name, kind, group), str(location), bool(entry.get("inverse")))
        elif location not in OFFLINE:
            self.problems.append(
                f"{where}: rotates {described(location)}, which is no input or output of a Linear, so that no weight "
                "can take it"
            )

    def _targets(self, entry: Mapping[str, Any], where: str) -> Iterator[str]:
        """Modules that an entry names, with their weights: those of class Linear, by name, or by a pattern."""
        targets, ignored = (
            words.texts([given] if isinstance(given := entry.get(key), str) else given, f"{where}: {key}")
            for key in ("targets", "ignore")
        )
        classes = {target for target in targets if not target.startswith("re:") and target[:1].isupper()}
        if other := sorted(classes - {"Linear"}):
            self.problems.append(f"{where}: rotates what {', '.join(other)} reads or gives; only Linear is undone")
        sites, embeddings, tied = self._known
        matrices = [name for name, spec in self.specs.items() if len(spec.shape) == 2 and name.endswith(".weight")]
        for module in (*(name.removesuffix(".weight") for name in matrices), *tied):
            is_linear = module in self.linear or module in sites
            chosen = _named(module, targets, where) or ("Linear" in classes and module not in embeddings)
            if not chosen or _named(module, ignored, where) or ("Linear" in ignored and is_linear):
                continue
            if module in tied or not is_linear:
                why = "shares its weight with another module" if module in tied else "may be no Linear"
                self.problems.append(f"{where}: rotates what {module} reads or gives, which {why}")
            else:
                yield module

    @cached_property
    def _known(self) -> tuple[set[str], set[str], list[str]]:
        """Modules that are matrices, embeddings, and those that have the weight of another; none without a table."""
        try:
            found = structure(self.config, self.specs)
        except BridgeError:
            return set(), set(), []
        tied = [alias.removesuffix(".weight") for alias in found.tied if alias not in self.specs]
        return {site.module for site in found.sites}, {n.removesuffix(".weight") for n in found.embeddings}, tied

    def _rotate(self, module: str, spec: TensorSpec, group: _Group, location: str, inverse: bool) -> None:
        where, before = f"{ENTRY}: {group.name}: {module}", location == "input"
        extent = spec.shape[1] if before else spec.shape[0]
        size = words.whole(group.section.get("head_dim"), f"{where}: head_dim", extent)
        if size < 1 or extent % size:
            self.problems.append(f"{where}: head_dim {size} does not divide {extent}")
            return
        product = self._product(module, group, location, inverse, size)
        if isinstance(product, str):
            self.problems.append(f"{where}: {product}")
            return
        rotation, part = self.modules.get(module, Rotation()), "before" if before else "after"
        if getattr(rotation, part) is not None:
            self.problems.append(f"{where}: its {location} is rotated twice, in an order that is not known")
        self.modules[module] = dataclasses.replace(rotation, **{part: (product, size)})

    def _product(self, module: str, group: _Group, location: str, inverse: bool, size: int) -> Product | str:
        """The matrix of a rotation, as compressed-tensors 0.20 applies it; or why it is not known."""
        weight = self._matrix(module, group.name, location, "weight", (size, size))
        order = self._matrix(module, group.name, location, "perm", (size,))
        if group.section.get("randomize") and order is None and group.kind != "random-matrix":
            return "its order is random, and the checkpoint does not store it"
        if weight is None and group.kind != "hadamard":
            return f"its matrix is a {group.kind}, and the checkpoint does not store it"
        if weight is None and size & (size - 1):
            return f"no Hadamard matrix of {size} is made without a stored one: it is no power of two"
        if weight is None and order is None:
            return _walsh
        matrix = _walsh(np.eye(size), False) if weight is None else weight / (1.0 if group.invertible else size**0.5)
        if order is not None:
            matrix = matrix[order.astype(np.int64)][:, order.astype(np.int64)]
        turned = inverse and not group.invertible  # the inverse of another matrix is stored itself
        return lambda rows, transposed: rows @ (matrix.T if transposed != turned else matrix)

    def _matrix(self, module: str, group: str, location: str, part: str, shape: tuple[int, ...]) -> Array | None:
        """A stored matrix: the module's own, else that of the group, whose modules share one of each size."""
        own = f"{module}.{group}_{location}.{part}"
        ends = f".{group}_{location}.{part}"
        names = [own, *(name for name in self.stored if name.endswith(ends))]
        name = next((name for name in names if name in self.stored and self.stored[name].shape == shape), None)
        if name is None:
            return None
        values, dtype = self.weights.read(name), self.stored[name].dtype
        return to_float32(values, dtype).astype(np.float64) if dtype in FLOATS else values


@dataclass(frozen=True)
class _Group:
    name: str
    kind: str
    section: Mapping[str, Any]

    @property
    def invertible(self) -> bool:
        """Whether it is any invertible matrix, which is stored as it is; Hadamard's are stored as signs."""
        return self.kind == "random-matrix"


def _named(module: str, patterns: tuple[str, ...], where: str) -> bool:
    return any(words.matches(one[3:], module, where) if one.startswith("re:") else one == module for one in patterns)


def _walsh(rows: Array, transposed: bool) -> Array:
    """Rows times Sylvester's matrix, which is its own transpose, over the root of its size."""
    size = rows.shape[-1]
    half = 1
    while half < size:
        pairs = rows.reshape(-1, 2, half)
        rows = np.concatenate([pairs[:, :1] + pairs[:, 1:], pairs[:, :1] - pairs[:, 1:]], axis=1)
        half *= 2
    result: Array = rows.reshape(-1, size) / size**0.5
    return result
