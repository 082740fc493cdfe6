"""Makes the steps of every rank's file from the dialect's rows, tensor and pipeline parallel; reads no weight."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from bridge.dtypes import DTYPES
from bridge.errors import PlanError
from bridge.planning import Draft, Drafted, Output, Step
from bridge.quant.scheme import has_tensor_scale
from bridge.show import pattern
from bridge.tables.dialect import Dialect, DialectRow
from bridge.tables.match import Matched
from bridge.tables.ops import Rank
from bridge.tables.rectangles import Blocks, Refusal
from bridge.tables.slices import Roles, held, lay_out, locate
from bridge.trtllm import companions
from bridge.values import Coding, Format, Site, Slice, TensorSpec

AWQ_VOCAB = 64  # TensorRT-LLM's INT4 checkpoints have a vocabulary padded to this
SHORTEST_SCALE = 1.0  # no FP8 KV scale is below it


@dataclass(frozen=True)
class Placed:
    """A row of one layer (None: of the model) and the stage that holds it, where its layer has number `local`."""

    row: DialectRow
    layer: int | None
    stage: int
    local: int

    @property
    def name(self) -> str:
        """The tensor's name in the rank's file."""
        return self.row.name.replace("{l}", str(self.local))

    @property
    def unique(self) -> str:
        """The same with the layer's number in the whole model."""
        return self.row.name.replace("{l}", str(self.layer))


class Ranks:
    """A checkpoint laid out for `tp` x `pp` ranks; call `draft` once."""

    def __init__(self, draft: Draft, dialect: Dialect, matched: Matched) -> None:
        self._draft, self._dialect, self._matched = draft, dialect, matched
        self._tp, self._pp = int(draft.options.tp), int(draft.options.pp)
        self._roles: Roles = locate(matched)
        self._held = held(self._roles)
        self._sites = {site.module: site for site in draft.structure.sites}
        self._quantized = draft.quantized
        self._drafted = Drafted()

    def draft(self) -> Drafted:
        """Make the steps, rank by rank; problems name the row."""
        layers = int(str(self._matched.names["layers"]))
        if layers % self._pp:
            fits = ", ".join(str(n) for n in range(1, layers + 1) if layers % n == 0)
            raise PlanError(f"pp={self._pp} does not divide the {layers} layers; it may be {fits}")
        rows = list(placed(self._dialect, self._roles, layers, self._pp, self._keeps_head()))
        vocab = vocab_multiple(self._quantized.values())
        if not self._keeps_head() and "head.weight" in self._held[None]:
            module = self._roles["head.weight", None, None][0].module
            if module in self._quantized:
                why = "is the embedding here and cannot be quantized; keep it, or pp=2"
                self._drafted.problems.append((module, why))
        for stage in range(self._pp):
            for number in range(self._tp):
                rank, file = Rank(number, self._tp, vocab), f"rank{stage * self._tp + number}.safetensors"
                for row in rows:
                    if row.stage == stage:
                        self._place(row, rank, file)
                self._caches(stage, layers // self._pp, file)
        return self._drafted

    def _keeps_head(self) -> bool:
        """False where the loader takes a tied head from the embedding, which it can where one stage holds both."""
        return not self._dialect.shares_head(self._matched, self._pp)

    def _place(self, placed: Placed, rank: Rank, file: str) -> None:
        """Add the step of one row on one rank."""
        try:
            blocks = lay_out(placed.row.expr, self._roles, (placed.layer, None), self._matched.names, rank)
        except Refusal as refusal:
            self._problem(placed, str(refusal))
            return
        modules = tuple(dict.fromkeys(block.module for block in blocks if block.source))
        sites = [self._sites[module] for module in modules if module in self._sites]
        dtypes = sorted({self._draft.specs[block.source].dtype for block in blocks if block.source})
        if len(dtypes) > 1:
            self._problem(placed, f"is one tensor here, but its parts are {' and '.join(dtypes)}; save them alike")
            return
        formats = {self._draft.formats.get(site.weight) for site in sites}
        quantized = {found for found in formats if isinstance(found, Format)}
        if len(quantized) > 1 or (quantized and len(formats) > 1):
            joined = ", ".join(dict.fromkeys(map(pattern, modules)))  # without numbers, so that layers fold
            self._problem(placed, f"{joined} are one matrix here and need one format; name all in one rule")
        elif quantized:
            self._coded(placed, blocks, sites, next(iter(quantized)), file)
        else:
            self._plain(placed, blocks, sites[0] if sites else None, file)

    def _plain(self, placed: Placed, blocks: Blocks, site: Site | None, file: str) -> None:
        spec = self._draft.specs[self._source(placed, blocks)]
        dtype = self._draft.options.dtype if DTYPES[spec.dtype].floating else spec.dtype
        kinds = {self._matched.table.roles.roles[role].kind for role in placed.row.roles}
        dtype = "float32" if "router" in kinds else dtype
        shifts = {block.shift for block in blocks if block.source}
        assert len(shifts) <= 1, "norms are not joined"
        output = Output(
            TensorSpec(placed.name, self._shape(placed, blocks), dtype), "weight", str(placed.row.expr), file
        )
        step = Step(
            self._slices(blocks, spec.name),
            (output,),
            site,
            kept=self._draft.why_plain(spec, site),
            shift=shifts.pop() if shifts else 0,
        )
        self._drafted.steps.append(step)

    def _coded(self, placed: Placed, blocks: Blocks, sites: list[Site], format_: Format, file: str) -> None:
        experts = self._experts(placed)
        parts = [block.shape for block in blocks]
        problems = companions.misfits(format_, parts, bool(experts))
        if any(not block.source for block in blocks):
            problems.append(
                "the padded rows of a quantized output head have no scale; keep the head, or use another tp"
            )
        spec = self._draft.specs[self._source(placed, blocks)]
        if spec.dtype not in ("float32", "float16", "bfloat16"):
            problems.append(f"a weight of dtype {spec.dtype} cannot be quantized")
        for problem in problems:
            self._problem(placed, problem)
        if problems:
            return
        shape = (sum(rows for rows, _ in parts), parts[0][1])
        module = placed.name.removesuffix(".weight")
        outputs = companions.outputs(
            format_, module, shape, experts, str(placed.row.expr), self._draft.options.dtype, file
        )
        pair = self._joined(placed, format_)
        shares, modules = pair or (placed.unique.removesuffix(".weight"), tuple(site.module for site in sites))
        step = Step(
            self._slices(blocks, spec.name),
            tuple(outputs),
            sites[0],
            companions.stacked(format_, shape, experts) if experts else format_,
            coding=companions.coding(format_),
            shares=shares if has_tensor_scale(format_) and not experts and (self._tp > 1 or pair) else "",
            unified=modules if len(modules) > 1 else (),
        )
        self._drafted.steps.append(step)

    def _joined(self, placed: Placed, format_: Format) -> tuple[str, tuple[str, ...]] | None:
        """The module that the builder may join this one with: the name under which both share an amax, their sites."""
        pattern, held = placed.row.name.removesuffix(".weight"), self._held[placed.layer]
        for second, first in self._dialect.joined.items():
            if pattern not in (first, second) or placed.row.stacks or not companions.joins(format_):
                continue
            rows = {row.name: row for row in self._dialect.rows_of(placed.row.stage, held)}
            if f"{second}.weight" not in rows:
                return None
            roles = [role for name in (first, second) for role in rows[f"{name}.weight"].roles]
            modules = tuple(dict.fromkeys(self._roles[role, placed.layer, None][0].module for role in roles))
            if all(self._quantized.get(module) == format_ for module in modules):
                return first.replace("{l}", str(placed.layer)), modules
        return None

    def _caches(self, stage: int, layers: int, file: str) -> None:
        """Add the KV scales of a stage's layers."""
        scheme = self._draft.scheme
        if not (scheme and scheme.kv):
            return
        least = SHORTEST_SCALE if scheme.kv.dtype == "float8_e4m3fn" else 0.0
        for local in range(layers):
            attention = self._draft.structure.attention[stage * layers + local]
            module = self._dialect.cache.replace("{l}", str(local))
            outputs = tuple(
                Output(
                    TensorSpec(f"{module}.{part}_cache_scaling_factor", (1,), "float32"),
                    f"{part}_scale",
                    f"calibration: {part} amax / {scheme.kv.maxbound:g}, at least {least:g}",
                    file,
                )
                for part in ("k", "v", "kv")
            )
            self._drafted.steps.append(Step((), outputs, coding=Coding(least=least), attention=attention, kv=scheme.kv))

    def _experts(self, placed: Placed) -> int:
        """How many matrices a stack holds, 0 where the row is none."""
        return int(str(self._matched.names["experts"])) if placed.row.stacks else 0

    def _shape(self, placed: Placed, blocks: Blocks) -> tuple[int, ...]:
        rows, rest, experts = sum(block.shape[0] for block in blocks), blocks[0].shape[1:], self._experts(placed)
        return (experts, rows // experts, *rest) if experts else (rows, *rest)

    def _source(self, placed: Placed, blocks: Blocks) -> str:
        """The first source tensor; a rank that holds padding only takes no row of it."""
        found = next((block.source for block in blocks if block.source), "")
        return found or self._roles[placed.row.roles[0], placed.layer, None][0].source

    def _slices(self, blocks: Blocks, source: str) -> tuple[Slice, ...]:
        slices = [block.slice(self._draft.specs.get(block.source)) for block in blocks]
        return tuple(slices) if slices[0].source else (Slice(source, rows=(0, 0)), *slices)

    def _problem(self, placed: Placed, text: str) -> None:
        """Note what is wrong with a row, once for all ranks; its tensors are not missed besides."""
        for (role, layer, _), blocks in self._roles.items():
            if layer == placed.layer and role in placed.row.roles:
                self._drafted.dropped |= {block.source: text for block in blocks}
        problem = (placed.unique, text)
        if problem not in self._drafted.problems:
            self._drafted.problems.append(problem)


def placed(dialect: Dialect, roles: Roles, layers: int, stages: int, head: bool) -> Iterator[Placed]:
    """Yield the rows of a model with their stages; `head` False leaves out the output head."""
    here, each = held(roles), layers // stages
    for row in dialect.rows_of("first", here[None]):
        yield Placed(row, None, 0, 0)
    for layer in range(layers):
        for row in dialect.rows_of("layer", here.get(layer, frozenset())):
            yield Placed(row, layer, layer // each, layer % each)
    for row in dialect.rows_of("last", here[None]):
        if head or row.roles != ("head.weight",):
            yield Placed(row, None, stages - 1, 0)


def vocab_multiple(formats: Iterable[Format]) -> int:
    """What the vocabulary is padded to: that of INT4 checkpoints is a multiple of 64."""
    return AWQ_VOCAB if any(found.weight[0].dtype == "int4" for found in formats) else 1
