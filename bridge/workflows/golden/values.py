"""The values of a golden: frozen dataclasses."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from bridge.quant.codec.arrays import Array

Key = tuple[str, str]  # file and name, unique in a model


@dataclass(frozen=True)
class Statistics:
    """Of the finite values of a tensor; None if there are none. Equal on every machine, to the last digit."""

    min: float | None
    max: float | None
    mean: float | None
    nonfinite: int


@dataclass(frozen=True)
class Tensor:
    """A stored tensor; `hash` is the XXH3 of its bytes, `origin` the id of its `Origin`."""

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
    """A file and the XXH3 of its bytes; of a file with tensors, only of its header (`header`)."""

    name: str
    bytes: int
    hash: str
    header: bool = False


@dataclass(frozen=True)
class Origin:
    """How tensors were made that differ only in their layer, whose number is {} here.

    `part`: see `bridge.planning.plan.Output`. `format`: of the weight, "" if it is not quantized. `made`: the plan's
    expression. `rows`: the table rows it came from, the target's first.
    """

    tensors: str
    part: str = "weight"
    format: str = ""
    made: str = ""
    rows: tuple[str, ...] = ()

    @property
    def id(self) -> str:
        """A hash of the content, so that a change of one origin does not change the lines of the others."""
        return hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:8]

    @property
    def kind(self) -> str:
        """The kind of a `Move` of such a tensor's values."""
        if "scale" in self.part:
            return "scales"
        return "codes" if self.format else "weights"


@dataclass(frozen=True)
class Made:
    """The parts of the plan that decide the bytes; its digest covers more: source tensors, notes, memory."""

    target: str
    architecture: str
    scheme: str
    scheme_digest: str
    plan_digest: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """The bytes of a written model. `samples`: a few elements of each tensor, at `digests.positions`."""

    made: Made
    tensors: Mapping[Key, Tensor]
    files: Mapping[str, File]
    origins: Mapping[str, Origin]
    samples: Mapping[Key, Array]

    def origin(self, tensor: Tensor) -> Origin:
        return self.origins.get(tensor.origin, Origin(tensor.name))


@dataclass(frozen=True)
class Reference:
    """The results of a run of the model on fixed inputs; `not_run` says why there was no run.

    `values`: float32 samples of the model's output ("output") and of the inputs and outputs of its first matrices
    ("MODULE input", "MODULE output"). `ran`: what was run, if not the written file itself. `tolerance`: the allowed
    difference of another run, relative L2.
    """

    inputs: Mapping[str, np.ndarray] = field(default_factory=dict)
    values: Mapping[str, np.ndarray] = field(default_factory=dict)
    ran: str = ""
    tolerance: float = 0.0
    not_run: str = ""


@dataclass(frozen=True)
class Rerun:
    """The arguments of `bridge.convert`, besides target and options, that write the model again.

    `quant`: a scheme, or the file of a recipe in the golden's directory. `calibrated`: the golden has a calibration
    file. `refused`: why the model cannot be converted again.
    """

    quant: str | None = None
    kv: str | None = None
    calibrated: bool = False
    refused: str = ""

    @property
    def recipe(self) -> str:
        """The file of the recipe, "" if `quant` is not a recipe."""
        return self.quant if self.quant and self.quant.endswith(".toml") else ""


@dataclass(frozen=True)
class Change:
    """An update of a golden: date, reason, versions before and after, and what had moved."""

    date: str
    reason: str
    qbridge: str
    moved: tuple[str, ...] = ()
