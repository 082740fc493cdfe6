"""Scores of the parts of dims, and their file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from bridge.core.errors import BridgeError, PlanError, WriteError, reason
from bridge.core.formats.safetensors import SafetensorsFile, file_pieces
from bridge.core.output.temporary import write_whole
from bridge.core.parsing.limited import parse_json
from bridge.core.remote.path import as_path
from bridge.sources.pruned.kept import At, by_place, named_arrays

ByPlace = Mapping[str, Mapping[At, np.ndarray]]


@dataclass(frozen=True)
class Scores:
    """Dim -> layer and expert -> a score for each part, float32; None stands for all layers, all experts.

    `importance`: how they were measured. `model`: the fingerprint of the model; `data`: a digest of what it ran on.
    """

    scores: ByPlace
    importance: str
    model: str
    data: str = ""

    def save(self, path: str | Path) -> Path:
        """Write the file; a reader sees all of it or none."""
        path = Path(path)
        about = {key: value for key, value in asdict(self).items() if key != "scores"}
        try:
            write_whole(path, file_pieces(named_arrays(self.scores), {"scores": json.dumps(about, sort_keys=True)}))
        except OSError as error:
            raise WriteError(f"{path}: the scores cannot be written: {reason(error)}") from error
        return path

    @classmethod
    def load(cls, path: str | Path) -> Scores:
        """Read a file; PlanError names what is wrong."""
        path = as_path(path)
        try:
            file = SafetensorsFile(path)
            about = parse_json(file.header.metadata["scores"])
            scores = by_place({name: file.read(name) for name in file.specs})
            return cls(scores, str(about["importance"]), str(about["model"]), str(about["data"]))
        except (BridgeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(f"{path}: not a file of scores: {error}") from error

    def check(self, fingerprint: str) -> None:
        """Refuse scores of another model, and such as have no order."""
        if self.model != fingerprint:
            raise PlanError("the scores are of another model, or of other weights; score this model: data= (--data)")
        check_finite(self.scores)


def check_finite(scores: ByPlace) -> None:
    """Refuse scores that have no order; PlanError names the dim and the layer."""
    for name, array in named_arrays(scores).items():
        if not np.isfinite(array).all():
            raise PlanError(f"the scores of {name} hold NaN or infinity: the model or its data do")
