"""The steps of every rank's file."""

from __future__ import annotations

from collections.abc import Iterable

from bridge.core.dtypes import DTYPES, FLOATS
from bridge.core.errors import PlanError
from bridge.core.values import Encoding, Format, Site, Slice, TensorSpec
from bridge.planning.plan import Output, Step
from bridge.planning.target import Drafted
from bridge.quant.describe import amax_words
from bridge.quant.schemes.scheme import has_tensor_scale
from bridge.tables.dialects.dialect import DialectRow
from bridge.tables.dialects.layout import roles_by_layer
from bridge.tables.expressions.ops import Rank
from bridge.targets.dialect_steps import DialectDrafting, Placed
from bridge.targets.trtllm import companions

AWQ_VOCAB = 64  # TensorRT-LLM's INT4 checkpoints pad the vocabulary to a multiple of this
MIN_KV_SCALE = 1.0  # FP8 KV scales are not below it


class Ranks(DialectDrafting):
    """A checkpoint laid out for `tp` x `pp` ranks; call `drafted` once."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._tp, self._pp = int(self.draft.options.tp), int(self.draft.options.pp)
        self._present = roles_by_layer(self._roles)

    def drafted(self) -> Drafted:
        """Make the steps, rank by rank; problems name the row."""
        layers = self._layers
        if layers % self._pp:
            fits = ", ".join(str(n) for n in range(1, layers + 1) if layers % n == 0)
            raise PlanError(f"pp={self._pp} does not divide the {layers} layers; it may be {fits}")
        self._each = layers // self._pp
        shares_head = self.dialect.shares_head(self.matched, self._pp)  # the loader takes it from the embedding
        rows, vocab = list(self._rows(head=not shares_head)), vocab_multiple(self._quantized.values())
        if shares_head:
            self._refuse_quantized_head("is the embedding here and cannot be quantized; keep it, or pp=2")
        for stage in range(self._pp):
            for number in range(self._tp):
                rank, file = Rank(number, self._tp, vocab), f"rank{stage * self._tp + number}.safetensors"
                for row, layer in rows:
                    if self._stage(row, layer) == stage:
                        self._add(row, layer, rank, file)
                self._add_kv_scales(stage, file)
        return self._drafted

    def _stage(self, row: DialectRow, layer: int | None) -> int:
        if layer is not None:
            return layer // self._each
        return self._pp - 1 if row.stage == "last" else 0

    def _add(self, row: DialectRow, layer: int | None, rank: Rank, file: str) -> None:
        placed = self._place(row, layer, self.matched.names, rank)
        if placed is None or (found := self._sites_of(placed)) is None:
            return
        sites, format_ = found
        if format_:
            self._add_quantized(placed, sites, format_, file)
        else:
            self._add_plain(placed, sites[0] if sites else None, file)

    def _add_plain(self, placed: Placed, site: Site | None, file: str) -> None:
        spec, slices = self._read(placed)
        dtype = self.draft.options.dtype if DTYPES[spec.dtype].floating else spec.dtype
        kinds = {self.matched.table.roles.roles[role].kind for role in placed.row.roles}
        stored = TensorSpec(self._name(placed), self._shape(placed), "float32" if "router" in kinds else dtype)
        output, kept = Output(stored, "weight", str(placed.row.expr), file), self.draft.why_plain(spec, site)
        self._drafted.steps.append(Step(slices, (output,), site, kept=kept, shift=placed.shift))

    def _add_quantized(self, placed: Placed, sites: list[Site], format_: Format, file: str) -> None:
        (spec, slices), experts = self._read(placed), self._experts(placed.row)
        parts = [block.shape for block in placed.blocks]
        problems = companions.incompatibilities(format_, parts, bool(experts))
        if any(not block.source for block in placed.blocks):
            problems.append(
                "the padded rows of a quantized output head have no scale; keep the head, or use another tp"
            )
        if spec.dtype not in FLOATS:
            problems.append(f"a weight of dtype {spec.dtype} cannot be quantized")
        for problem in problems:
            self._problem(placed.row, placed.layer, problem)
        if problems:
            return
        shape, dtype = (sum(rows for rows, _ in parts), parts[0][1]), self.draft.options.dtype
        module, text = self._name(placed).removesuffix(".weight"), str(placed.row.expr)
        pair = self._joined(placed, format_)
        shares, modules = pair or (placed.name.removesuffix(".weight"), tuple(site.module for site in sites))
        step = Step(
            slices,
            tuple(companions.outputs(format_, module, shape, experts, text, dtype, file)),
            sites[0],
            companions.stacked(format_, shape, experts) if experts else format_,
            coding=Encoding(packed="out" if format_.weight[0].dtype == "int4" else "in"),
            shares=shares if has_tensor_scale(format_) and not experts and (self._tp > 1 or pair) else "",
            unified=modules if len(modules) > 1 else (),
        )
        self._drafted.steps.append(step)

    def _name(self, placed: Placed) -> str:
        """The tensor's name in the rank's file, which counts the layers of its stage."""
        return placed.row.name.replace("{l}", str((placed.layer or 0) % self._each))

    def _read(self, placed: Placed) -> tuple[TensorSpec, tuple[Slice, ...]]:
        """The first source tensor, and the slices to read; a rank with padding only takes no row of it."""
        source = next((block.source for block in placed.blocks if block.source), "")
        source = source or self._roles[placed.row.roles[0], placed.layer, None][0].source
        slices = placed.slices if placed.slices[0].source else (Slice(source, rows=(0, 0)), *placed.slices)
        return self.draft.specs[source], slices

    def _joined(self, placed: Placed, format_: Format) -> tuple[str, tuple[str, ...]] | None:
        """The name under which this module and the one that the builder may join it with share an amax, their sites."""
        module_name, roles_here = placed.row.name.removesuffix(".weight"), self._present[placed.layer]
        for second, first in self.dialect.joined.items():
            if module_name not in (first, second) or placed.row.stacks or not companions.joins(format_):
                continue
            rows = {row.name: row for row in self.dialect.rows_of(placed.row.stage, roles_here)}
            if f"{second}.weight" not in rows:
                return None
            roles = [role for name in (first, second) for role in rows[f"{name}.weight"].roles]
            modules = tuple(dict.fromkeys(self._roles[role, placed.layer, None][0].module for role in roles))
            if all(self._quantized.get(module) == format_ for module in modules):
                return first.replace("{l}", str(placed.layer)), modules
        return None

    def _add_kv_scales(self, stage: int, file: str) -> None:
        scheme = self.draft.scheme
        if not (scheme and scheme.kv):
            return
        kv = scheme.kv
        least = MIN_KV_SCALE if kv.dtype == "float8_e4m3fn" else 0.0
        for local in range(self._each):
            attention = self.draft.structure.attention[stage * self._each + local]
            module, outputs = self.dialect.cache.replace("{l}", str(local)), []
            for part in ("k", "v", "kv"):
                spec = TensorSpec(f"{module}.{part}_cache_scaling_factor", (1,), "float32")
                text = f"{amax_words(kv, part)} / {kv.maxbound:g}, at least {least:g}"
                outputs.append(Output(spec, f"{part}_scale", text, file))
            step = Step((), tuple(outputs), coding=Encoding(least=least), attention=attention, kv=kv)
            self._drafted.steps.append(step)


def vocab_multiple(formats: Iterable[Format]) -> int:
    """The padding of the vocabulary: a multiple of 64 in INT4 checkpoints."""
    return AWQ_VOCAB if any(format_.weight[0].dtype == "int4" for format_ in formats) else 1
