"""The steps of target `hf`, in the order of the modules."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from bridge.core.dtypes import DTYPES
from bridge.core.records import changed
from bridge.core.text import byte_count, fold_problems, grouped, pattern
from bridge.core.values import Format, Numeric, Site, Slice, TensorSpec, main_dtype
from bridge.planning.joined_and_cut import MIN_GROUP, OWN_SCALES_NOTE, block_of, fused_with, is_refit
from bridge.planning.plan import PASSTHROUGH, Output, Step
from bridge.planning.target import Draft, Drafted
from bridge.quant.describe import amax_words, scale_words
from bridge.quant.schemes.scheme import has_tensor_scale
from bridge.targets.checkpoint import out_in
from bridge.targets.hf.experts import MIXED_EXPERTS, Experts
from bridge.targets.hf.folding import Folding
from bridge.targets.hf.shards import divide, names_for
from bridge.targets.hf.spelling import Spelling
from bridge.targets.modelopt_format import routers

ALLOW_SPLIT = "or pass allow_split=True (--allow-split)"
MIXED = (
    "these read the same input but differ in format: runtimes that fuse them (vLLM, SGLang) refuse it; name all in one "
    f"rule, {ALLOW_SPLIT}"
)
MIXES = (
    "has another format than most modules, and this spelling names one for all; use format='compressed-tensors' "
    "(--format compressed-tensors)"
)


class Drafting:
    """The steps of one plan. Groups of modules that read one input decide what is shared and folded."""

    def __init__(self, draft: Draft, spelling: Spelling) -> None:
        self._drafted = Drafted()
        self._experts = Experts(draft, spelling)
        self._draft = draft = self._experts.draft
        self._spelling = spelling
        self._formats = draft.quantized | self._experts.formats
        self._copied = {
            (site.weight if site and site.weight in draft.structure.tied else spec.name): (spec, site)
            for spec, site in draft.copied()
        }
        self._shapes = {site.module: out_in(spec, site) for spec, site in self._copied.values() if site}
        self._folding = Folding(draft, spelling.TRAITS)
        self._groups = {module: group for group in self._folding.groups for module in group.modules}
        self._folded = self._folding.norms
        self._routers = routers(draft.specs)
        self._main = main_dtype(draft.specs.values())

    def drafted(self) -> Drafted:
        """Make the steps, with outputs assigned to files, and collect every problem."""
        scheme = self._draft.scheme
        self._drafted.problems += [*self._ungrouped(), *self._folding.problems(), *self._mixes()]
        self._drafted.notes += self._folding.notes()
        if self._draft.options.own_scales and not any(map(is_refit, self._formats.values())):
            self._drafted.notes.append(OWN_SCALES_NOTE)
        self._drafted.notes += self._own_dtypes()
        self._drafted.problems += self._experts.problems
        self._drafted.notes += self._experts.notes
        steps = [step for name in self._order() for step in self._steps(name)]
        if scheme and scheme.kv:
            steps += [self._kv_step(module, scheme.kv) for module in self._draft.structure.attention]
        self._drafted.steps = self._assign_files(steps)
        split = list(self._split())
        if self._draft.options.allow_split:
            self._drafted.notes += fold_problems(split)
        else:
            self._drafted.problems += split
        return self._drafted

    def _split(self) -> Iterator[tuple[str, str]]:
        """Fused modules of which a recipe keeps some unquantized; vLLM's `is_layer_skipped` raises on them.

        So does its `get_moe_method` on experts of a layer that differ in format.
        """
        sites = [site for site in self._draft.structure.sites if not site.keep]
        copies = self._draft.scheme and self._draft.scheme.name == PASSTHROUGH
        for experts in grouped((s for s in sites if s.expert is not None and not copies), lambda s: s.experts):
            if len({self._formats.get(site.module) for site in experts}) > 1:
                yield from ((site.module, f"{MIXED_EXPERTS}, {ALLOW_SPLIT}") for site in experts)
        chosen = {site.module for site in sites}
        for group in self._draft.structure.groups:
            modules = [module for module in group.modules if module in chosen]
            for members in grouped(modules, block_of):
                if len({module in self._formats for module in members}) > 1:
                    yield from ((module, MIXED) for module in members)

    def _own_dtypes(self) -> list[str]:
        """A note on tensors that do not get the dtype that was asked for, since they have another than the model's."""
        kept = [spec for spec, site in self._copied.values() if self._is_apart(spec, site)]
        return fold_problems([(spec.name, f"stays {spec.dtype}, unlike the rest of the model") for spec in kept])

    def _is_apart(self, spec: TensorSpec, site: Site | None) -> bool:
        """Whether an unquantized tensor keeps a float dtype that is not the one asked for: routers have float32."""
        quantized = site is not None and site.module in self._formats
        apart = DTYPES[spec.dtype].floating and spec.dtype not in (self._main, self._asked)
        return self._asked != self._main and apart and not quantized

    @property
    def _asked(self) -> str:
        return self._draft.options.dtype or self._main

    def _ungrouped(self) -> Iterator[tuple[str, str]]:
        """Modules that would share scales if it were known with which others; experts never share any.

        Nor does the only one of a layer: kv_proj of JetMoE.
        """
        why = self._draft.structure.ungrouped
        sites = [site for site in self._draft.structure.sites if site.expert is None and site.module in self._formats]
        layers = Counter(site.layer for site in sites)
        for site in sites if why else ():
            format_ = self._formats[site.module]
            alone = site.layer is not None and layers[site.layer] == 1
            if alone or not self._spelling.unifies(format_):
                continue
            if format_.prescales or has_tensor_scale(format_) or _one_tile(format_, self._shapes[site.module]):
                yield (
                    site.module,
                    f"shares scales with the modules that read the same input, which are unknown: {why}; use fp8, "
                    "fp8_pc_pt or int8_wo, which share none",
                )

    def _mixes(self) -> Iterator[tuple[str, str]]:
        """Modules in another format than the most, for spellings that name one format for the checkpoint."""
        kinds = Counter((format_.weight, format_.input) for format_ in self._formats.values())
        for module, format_ in self._formats.items() if not self._spelling.TRAITS.mixes and len(kinds) > 1 else ():
            if (format_.weight, format_.input) != kinds.most_common(1)[0][0]:
                yield module, MIXES

    def _order(self) -> list[str]:
        """The written tensors in the order of the model's modules; those outside the structure come last."""
        names = dict.fromkeys((*self._draft.structure.order, *self._copied))
        return [name for name in names if name in self._copied]

    def _steps(self, name: str) -> list[Step]:
        """The steps of one tensor: one, or those of all experts of a layer with the first of their tensors."""
        spec, site = self._copied[name]
        if name not in self._experts.stacks:
            return [self._step(spec, site)]
        return [matrix.reading(self._step(matrix.spec, matrix.site)) for matrix in self._experts.of_layer(name)]

    def _step(self, spec: TensorSpec, site: Site | None) -> Step:
        """The step of a matrix; one with a problem gets a plain step, since the plan fails anyway."""
        format_ = self._formats.get(site.module) if site else None
        problems = self._incompatibilities(spec, site, format_) if site and format_ else []
        if site is None or format_ is None or problems:
            self._drafted.problems += [(site.module, problem) for problem in problems if site]
            return self._plain_step(spec, site)
        return self._quantized_step(spec, site, format_)

    def _incompatibilities(self, spec: TensorSpec, site: Site, format_: Format) -> list[str]:
        if DTYPES[spec.dtype].bits < 16 or not DTYPES[spec.dtype].floating:
            return [f"a weight of dtype {spec.dtype} cannot be quantized; keep this module in a recipe"]
        group = self._groups.get(site.module)
        mixed = []
        if group and len({self._formats[module] for module in group.modules}) > 1:
            unlike = (module for module in group.modules if self._formats[module] != format_)
            others = ", ".join(dict.fromkeys(map(pattern, unlike)))  # without numbers, so that layers fold
            mixed = [f"reads the same input as {others}, and runtimes fuse these; give all of them one scheme"]
        return mixed + self._spelling.incompatibilities(format_, site, out_in(spec, site))

    def _quantized_step(self, spec: TensorSpec, site: Site, format_: Format) -> Step:
        shape = spec.shape if site.stacked else out_in(spec, site)
        group = self._groups.get(site.module)
        unified = group.modules if group and self._spelling.unifies(format_) else ()
        refits = is_refit(format_) and not self._draft.options.own_scales
        fused = fused_with(site.module, group.modules, self._formats) if refits and group else ()
        folded = site.module in self._folding.feeds or bool(group and self._folded.get(group.norm) is group)
        parts = self._spelling.parts(format_, site, shape, self._asked, folded)
        coding = self._spelling.coding(format_, site, spec.dtype, self._asked)
        if unified and all(_one_tile(format_, self._shapes[module]) for module in unified):
            # ModelOpt shares weight amax of one element
            format_ = replace(format_, weight=(Numeric(format_.weight[0].dtype, "tensor"),))
        shares = ""
        if has_tensor_scale(format_):
            joined = site.shares if refits or self._spelling.joins(format_) else ""
            shares = joined or (unified or fused or ("",))[0]
        return Step(
            (Slice(spec.name, module=site.module, transposed=site.layout == "in_out"),),
            tuple(part.output(_expression(part.part, format_, spec.name, len(unified), len(fused))) for part in parts),
            site,
            format_,
            coding=coding,
            transpose=self._spelling.TRAITS.transposed,
            shares=shares,
            unified=unified,
            feeds=self._folding.feeds_at(site.module),
        )

    def _plain_step(self, spec: TensorSpec, site: Site | None) -> Step:
        module = spec.name.rpartition(".")[0]
        group = self._folded.get(module)
        kept = self._draft.why_plain(spec, site)
        if site is None and spec.name == f"{module}.weight":
            # runtimes are given these together with the unquantized matrices
            if module in self._draft.structure.embeddings:
                site = Site(module, spec.name, "out_in", keep="embedding")
            elif module in self._routers:
                site = Site(module, spec.name, "out_in", keep="router")
            kept = site.keep if site else kept
        feeds = self._folding.feeds_at(module) if spec.name.endswith((".weight", ".bias")) else ()
        feeds = tuple(feed for feed in feeds if feed.writer == module)
        text = f"{spec.name} * pre_quant_scale" if group or feeds else spec.name
        written = replace(spec, dtype=self._asked) if spec.dtype == self._main else spec
        text = text if written == spec else f"cast({text}, {written.dtype})"
        return Step(
            (Slice(spec.name),),
            (Output(written, "weight", text),),
            site,
            kept=kept,
            folded=group.modules if group else (),
            plus_one=bool(group and group.plus_one and spec.name.endswith(".weight")),
            feeds=feeds,
        )

    def _kv_step(self, attention: str, kv: Numeric) -> Step:
        parts = self._spelling.kv_parts(attention, self._draft.options.dtype)
        outputs = tuple(part.output(f"{amax_words(kv, part.part[0])} / {kv.maxbound:g}") for part in parts)
        return Step((), outputs, attention=attention, kv=kv)

    def _assign_files(self, steps: Sequence[Step]) -> list[Step]:
        """Assign every output to its shard, in the order of the model's state dict."""
        limit = byte_count(self._draft.options.shard_size, "shard_size")
        files = divide(_state_order(steps), limit, names_for(self._draft.config, self._draft.folder))
        return [changed(s, outputs=tuple(changed(o, file=files[o.spec.name]) for o in s.outputs)) for s in steps]


def _one_tile(format_: Format, shape: tuple[int, int]) -> bool:
    block = format_.weight[0].block
    return len(block) == 2 and shape[0] <= block[0] and shape[1] <= block[1]


def _expression(part: str, format_: Format, name: str, group: int, fused: int) -> str:
    """How a part of a matrix follows from the source, for the plan's table."""
    first = format_.weight[0]
    weight = f"{name} / pre_quant_scale" if format_.prescales else name
    shared, joined = (f", the largest of {count}" if count >= MIN_GROUP else "" for count in (group, fused))
    match part:
        case "weight":
            return f"codes({weight})"
        case "scale":
            block = f" of {'×'.join(map(str, first.block))}" if first.block else ""
            return scale_words(format_, f"{weight}, {first.per}{block}", joined)
        case "scale_2":
            bound = 6 * first.largest_scale if len(format_.weight) == 1 else 448
            return f"amax({weight}){shared} / {bound:g}"
        case "input_scale":
            assert format_.input
            amax = amax_words(format_.input, "input") + ("" if format_.input.constant else shared)
            return f"{amax} / {format_.input.maxbound:g}"
        case "pre_quant_scale":
            return f"calibration: {format_.algorithm}{f', mean of {group}' if group >= MIN_GROUP else ''}"
    return part


def _state_order(steps: Sequence[Step]) -> list[TensorSpec]:
    """Tensors in state dict order: a module's own, its companions, KV scales last in their attention module."""
    companions: dict[str, list[TensorSpec]] = {}
    for step in steps:
        if step.site and step.format:
            holder = step.site.module.rpartition(".")[0] if step.site.stacked else step.site.module
            companions.setdefault(holder, []).extend(o.spec for o in step.outputs if o.part != "weight")
    scales = {step.attention: [o.spec for o in step.outputs] for step in steps if step.attention}
    ordered: list[TensorSpec] = []
    within = ""

    def leave(module: str) -> None:
        """Close every module that does not hold `module`."""
        nonlocal within
        while within and within != module:
            ordered.extend(companions.pop(within, []))
            if module.startswith(f"{within}."):
                return
            ordered.extend(scales.pop(within, []))
            within = within.rpartition(".")[0]

    for step in steps:
        for output in step.outputs if not step.attention else ():
            if output.part == "weight":
                module = output.spec.name.rpartition(".")[0]
                leave(module)
                within = module
                ordered.append(output.spec)
    leave("\0")
    return ordered
