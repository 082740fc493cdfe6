"""What a pruned model keeps: sizes, and which parts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bridge.core.dtypes import DTYPES
from bridge.core.errors import BridgeError, PlanError
from bridge.core.files.matrices import AppendedFile, FileMatrix
from bridge.core.formats.safetensors import SafetensorsFile, file_bytes
from bridge.core.parsing.limited import parse_json
from bridge.core.values import TensorSpec
from bridge.sources.pruned.sparse import Sparse
from bridge.tables.expressions.selected_positions import Positions


@dataclass(frozen=True)
class Repaired:
    """Values of a stored tensor whose axis `cut` has the kept channels alone; `spec` has that shape."""

    spec: TensorSpec
    cut: int
    matrix: FileMatrix
    digest: str

    @staticmethod
    def of(file: AppendedFile, name: str, tensor: Any, cut: int) -> Repaired:
        """Append the values of a torch tensor to a file. `cut`: from the last axis, -1 or -2."""
        spec = TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        data = _bytes(tensor)
        return Repaired(spec, cut + tensor.ndim, file.append(data), hashlib.sha256(data.data).hexdigest())

    def read_rows(self, begin: int, end: int) -> np.ndarray:
        """Return rows of the first axis, in their storage dtype."""
        rows: np.ndarray = self.matrix[begin:end].view(DTYPES[self.spec.dtype].storage)
        return rows.reshape(-1, *self.spec.shape[1:])


def _bytes(tensor: Any) -> np.ndarray:
    import torch

    data: np.ndarray = tensor.contiguous().reshape(len(tensor), -1).view(torch.uint8).numpy()
    return data


At = tuple[int | None, int | None]  # layer and expert, None for all of them
Choices = Mapping[At, Positions]
_NORMS = "norms of "


@dataclass(frozen=True)
class Kept:
    """The choice for every dim that is cut.

    `before`, `after`: size of each dim. `choices`: dim -> place -> the kept positions, in the order in which the
    smaller model has them; layers and experts count as the whole model does. `share`: of each dim the least part, over
    places, of the summed squares of its scores; of `vocab` the part of the data's tokens.
    """

    before: Mapping[str, int]
    after: Mapping[str, int]
    choices: Mapping[str, Choices]
    share: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def layers(self) -> tuple[int, ...]:
        """The kept layers."""
        return tuple(self.positions("layers", None, None).tolist())

    def positions(self, dim: str, layer: int | None, expert: int | None) -> Positions:
        """What is kept of a dim in one layer and expert: the choice for that expert, for that layer, or for all."""
        chosen = self.choices.get(dim, {})
        for place in ((layer, expert), (layer, None), (None, None)):
            if place in chosen:
                return chosen[place]
        return np.arange(self.before[dim])

    @property
    def digest(self) -> str:
        """A digest of all choices."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self, repaired: Collection[str] = (), sparse: Sparse | None = None) -> bytes:
        """A safetensors file of all choices, int32, by `dim`, `dim/layer` or `dim/layer/expert`.

        Its header has the sizes, the names of tensors that were solved anew, and how zeros were chosen, whose norms
        stand as `norms of TENSOR`.
        """
        words: dict[str, Any] = {"before": self.before, "after": self.after, "repaired": sorted(repaired)}
        if sparse:
            words["sparse"] = {"method": sparse.method, "axes": dict(sparse.axes)}
        arrays = {name: array.astype(np.int32) for name, array in named_arrays(self.choices).items()}
        arrays |= {_NORMS + name: array for name, array in (sparse.norms if sparse else {}).items()}
        return file_bytes(arrays, {"pruning": json.dumps(words, sort_keys=True)})

    def lines(self) -> list[str]:
        """The dims that changed."""
        changed = {dim: size for dim, size in self.after.items() if size != self.before[dim]}
        return [f"{dim} {self.before[dim]:,} -> {size:,}" for dim, size in changed.items()]


def load_kept(path: Path) -> tuple[Kept, list[str], Sparse | None]:
    """Read a file: choices, names of the tensors that were solved anew, zeros; PlanError names what is wrong."""
    try:
        file = SafetensorsFile(path)
        about = parse_json(file.header.metadata["pruning"])
        norms = {name.removeprefix(_NORMS): file.read(name) for name in file.specs if name.startswith(_NORMS)}
        named = [name for name in file.specs if not name.startswith(_NORMS)]
        choices = by_place({name: file.read(name).astype(np.int64) for name in named})
        kept = Kept(dict(about["before"]), dict(about["after"]), choices)
        sparse = about.get("sparse")
        zeros = Sparse(str(sparse["method"]), dict(sparse["axes"]), norms) if sparse else None
        return kept, [str(name) for name in about["repaired"]], zeros
    except (BridgeError, KeyError, TypeError, ValueError) as error:
        raise PlanError(f"{path}: not a file of what a pruned model kept: {error}") from error


def by_place(named: Mapping[str, np.ndarray]) -> dict[str, dict[At, np.ndarray]]:
    """The arrays that `named_arrays` named: dim -> layer and expert -> array."""
    places: dict[str, dict[At, np.ndarray]] = {}
    for name, array in named.items():
        dim, *numbers = name.split("/")
        layer, expert = [*(int(number) for number in numbers), None, None][:2]
        places.setdefault(dim, {})[layer, expert] = array
    return places


def named_arrays(placed: Mapping[str, Mapping[At, np.ndarray]]) -> dict[str, np.ndarray]:
    """Arrays by `dim`, `dim/layer` or `dim/layer/expert`."""
    return {
        "/".join([dim, *(str(number) for number in place if number is not None)]): np.ascontiguousarray(array)
        for dim, places in placed.items()
        for place, array in places.items()
    }
