"""What a golden says of a model: frozen dataclasses; reads and writes no file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from bridge.quant.bits import Array

Key = tuple[str, str]  # file and name: what is unique in a model


@dataclass(frozen=True)
class Statistics:
    """Of all values of a tensor that are finite; None where none is. Equal on every machine, to the last digit."""

    min: float | None
    max: float | None
    mean: float | None
    nonfinite: int


@dataclass(frozen=True)
class Tensor:
    """One tensor of one file as it is stored; `hash` is the XXH3 of its bytes, `origin` the id of its `Origin`."""

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: str
    hash: str
    origin: str = ""
    statistics: Statistics | None = None

    @property
    def key(self) -> Key:
        return self.file, self.name


@dataclass(frozen=True)
class File:
    """A file and the XXH3 of its bytes; of one that holds tensors, of its header only (`header`)."""

    name: str
    bytes: int
    hash: str
    header: bool = False


@dataclass(frozen=True)
class Origin:
    """How tensors came to be that are alike but for their layer, whose number is {} here.

    `part`: see `bridge.planning.Output`. `format`: of the weight, "" where it is not quantized. `made`: the plan's
    expression. `rows`: the rows of tables that it came from, the target's first.
    """

    tensors: str
    part: str = "weight"
    format: str = ""
    made: str = ""
    rows: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """The same for the same content, so that a change of one origin leaves the lines of all others alone."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:8]

    @property
    def kind(self) -> str:
        """What moved, where such a tensor's values did."""
        if "scale" in self.part:
            return "scales"
        return "codes" if self.format else "weights"


@dataclass(frozen=True)
class Made:
    """What the plan says that decides the bytes; its digest covers more: source tensors, notes, memory."""

    target: str
    architecture: str
    scheme: str
    scheme_digest: str
    plan_digest: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """A written model as its bytes are. `samples`: a few elements of each tensor, at `digests.positions`."""

    made: Made
    tensors: Mapping[Key, Tensor]
    files: Mapping[str, File]
    origins: Mapping[str, Origin]
    samples: Mapping[Key, Array]

    def origin(self, tensor: Tensor) -> Origin:
        return self.origins.get(tensor.origin, Origin(tensor.name))


@dataclass(frozen=True)
class Reference:
    """What a run of the model made of fixed inputs; `not_run` says why there was none.

    `values`: samples, float32, of the model's output ("output") and of what the first matrices got and made of it
    ("MODULE input", "MODULE output"). `ran`: what was run, where it was not the written file itself. `tolerance`: how
    far another run may be off, relative L2.
    """

    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    values: Mapping[str, np.ndarray] = field(default_factory=dict)
    ran: str = ""
    tolerance: float = 0.0
    not_run: str = ""


@dataclass(frozen=True)
class Rerun:
    """What `bridge.convert` is given besides target and options to write the model again.

    `quant`: a scheme, or the file of a recipe in the golden's directory. `calibrated`: the golden keeps a calibration.
    `refused`: why it cannot be converted again.
    """

    quant: str | None = None
    kv: str | None = None
    calibrated: bool = False
    refused: str = ""

    @property
    def recipe(self) -> str:
        """The file of the recipe, "" where it is none."""
        return self.quant if self.quant and self.quant.endswith(".toml") else ""


@dataclass(frozen=True)
class Change:
    """An update of a golden: when, why, from which version to which, and what had moved."""

    date: str
    reason: str
    qbridge: str
    moved: tuple[str, ...] = ()
