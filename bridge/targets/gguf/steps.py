"""The steps of a GGUF file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from bridge.core.dtypes import DTYPES, FLOATS, K_QUANTS
from bridge.core.formats.gguf import MAX_NAME
from bridge.core.text import number
from bridge.core.values import Format, Site, Slice, TensorSpec
from bridge.planning.plan import Output, Step
from bridge.planning.target import Drafted
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.scheme import has_tensor_scale
from bridge.tables.dialects.dialect import DialectRow
from bridge.tables.expressions.ops import Rank
from bridge.tables.llama_cpp import graphs
from bridge.targets.dialect_steps import DialectDrafting, Placed
from bridge.targets.gguf.encodings import NARROW, block_type, coding, format_of, rounding_note, vocabulary_scheme
from bridge.targets.gguf.file_types import FILE_TYPES, HALF, ModelFacts, file_type_of, is_values, tensor_type
from bridge.targets.gguf.metadata import facts

FILE = "model.gguf"
# llama.cpp adds and multiplies in float32 only, and finds the experts in float32.
SINGLE = ("norm", "bias", "router")
POSITIONS = ("embed.positions.weight",)  # learned ones, which it adds to the embedding
EMBEDDING, HEAD = ("embed.tokens.weight",), ("head.weight",)


@dataclass
class Drafting(DialectDrafting):
    """Steps of one file; call `drafted` once."""

    _notes: dict[str, None] = field(default_factory=dict)
    # what has other blocks, of which type, and why
    _narrow: list[tuple[Placed, str, str]] = field(default_factory=list)
    # a file type of llama.cpp, and what its choice depends on; None without one
    _file_type: str = ""
    _facts: ModelFacts | None = None
    _short: Counter[int] = field(default_factory=Counter)  # rows' width -> matrices that its blocks do not divide

    def drafted(self) -> Drafted:
        """Make the steps; problems name the row."""
        tied = self.dialect.shares_head(self.matched)
        self._facts = self._known_facts(tied)
        if tied and self.draft.options.vocabulary != "quantize":
            why = "is the embedding here, which --vocabulary quantize quantizes; keep the head in a recipe"
            self._refuse_quantized_head(why)
        for row, layer in self._rows(head=not tied):
            self._add(row, layer)
        for source, name in self.drafts.own.items():
            spec, site = self.draft.specs[source], self.draft.sites.get(source)
            dtype = "float32" if len(spec.shape) == 1 else self.draft.options.dtype
            output = Output(TensorSpec(name, spec.shape, dtype), "weight", source, FILE)
            module = source.rpartition(".")[0] if site else ""
            kept = self.draft.why_plain(spec, site)
            self._drafted.steps.append(Step((Slice(source, module=module),), (output,), site, kept=kept))
        for width, count in self._short.items():
            matrices = number(count, "matrix", "matrices")
            self._notes[f"{matrices} with rows of {width}, no multiple of 256, have llama-quantize's other types"] = (
                None
            )
        self._drafted.notes += [*self._notes, *self._narrowed()]
        return self._drafted

    def _narrowed(self) -> Iterator[str]:
        """Notes on matrices whose rows K-quants do not divide; problems if no matrix is left for those."""
        for kind in dict.fromkeys(kind for _, kind, _ in self._narrow):
            narrow = [(placed, why) for placed, of, why in self._narrow if of == kind]
            if any(step.outputs[0].spec.dtype == kind for step in self._drafted.steps if _is_inner(step)):
                widths = ", ".join(dict.fromkeys(str(self._shape(placed)[-1]) for placed, _ in narrow))
                count = number(len(narrow), "matrix", "matrices")
                note = f"{count} with rows of {widths} become {NARROW.upper()}: {kind.upper()} has blocks of"
                yield f"{note} {DTYPES[kind].block}"
                continue
            for placed, why in narrow:
                self._problem(placed.row, placed.layer, why)

    def _add(self, row: DialectRow, layer: int | None) -> None:
        placed = self._place(row, layer, self.matched.names, Rank())
        if placed is None or (found := self._sites_of(placed)) is None:
            return
        sites, format_ = found
        if row.roles == EMBEDDING and (head := self._tied_head()):
            site, format_ = head
            source = placed.blocks[0].source
            self._add_quantized(placed, replace(site, weight=source), replace(format_, algorithm="max"))
        elif self._facts and (format_ or self._is_vocabulary(row, sites)) and not self._is_ruled(sites):
            self._add_chosen(placed, sites, self._facts)
        elif self._is_vocabulary(row, sites):
            self._add_vocabulary(placed, sites)
        elif format_:
            self._add_quantized(placed, sites[0], format_)
        else:
            self._add_plain(placed, sites[0] if sites else None)

    def _is_vocabulary(self, row: DialectRow, sites: list[Site]) -> bool:
        """Whether it is the embedding or a head that the option quantizes and no rule of a recipe names."""
        if self.draft.options.vocabulary != "quantize" or row.roles not in (EMBEDDING, HEAD):
            return False
        return not self._is_ruled(sites)

    def _is_ruled(self, sites: list[Site]) -> bool:
        """Whether a rule of a recipe names a matrix."""
        return any(self.draft.scheme and self.draft.scheme.rule_of(site) for site in sites)

    def _tied_head(self) -> tuple[Site, Format] | None:
        """The head that is the embedding here, and the format that a rule of a recipe gives it."""
        blocks = self._roles.get(("head.weight", None, None), ())
        module = blocks[0].module if blocks and self.dialect.shares_head(self.matched) else ""
        format_ = self._quantized.get(module)
        return (self._sites[module], format_) if format_ else None

    def _known_facts(self, tied: bool) -> ModelFacts | None:
        scheme = self.draft.scheme
        self._file_type = scheme.file_type if scheme else ""
        if scheme and self.draft.options.vocabulary == "quantize":
            self._file_type = scheme.file_type or file_type_of(scheme.name)
        if scheme is None or not self._file_type:
            return None
        rows = self._rows(head=False)
        values = tuple(layer for row, layer in rows if layer is not None and is_values(row.name))
        return facts(self.matched, self._layers, values, tied, scheme.format.weighted)

    def _add_chosen(self, placed: Placed, sites: list[Site], known: ModelFacts) -> None:
        """A matrix in the type that llama-quantize takes for it in a file of the scheme's type."""
        block, shape = placed.blocks[0], self._shape(placed)
        module = block.source.rpartition(".")[0]
        site = sites[0] if sites else Site(module, block.source, "out_in", placed.row.roles)
        kind = tensor_type(self._file_type, placed.name, shape[-1], known)
        unit = DTYPES[FILE_TYPES[self._file_type].kind].block
        self._short.update([shape[-1]] if shape[-1] % unit else [])
        if kind == HALF:
            self._add_plain(placed, site, HALF)
            return
        # llama-imatrix collects nothing of the embedding and of the head
        weighted = known.weighted and placed.row.roles not in (EMBEDDING, HEAD)
        self._add_quantized(placed, site, format_of(kind or FILE_TYPES[self._file_type].kind, weighted))

    def _add_vocabulary(self, placed: Placed, sites: list[Site]) -> None:
        assert self.draft.scheme
        block, shape = placed.blocks[0], self._shape(placed)
        head = placed.row.roles == HEAD or self.dialect.shares_head(self.matched)
        chosen = vocabulary_scheme(block_type(self.draft.scheme.format), shape[-1], head)
        if not chosen:
            self._add_plain(placed, sites[0] if sites else None)
            return
        module = block.source.rpartition(".")[0]
        site = sites[0] if sites else Site(module, block.source, "out_in", placed.row.roles)
        self._add_quantized(placed, site, load_scheme(chosen).format)

    def _add_plain(self, placed: Placed, site: Site | None, narrow: str = "") -> None:
        spec = self.draft.specs[placed.blocks[0].source]
        if not DTYPES[spec.dtype].floating or DTYPES[spec.dtype].bits < 16:
            self._problem(placed.row, placed.layer, f"is {spec.dtype} in the source; save it as bf16")
            return
        kinds = {self.matched.table.roles.roles[role].kind for role in placed.row.roles}
        single = kinds.intersection(SINGLE) or placed.row.roles == POSITIONS
        dtype = "float32" if single else narrow or self.draft.options.dtype
        output = Output(TensorSpec(placed.name, self._shape(placed), dtype), "weight", str(placed.row.expr), FILE)
        kept = self.draft.why_plain(spec, site)
        self._drafted.steps.append(Step(placed.slices, (output,), site, kept=kept, shift=placed.shift))

    def _add_quantized(self, placed: Placed, site: Site, format_: Format) -> None:
        spec, shape = self.draft.specs[placed.blocks[0].source], self._shape(placed)
        wide = block_type(format_)
        if wide in K_QUANTS and shape[-1] % DTYPES[wide].block and not shape[-1] % DTYPES[NARROW].block:
            self._narrow.append((placed, wide, self._incompatibilities(placed, spec, shape, format_)[0]))
            format_ = load_scheme(NARROW).format
        problems = self._incompatibilities(placed, spec, shape, format_)
        for problem in problems:
            self._problem(placed.row, placed.layer, problem)
        if problems:
            return
        kind, text = block_type(format_), str(placed.row.expr)
        outputs = [Output(TensorSpec(placed.name, shape, kind), "weight", f"blocks({text})", FILE)]
        if kind == "nvfp4":
            name = f"{placed.name.removesuffix('.weight')}.scale"
            above = f"amax({text}) / {6 * format_.weight[0].largest_scale:g}"
            outputs.append(Output(TensorSpec(name, (1,), "float32"), "scale_2", above, FILE))
        if note := rounding_note(format_):
            self._notes[note] = None
        self._drafted.steps.append(Step(placed.slices, tuple(outputs), site, format_, coding=coding(format_)))

    def _biased(self, placed: Placed) -> bool:
        """Whether it is a matrix of an MLP with biases."""
        biases = (role.replace(".weight", ".bias") for role in placed.row.roles if role.startswith("mlp."))
        return any((bias, placed.layer, None) in self._roles for bias in biases)

    def _incompatibilities(
        self, placed: Placed, spec: TensorSpec, shape: tuple[int, ...], format_: Format
    ) -> list[str]:
        """Why a matrix does not fit its block type, each reason with its remedy."""
        keep = 'or keep these modules with a recipe (quant = "none")'
        kind, first = block_type(format_), format_.weight[0]
        block = DTYPES[kind].block
        problems = []
        if shape[-1] % block or (first.block and shape[-1] % first.block[0] and shape[-1] > first.block[0]):
            unit = max(block, first.block[0] if first.block else 0)
            smaller = {"q4_k": "q4_0", "q5_k": "q8_0", "q6_k": "q8_0"}.get(kind, "mxfp4_wo")
            smaller = "q4_0_imatrix" if format_.weighted and smaller == "q4_0" else smaller
            near = "" if unit == DTYPES["mxfp4"].block else f" use {smaller}, whose blocks have 32,"
            problems.append(f"in = {shape[-1]} is no multiple of {kind.upper()}'s {unit};{near} {keep}")
        if self._experts(placed.row) and has_tensor_scale(format_):
            problems.append(f"llama.cpp wants a scale per expert, and this stack has one; use mxfp4_wo, {keep}")
        graph = graphs()[self.matched.architecture]
        if kind == "nvfp4" and not graph.second_scale:
            problems.append(f"llama.cpp's {graph.name} leaves out NVFP4's scale of the tensor; use mxfp4_wo, {keep}")
        elif kind == "nvfp4" and self._biased(placed):
            problems.append(f"llama.cpp ends where an MLP has NVFP4 weights and biases; use mxfp4_wo, {keep}")
        if spec.dtype not in FLOATS:
            problems.append(f"a weight of dtype {spec.dtype} cannot be quantized")
        if len(placed.name) > MAX_NAME:
            problems.append(f"its name is longer than the {MAX_NAME} bytes of ggml")
        return problems


def _is_inner(step: Step) -> bool:
    return bool(step.site and set(step.site.roles).isdisjoint({*EMBEDDING, *HEAD}))
