"""The plan: every output tensor and how it is made."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from bridge.core.display import Displayed, Table
from bridge.core.text import fold, grouped, pattern, shape_text, size
from bridge.core.values import Cut, Encoding, Feed, Format, Numeric, Site, Slice, TensorSpec, plain
from bridge.quant.describe import format_name

DEFAULT_FILE = "model.safetensors"
STACKED = "holds all experts of a layer in one tensor, which is not written quantized"
TILE = 128
TILE_AXES = 4  # of the scales of tiles in ModelOpt's spelling, two of them of extent 1
PASSTHROUGH = "stored"  # `Plan.scheme` of a quantized source whose codes are copied


class Layout(StrEnum):
    """How a step runs. Writing, reading back and comparing match on it and decide nothing again.

    SCALES: K and V scales of an attention module; no weight is read.
    PLAIN: a tensor that is not quantized.
    ROWS: a quantized weight whose codes follow the rows of its source; it passes in pieces of rows.
    WHOLE: a quantized weight whose codes are stored across those rows; it is held whole.
    EXPERTS: a tensor of quantized matrices; each expert is quantized by itself.
    """

    SCALES = "scales"
    PLAIN = "plain"
    ROWS = "rows"
    WHOLE = "whole"
    EXPERTS = "experts"


@dataclass(frozen=True)
class Output:
    """One tensor to write: its part of the step, the expression that makes it, and its file.

    `part`: "weight" (codes, or the plain tensor), "scale", "scale_2", "input_scale", "pre_quant_scale", "k_scale",
    "v_scale", "kv_scale" (the larger of the two), "shape" (of the weight, int64), "zeros" (zero points), "order" (the
    block of each `in`). `spec` has the stored shape, to which computed values are reshaped.
    """

    spec: TensorSpec
    part: str
    expression: str
    file: str = DEFAULT_FILE

    @property
    def key(self) -> tuple[str, str]:
        """File and name, unique in a plan."""
        return self.file, self.spec.name


@dataclass(frozen=True)
class Step:
    """Makes the outputs of one matrix (or the K and V scales of an attention module, if `inputs` is empty).

    `inputs` are stacked along `out`. `format` is None for a tensor that is not quantized; `kept` says why.
    `transpose` turns `[out, in]` into `[in, out]`. `shares`: steps with the same name share their per-tensor amax.
    `unified`: modules whose pre-scales are averaged and whose input amax is the largest of all, this step's included.
    `folded`: modules whose pre-scale is multiplied into this norm, which multiplies by 1 + weight if `plus_one`.
    `feeds`: pairs of a matrix whose rows take a pre-scale and the one whose pre-scale it is; the step makes one of the
    two, or the writer's bias. `shift` is added to a plain tensor. `attention`: the module whose K and V scales the step
    writes, for a cache in the numeric `kv`.
    """

    inputs: tuple[Slice, ...]
    outputs: tuple[Output, ...]
    site: Site | None = None
    format: Format | None = None
    kept: str = ""
    coding: Encoding = field(default_factory=Encoding)
    transpose: bool = False
    shares: str = ""
    unified: tuple[str, ...] = ()
    folded: tuple[str, ...] = ()
    plus_one: bool = False
    feeds: tuple[Feed, ...] = ()
    shift: int = 0
    attention: str = ""
    kv: Numeric | None = None

    @property
    def source(self) -> str:
        """The first source tensor; "" for zeros and for statistics."""
        return next((part.source for part in self.inputs if part.source), "")

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules of the source whose matrices the step joins."""
        own = self.site.module if self.site else ""
        return tuple(dict.fromkeys(part.module or own for part in self.inputs if part.source))

    @property
    def matrix(self) -> str:
        """The name of what the step makes: its module (of a stack the expert), or the output's if it joins several."""
        if self.site is None or len(self.modules) != 1:
            return self.outputs[0].spec.name.removesuffix(".weight")
        return self.modules[0] if self.site.expert is None else self.site.module

    @property
    def taken(self) -> tuple[Feed, ...]:
        """The pairs whose pre-scale multiplies rows of this step."""
        module = self.site.module if self.site else self.source.rpartition(".")[0]
        return tuple(feed for feed in self.feeds if feed.writer == module)

    @property
    def given(self) -> Feed | None:
        """The pair whose other matrix takes the pre-scale of this step."""
        return next((feed for feed in self.feeds if self.site and feed.reader == self.site.module), None)

    @property
    def nbytes(self) -> int:
        return sum(output.spec.nbytes for output in self.outputs)

    @property
    def scheme_format(self) -> Format | None:
        """The format as the scheme has it: a weight within one tile of 128 x 128 is coded under one scale."""
        scale = next((output for output in self.outputs if output.part == "scale"), None)
        if not self.format or scale is None or self.format.weight[0].per != "tensor":
            return self.format
        if len(scale.spec.shape) < TILE_AXES:
            return self.format
        return replace(self.format, weight=(Numeric(self.format.weight[0].dtype, "block", (TILE, TILE)),))

    @property
    def layout(self) -> Layout:
        """How the step runs; derived, so that neither the plan's digest nor its JSON holds it."""
        if self.attention:
            return Layout.SCALES
        if self.format is None or self.site is None:
            return Layout.PLAIN
        if self.site.stacked and self.format.weight[0].block:
            return Layout.EXPERTS  # under one scale, stacked matrices are rows of one matrix
        across = self.site.layout == "in_out" and not self.inputs[0].transposed
        return Layout.WHOLE if self.transpose or across else Layout.ROWS


@dataclass(frozen=True, repr=False)
class Plan(Displayed):
    """Everything a conversion will do. `memory` and `disk` are bytes; `dropped` maps source tensors to the reason.

    `tied` maps an alias to the tensor that is stored for both; `untied`, to the tensor that the alias repeats, if both
    are written. `memory` is for two cores; each further core adds one piece of rows, 20 MB. `dialect`: the source's.
    `cuts`: role of a matrix -> how ranks that load the output share it. `program`: that it was asked for, "vllm".
    `calibration`: what a calibration takes of memory, "" if the scheme needs none.

    >>> import bridge
    >>> plan = bridge.plan("examples/models/tiny-llama", target="trt", quant="fp8")
    >>> plan.quantized[0].outputs[0].spec.dtype
    'float8_e4m3fn'
    """

    architecture: str
    target: str
    scheme: str
    scheme_digest: str
    options: dict[str, Any]
    sources: dict[str, TensorSpec]
    steps: tuple[Step, ...]
    tied: dict[str, str] = field(default_factory=dict)
    untied: dict[str, str] = field(default_factory=dict)
    dropped: dict[str, str] = field(default_factory=dict)
    side_files: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    memory: int = 0
    disk: int = 0
    traced: bool = False
    dialect: str = "hf"
    cuts: dict[str, Cut] = field(default_factory=dict)
    program: str = ""
    calibration: str = ""

    @property
    def outputs(self) -> tuple[Output, ...]:
        return tuple(output for step in self.steps for output in step.outputs)

    @property
    def files(self) -> dict[str, list[TensorSpec]]:
        """File -> its tensors."""
        files: dict[str, list[TensorSpec]] = {}
        for output in self.outputs:
            files.setdefault(output.file, []).append(output.spec)
        return files

    @property
    def quantized(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.format)

    def copies(self, step: Step) -> bool:
        """Whether the step copies codes and scales of a quantized source instead of computing them."""
        return self.scheme == PASSTHROUGH and step.layout is not Layout.PLAIN

    @property
    def digest(self) -> str:
        """sha256 of everything that decides the written bytes; equal plans on equal inputs write equal files.

        The place of the source and its dialect do not: reading a remote source takes more memory. Nor do `cuts` and
        `program` and `calibration`.
        """
        apart = ("cuts", "program", "calibration")
        decides = {name: value for name, value in vars(self).items() if name not in apart}
        decides |= {"memory": 0, "dialect": ""}
        return hashlib.sha256(json.dumps(decides, sort_keys=True, default=vars).encode()).hexdigest()

    def lines(self) -> list[str]:
        """What is converted to what; counts and bytes; memory."""
        source = sum(spec.nbytes for spec in self.sources.values())
        sites = sum(1 for step in self.steps if step.site)
        return [
            f"{self.architecture} -> {self.target}, scheme {self.scheme}, plan {self.digest[:12]}",
            f"{len(self.sources):,} source tensors, {size(source)} -> {len(self.outputs):,} tensors, "
            f"{size(self.disk)} on disk",
            f"{len(self.quantized):,} of {sites:,} matrices quantized; peak memory {size(self.memory)}",
            *([self.calibration] if self.calibration else []),
        ]

    def table(self) -> Table:
        """One row per kind of weight: its scales are counted with it."""

        def kind(step: Step) -> Hashable:
            first = step.outputs[0].spec
            return pattern(first.name), first.shape, first.dtype, step.format

        rows = []
        for group in grouped(self.steps, kind):
            first = group[0].outputs[0].spec
            what = format_name(group[0].format) if group[0].format else first.dtype
            names = fold([step.outputs[0].spec.name for step in group])
            nbytes = sum(step.nbytes for step in group)
            rows.append((names, f"{len(group):,}", shape_text(first.shape), what, size(nbytes)))
        return ("tensor", "n", "shape", "format", "bytes"), rows

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data; `bridge.core.parsing.typed_json.typed` reads it back."""
        return plain(self)  # type: ignore[no-any-return]
