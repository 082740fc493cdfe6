"""The plan: every output tensor, and the step that computes it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from bridge.core.display import Displayed, Table
from bridge.core.records import later, plain, recorded
from bridge.core.text import fold, grouped, pattern, shape_text, size
from bridge.core.values import Cut, Encoding, Feed, Format, Numeric, Site, Slice, TensorSpec
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
    """One tensor to write."""

    spec: TensorSpec
    """Its name, dtype and stored shape, to which computed values are reshaped: `lm_head.weight`, (1536, 128)."""
    part: str
    """Which part of the step it is.

    "weight" (codes, or the plain tensor), "scale", "bias" (what is added to codes times scale), "scale_2",
    "input_scale", "pre_quant_scale", "k_scale", "v_scale", "kv_scale" (the larger of the two), "shape" (of the weight,
    int64), "zeros" (zero points), "order" (the block of each `in`).
    """
    expression: str
    """How its values come about, for the reader of a plan: `amax(lm_head.weight, tensor) / 448`."""
    file: str = DEFAULT_FILE
    """The file that holds it, for example `rank0.safetensors`."""

    @property
    def key(self) -> tuple[str, str]:
        """File and name, unique in a plan."""
        return self.file, self.spec.name


@dataclass(frozen=True)
class Step:
    """One unit of work: read some slices of the source, and write the tensors of one matrix with its scales.

    The examples are of `examples/models/tiny-llama`, whose layer 0 has `q_proj`, `k_proj` and `v_proj` in its module
    `model.layers.0.self_attn`.
    """

    inputs: tuple[Slice, ...]
    """What is read, joined along `out`: for a fused QKV `q_proj`, `k_proj` and `v_proj`; () for scales of a cache."""
    outputs: tuple[Output, ...]
    """What is written: `q_proj.weight` with FP8 codes, `q_proj.weight_scale`, `q_proj.input_scale`."""
    site: Site | None = None
    """The module of the source that the matrix belongs to, `...q_proj`; None for norms and other plain tensors."""
    format: Format | None = None
    """How the matrix is quantized, for example weight and input in FP8; None if it is not."""
    kept: str = ""
    """Why the tensor is not quantized: "output head", "attn.norm: not a matrix multiplication"; "" if it is."""
    coding: Encoding = field(default_factory=Encoding)
    """How the target stores codes and scales: INT4 packed by two in a byte along `in`, float32 scales."""
    transpose: bool = False
    """Whether `[out, in]` is written as `[in, out]`: target trt writes (384, 128) of the source's (128, 384)."""
    shares: str = ""
    """A group of steps that all use the largest per-tensor amax among them: `q_proj` to `v_proj` for target hf."""
    unified: tuple[str, ...] = ()
    """The modules that share the step's input: `q_proj`, `k_proj`, `v_proj`.

    Their pre-scales are averaged, and the largest input amax is that of all; this step's module is among them.
    """
    folded: tuple[str, ...] = ()
    """The modules whose pre-scale is multiplied into this norm: of `input_layernorm`, the three that read it."""
    plus_one: bool = False
    """Whether this norm multiplies by 1 + weight, as Gemma's do, so that the pre-scale goes on the sum."""
    feeds: tuple[Feed, ...] = ()
    """The pairs of matrices, this step's among them, of which one has the pre-scale of the other in its rows.

    `o_proj` reads what the rows of `v_proj` write, so the pre-scale of `o_proj` is multiplied into the rows of
    `v_proj`, and of its bias.
    """
    shift: int = 0
    """What is added to a plain tensor: 1 for a norm that the source stores less one, and the target does not."""
    attention: str = ""
    """The attention module whose K and V scales the step writes, `model.layers.0.self_attn`; "" for a matrix."""
    kv: Numeric | None = None
    """The numeric of the KV cache that these scales are for, FP8 per tensor; None for a matrix."""

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
    def feeds_as_writer(self) -> tuple[Feed, ...]:
        """The feeds whose reader's pre-scale is multiplied into rows of this step: `v_proj` before `o_proj`."""
        module = self.site.module if self.site else self.source.rpartition(".")[0]
        return tuple(feed for feed in self.feeds if feed.writer == module)

    @property
    def feed_as_reader(self) -> Feed | None:
        """The feed whose writer takes over the pre-scale of this step: `o_proj` after `v_proj`; None without one."""
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
    """Everything a conversion will do, known before a weight is read.

    >>> import bridge
    >>> plan = bridge.plan("examples/models/tiny-llama", target="trt", quant="fp8")
    >>> plan.quantized[0].outputs[0].spec.dtype
    'float8_e4m3fn'
    """

    architecture: str
    """The model's class in config.json, for example `LlamaForCausalLM`."""
    target: str
    """The name of the target that writes, for example `trt`."""
    scheme: str
    """The scheme's name, `fp8`; "none" without quantization, "stored" if codes of a quantized source are copied."""
    scheme_digest: str
    """A digest of the scheme, which a calibration must have to fit the plan."""
    options: dict[str, Any]
    """The target's options after their defaults were settled: {"dtype": "float32", "tp": 1}."""
    sources: dict[str, TensorSpec]
    """Every tensor of the source by name: `lm_head.weight` with its shape (1536, 128) and dtype."""
    steps: tuple[Step, ...]
    """The work, in the order of the output's files."""
    tied: dict[str, str] = field(default_factory=dict)
    """Alias -> the tensor that is stored for both: {"lm_head.weight": "model.embed_tokens.weight"}."""
    untied: dict[str, str] = field(default_factory=dict)
    """Alias -> the tensor that it repeats, if both are written."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Tensor or file of the source that is not written -> why: {"config.json": "side file: hf writes its own"}."""
    side_files: tuple[str, ...] = ()
    """Files that are copied as they are: ("README.md", "tokenizer.json")."""
    notes: tuple[str, ...] = ()
    """Sentences about costs and departures that the user should know before the run."""
    memory: int = 0
    """Peak bytes of memory with two cores, without calibration; each further core adds one piece of rows, 20 MB."""
    disk: int = 0
    """Bytes of the tensors, side files and engines that are written."""
    traced: bool = False
    """Whether the structure comes from a trace with torch, since no table lists the architecture."""
    dialect: str = "hf"
    """Whose names the source's tensors have, for example `megatron`."""
    cuts: dict[str, Cut] = field(default_factory=dict)
    """Role of a matrix -> how tensor-parallel ranks that load the output share it: `attn.q.weight` by 8 heads of 32."""
    program: str = ""
    """The program that the output was asked for (`runtime=`, `--for`), for example `vllm`; "" for none."""
    carried: dict[str, Any] = field(default_factory=dict)
    """Entries of the source's `quantization_config` that are written as they are, with the codes that they are of."""
    calibration: str = ""
    """What a calibration takes of memory, as a sentence; "" if the scheme needs none."""
    running: int = 0
    """Peak bytes of memory of a conversion that calibrates, or runs source and output to compare them; 0 of others."""
    rotation: str = later("")
    """The rotation that was folded into the source's weights, `hadamard`; "" for none."""

    @property
    def outputs(self) -> tuple[Output, ...]:
        """Every tensor to write, step by step."""
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
        """The steps that write codes."""
        return tuple(step for step in self.steps if step.format)

    def copies(self, step: Step) -> bool:
        """Whether the step copies codes and scales of a quantized source instead of computing them."""
        return self.scheme == PASSTHROUGH and step.layout is not Layout.PLAIN

    @property
    def digest(self) -> str:
        """sha256 of everything that decides the written bytes; equal plans on equal inputs write equal files.

        The address of the source and its dialect do not: reading a remote source takes more memory. Nor do `cuts` and
        `program`, `calibration` and `running`.
        """
        without = ("cuts", "program", "calibration", "running")
        decides = {name: value for name, value in recorded(self).items() if name not in without}
        decides |= {"memory": 0, "dialect": ""}
        if not self.carried:  # nor does that there are none
            del decides["carried"]
        return hashlib.sha256(json.dumps(decides, sort_keys=True, default=recorded).encode()).hexdigest()

    def lines(self) -> list[str]:
        """What is converted to what; counts and bytes; memory."""
        source = sum(spec.nbytes for spec in self.sources.values())
        sites = sum(1 for step in self.steps if step.site)
        run = f", {size(self.running)} where the model is run" if self.running else ""
        return [
            f"{self.architecture} -> {self.target}, scheme {self.scheme}, plan {self.digest[:12]}",
            f"{len(self.sources):,} source tensors, {size(source)} -> {len(self.outputs):,} tensors, "
            f"{size(self.disk)} on disk",
            f"{len(self.quantized):,} of {sites:,} matrices quantized; peak memory {size(self.memory)}{run}",
            *([self.calibration] if self.calibration else []),
        ]

    def kinds(self) -> list[list[Step]]:
        """The steps by kind of weight, layers together."""

        def kind(step: Step) -> Hashable:
            first = step.outputs[0].spec
            return pattern(first.name), first.shape, first.dtype, step.format

        return grouped(self.steps, kind)

    def table(self, kinds: Sequence[Sequence[Step]] = ()) -> Table:
        """One row per kind of weight: its scales are counted with it. `kinds`: those of `kinds`, if they are known."""
        rows = []
        for group in kinds or self.kinds():
            first = group[0].outputs[0].spec
            what = format_name(group[0].format) if group[0].format else first.dtype
            names = fold([step.outputs[0].spec.name for step in group])
            nbytes = sum(step.nbytes for step in group)
            rows.append((names, f"{len(group):,}", shape_text(first.shape), what, size(nbytes)))
        return ("tensor", "n", "shape", "format", "bytes"), rows

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data; `bridge.core.parsing.typed_json.typed` reads it back."""
        return plain(self)  # type: ignore[no-any-return]
