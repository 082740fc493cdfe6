"""The steps of an MLX checkpoint, under the names of mlx-lm's classes."""

from __future__ import annotations

from dataclasses import replace

from bridge.core.dtypes import DTYPES, FLOATS
from bridge.core.text import byte_count
from bridge.core.values import Format, Site, TensorSpec
from bridge.planning.plan import PASSTHROUGH, Output, Step
from bridge.planning.target import Drafted
from bridge.quant.describe import scale_words
from bridge.tables.dialects.dialect import DialectRow
from bridge.tables.expressions.ops import Rank
from bridge.targets.dialect_steps import DialectDrafting, Placed
from bridge.targets.hf.shards import divide
from bridge.targets.mlx.layout import coding, mode_of, vocabulary_format

VOCABULARY = (("embed.tokens.weight",), ("head.weight",))
UNDIVIDED = "in = {width} is no multiple of the group of {group}, so it stays unquantized, as mlx_lm.convert leaves it"


class Drafting(DialectDrafting):
    """Steps of one model; call `drafted` once."""

    def drafted(self) -> Drafted:
        """Make the steps, with outputs assigned to files; problems name the row."""
        tied = self.dialect.shares_head(self.matched)
        if tied:
            self._refuse_quantized_head("is the embedding here, see --vocabulary; keep the head in the recipe")
        for row, layer in self._rows(head=not tied):
            self._add(row, layer)
        outputs = [output.spec for step in self._drafted.steps for output in step.outputs]
        files = divide(outputs, byte_count(self.draft.options.shard_size, "shard_size"))
        self._drafted.steps = [
            replace(step, outputs=tuple(replace(output, file=files[output.spec.name]) for output in step.outputs))
            for step in self._drafted.steps
        ]
        return self._drafted

    def _add(self, row: DialectRow, layer: int | None) -> None:
        placed = self._place(row, layer, self.matched.names, Rank())
        if placed is None or (found := self._sites_of(placed)) is None:
            return
        sites, format_ = found
        site = sites[0] if sites else None
        if self._is_vocabulary(row, sites):
            module = placed.blocks[0].source.rpartition(".")[0]
            site = site or Site(module, placed.blocks[0].source, "out_in", row.roles)
            assert self.draft.scheme
            format_ = vocabulary_format(self.draft.scheme.format)
        if format_ and site and self._is_divided(placed, format_):
            self._add_quantized(placed, site, format_)
        else:
            self._add_plain(placed, site)

    def _is_vocabulary(self, row: DialectRow, sites: list[Site]) -> bool:
        """Whether it is the embedding or a head that the option quantizes and no rule of a recipe names."""
        scheme = self.draft.scheme
        if self.draft.options.vocabulary != "quantize" or scheme is None or row.roles not in VOCABULARY:
            return False
        if scheme.name == PASSTHROUGH:  # codes are copied, and nothing else is quantized
            return False
        return not any(scheme.rule_of(site) for site in sites)

    def _is_divided(self, placed: Placed, format_: Format) -> bool:
        """Whether groups divide the rows; a note says it if they do not."""
        width, mode = self._shape(placed)[-1], mode_of(format_.weight[0])
        assert mode
        if width % mode.group_size == 0:
            return True
        note = f"{placed.row.name}: {UNDIVIDED.format(width=width, group=mode.group_size)}"
        self._drafted.notes += [note] * (note not in self._drafted.notes)
        return False

    def _add_plain(self, placed: Placed, site: Site | None) -> None:
        spec = self.draft.specs[placed.blocks[0].source]
        if not DTYPES[spec.dtype].floating or DTYPES[spec.dtype].bits < 16:
            self._problem(placed.row, placed.layer, f"is {spec.dtype} in the source; save it as bf16")
            return
        tensor = TensorSpec(placed.name, self._shape(placed), self.draft.options.dtype)
        kept = self.draft.why_plain(spec, site)
        output = Output(tensor, "weight", str(placed.row.expr))
        self._drafted.steps.append(Step(placed.slices, (output,), site, kept=kept, shift=placed.shift))

    def _add_quantized(self, placed: Placed, site: Site, format_: Format) -> None:
        spec, shape = self.draft.specs[placed.blocks[0].source], self._shape(placed)
        mode, dtype = mode_of(format_.weight[0]), self.draft.options.dtype
        assert mode
        if spec.dtype not in FLOATS:
            self._problem(placed.row, placed.layer, f"a weight of dtype {spec.dtype} cannot be quantized")
            return
        *before, width = shape
        text, groups = str(placed.row.expr), (*before, width // mode.group_size)
        affine = mode.mode == "affine"
        module, words = placed.name.removesuffix(".weight"), (*before, width * mode.bits // 32)
        scale = TensorSpec(f"{module}.scales", groups, dtype if affine else "uint8")
        outputs = [
            Output(TensorSpec(placed.name, words, "uint32"), "weight", f"words({text})"),
            Output(scale, "scale", scale_words(format_, text)),
        ]
        if affine:
            outputs.append(Output(replace(scale, name=f"{module}.biases"), "bias", f"least code of ({text})"))
        self._drafted.steps.append(Step(placed.slices, tuple(outputs), site, format_, coding=coding(spec.dtype, dtype)))
