"""Zeros in two of every four weights, set while rows are read."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from bridge.core.dtypes import to_float32
from bridge.core.errors import UsageError
from bridge.core.text import nearest, not_finite
from bridge.tables.architectures.match import Matched
from bridge.tables.architectures.structure import layout_of

PATTERN = "2:4"
METHODS = ("sparsegpt", "wanda", "magnitude")
OUT, IN = 8, 16  # multiples of them: NVIDIA's ASP and ModelOpt leave other matrices as they are
# The order in which ModelOpt tries them, which decides between equal sums: `set` of the permutations of 1, 1, 0, 0.
_PAIRS = ((1, 3), (0, 1), (1, 2), (0, 2), (0, 3), (2, 3))


@dataclass(frozen=True)
class Sparse:
    """Which stored tensors have zeros, and how they were chosen.

    `axes`: tensor -> the axis of its input, counted from the end. `norms`: what the magnitudes of a tensor's columns
    count for, float32, [in] or [experts, in]; 1 where it has none.
    """

    method: str
    axes: Mapping[str, int]
    norms: Mapping[str, np.ndarray] = field(default_factory=dict, compare=False)

    @property
    def digest(self) -> str:
        """A digest of everything that chooses zeros."""
        digest = hashlib.sha256(f"{self.method} {sorted(self.axes.items())}".encode())
        for name in sorted(self.norms):
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(self.norms[name]).tobytes())
        return digest.hexdigest()

    def aligned(self, name: str, ndim: int, begin: int, end: int) -> tuple[int, int]:
        """The rows to read for `begin` to `end`: whole fours, if they lie along the rows."""
        along = self.axes.get(name, -1) + ndim == 0
        return (begin // 4 * 4, -(-end // 4) * 4) if along else (begin, end)

    def apply(self, name: str, rows: np.ndarray, dtype: str, begin: int) -> np.ndarray:
        """Return rows of a tensor, from `begin` on, with the zeros set; all of them if it has none."""
        axis = self.axes.get(name)
        if axis is None:
            return rows
        values = np.abs(to_float32(rows, dtype))
        if not np.isfinite(values).all():  # its zero would hide it
            raise not_finite(name)
        if (norms := self.norms.get(name)) is not None:
            first = begin if axis + rows.ndim == 0 else 0
            values *= _along(norms, rows, axis, begin, first)
        return np.where(largest_two_of_four(values, axis), rows, rows.dtype.type(0))


def check_sparse(sparse: str, method: str, cut_too: bool) -> None:
    """Refuse another pattern or method, and a cut in the same call."""
    if sparse != PATTERN:
        raise UsageError(f"sparse={sparse!r} (--sparse): unknown; {nearest(str(sparse), (PATTERN,))}")
    if method not in METHODS:
        raise UsageError(f"sparse_method={method!r} (--sparse-method): unknown; {nearest(str(method), METHODS)}")
    if cut_too:
        raise UsageError(
            "sparse= (--sparse) takes no keep, drop_layers, importance, repair or order, since zeros depend on what "
            "is left: prune in a first step, and make in a second step its output sparse"
        )


def sparse_axes(matched: Matched, shapes: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, int], list[str]]:
    """Return the matrices of layers with the axis of their input, from the end, and those whose sizes do not fit."""
    axes: dict[str, int] = {}
    uneven: list[str] = []
    roles = matched.table.roles.roles
    for name, (entry, layer, _) in matched.placed.items():
        if layer is None or any(roles[role].kind != "linear" for role in entry.roles):
            continue
        axis = -2 if layout_of(entry.row.expr).endswith("in_out") else -1
        shape = shapes[name]
        if shape[-3 - axis] % OUT or shape[axis] % IN:
            uneven.append(name)
        else:
            axes[name] = axis
    return axes, uneven


def largest_two_of_four(magnitudes: np.ndarray, axis: int) -> np.ndarray:
    """Return where to keep two of each four along an axis: the pair with the largest sum, in float32.

    `magnitudes`: float32, not negative; the axis has a multiple of four. The same choice as ModelOpt's `m4n2_1d`, also
    between equal sums.
    """
    moved = magnitudes.swapaxes(axis, -1)
    parts = [moved[..., at::4] for at in range(4)]
    best = parts[_PAIRS[0][0]] + parts[_PAIRS[0][1]]
    chosen = np.zeros(best.shape, np.int8)
    for number, (one, other) in enumerate(_PAIRS[1:], 1):
        total = parts[one] + parts[other]
        chosen[total > best] = number
        np.maximum(best, total, out=best)
    keeps = np.array([[at in pair for pair in _PAIRS] for at in range(4)])
    kept = np.empty(moved.shape, bool)
    for at in range(4):
        kept[..., at::4] = keeps[at][chosen]
    return kept.swapaxes(axis, -1)


def _along(norms: np.ndarray, rows: np.ndarray, axis: int, begin: int, first: int) -> np.ndarray:
    """The norms of some rows, in a shape that multiplies them."""
    by_expert = norms.ndim == 2
    part = norms[begin : begin + len(rows)] if by_expert else norms[first : first + rows.shape[axis]]
    if axis == -2:
        return part[..., None]
    return part[:, None] if by_expert else part
