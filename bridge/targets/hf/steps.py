"""The steps of target `hf`: every tensor of a unified checkpoint, in the order of the modules; reads no weight."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

from bridge.dtypes import DTYPES
from bridge.errors import fold_problems
from bridge.planning import Draft, Drafted, Output, Step
from bridge.quant.scheme import has_tensor_scale
from bridge.show import pattern
from bridge.unified import Part, Spelling
from bridge.unified.exclude import routers
from bridge.unified.shards import divide, parse_size
from bridge.values import Format, InputGroup, Numeric, Site, Slice, TensorSpec

MANY = 2  # a group of one shares nothing
APART = (
    "these read one input and differ in format: runtimes that fuse them (vLLM, SGLang) refuse it; name all in one rule"
)


class Drafting:
    """Makes the steps of one plan; the groups of modules that read one input decide what is shared and folded."""

    def __init__(self, draft: Draft, spelling: Spelling) -> None:
        self._draft, self._spelling = draft, spelling
        self._formats = draft.quantized
        self._drafted = Drafted()
        self._carried = {
            (site.weight if site and site.weight in draft.structure.tied else spec.name): (spec, site)
            for spec, site in draft.carried()
        }
        self._shapes = {site.module: _out_in(spec, site) for spec, site in self._carried.values() if site}
        self._groups = {module: group for group in self._shared() for module in group.modules}
        self._folded = {group.norm: group for group in self._folding()}
        self._routers = routers(draft.specs)

    def drafted(self) -> Drafted:
        """Every step, its outputs assigned to files, and every problem."""
        scheme = self._draft.scheme
        self._drafted.problems += self._unknown()
        steps = [self._made(name) for name in self._order()]
        if scheme and scheme.kv:
            steps += [self._kv_step(module, scheme.kv) for module in self._draft.structure.attention]
        self._drafted.steps = self._filed(steps)
        self._drafted.notes += fold_problems(self._apart())
        return self._drafted

    def _apart(self) -> Iterator[tuple[str, str]]:
        """Modules of which a recipe keeps some that are fused with quantized ones; vLLM's `is_layer_skipped` raises."""
        chosen = {site.module for site in self._draft.structure.sites if not site.keep}
        for group in self._draft.structure.groups:
            fused: dict[str, list[str]] = {}  # attention and MLP may read one input: each is fused in itself
            for module in group.modules:
                if module in chosen:
                    fused.setdefault(module.rpartition(".")[0], []).append(module)
            for members in fused.values():
                if len({module in self._formats for module in members}) > 1:
                    yield from ((module, APART) for module in members)

    def _unknown(self) -> Iterator[tuple[str, str]]:
        """Modules that would share something with others, where nobody knows which those are; experts never do."""
        why = self._draft.structure.ungrouped
        for site in self._draft.structure.sites if why else ():
            format_ = self._formats.get(site.module)
            if format_ is None or site.expert is not None or not self._spelling.unifies(format_):
                continue
            if format_.prescales or has_tensor_scale(format_) or _one_tile(format_, self._shapes[site.module]):
                yield (
                    site.module,
                    f"shares scales with what reads the same input, and that is not known: {why}; use fp8, fp8_pc_pt "
                    "or int8_wo, which share none",
                )

    def _order(self) -> list[str]:
        """The written tensors in the order of the model's modules; what the structure has no place for comes last."""
        return list(
            dict.fromkeys(name for name in (*self._draft.structure.order, *self._carried) if name in self._carried)
        )

    def _made(self, name: str) -> Step:
        """The step of one tensor; a tensor with a problem is planned as it is, since no plan comes of it."""
        spec, site = self._carried[name]
        format_ = self._formats.get(site.module) if site else None
        problems = self._misfits(spec, site, format_) if site and format_ else []
        if site is None or format_ is None or problems:
            self._drafted.problems += [(site.module, problem) for problem in problems if site]
            return self._plain_step(spec, site)
        return self._quantized_step(spec, site, format_)

    def _misfits(self, spec: TensorSpec, site: Site, format_: Format) -> list[str]:
        if DTYPES[spec.dtype].bits < 16 or not DTYPES[spec.dtype].floating:
            return [f"a weight of dtype {spec.dtype} cannot be quantized; keep this module in a recipe"]
        group = self._groups.get(site.module)
        mixed = []
        if group and len({self._formats[module] for module in group.modules}) > 1:
            unlike = (module for module in group.modules if self._formats[module] != format_)
            others = ", ".join(dict.fromkeys(map(pattern, unlike)))  # without numbers, so that layers fold
            mixed = [f"reads the same input as {others}, and runtimes fuse them; give all of them one scheme"]
        return mixed + self._spelling.misfits(format_, site, _out_in(spec, site))

    def _quantized_step(self, spec: TensorSpec, site: Site, format_: Format) -> Step:
        shape = spec.shape if site.stacked else _out_in(spec, site)
        group = self._groups.get(site.module)
        unified = group.modules if group and self._spelling.unifies(format_) else ()
        folded = bool(group and self._folded.get(group.norm) is group)
        parts = self._spelling.parts(format_, site, shape, spec.dtype, folded)
        coding = self._spelling.coding(format_, site, spec.dtype, self._draft.options.dtype or spec.dtype)
        if unified and all(_one_tile(format_, self._shapes[module]) for module in unified):
            # ModelOpt shares weight amax of one element
            format_ = dataclasses.replace(format_, weight=(Numeric(format_.weight[0].dtype, "tensor"),))
        shares = ""
        if has_tensor_scale(format_):
            joined = site.shares if self._spelling.joins(format_) else ""
            shares = joined or (unified[0] if unified else "")
        return Step(
            (Slice(spec.name, module=site.module, transposed=site.layout == "in_out"),),
            tuple(_output(part, format_, spec, len(unified)) for part in parts),
            site,
            format_,
            coding=coding,
            shares=shares,
            unified=unified,
        )

    def _plain_step(self, spec: TensorSpec, site: Site | None) -> Step:
        module = spec.name.rpartition(".")[0]
        group = self._folded.get(module)
        kept = self._draft.why_plain(spec, site)
        if site is None and spec.name == f"{module}.weight":
            # told to runtimes with the matrices that stay unquantized
            if module in self._draft.structure.embeddings:
                site = Site(module, spec.name, "out_in", keep="embedding")
            elif module in self._routers:
                site = Site(module, spec.name, "out_in", keep="router")
            kept = site.keep if site else kept
        text = f"{spec.name} * pre_quant_scale" if group else spec.name
        return Step(
            (Slice(spec.name),),
            (Output(spec, "weight", text),),
            site,
            kept=kept,
            folded=group.modules if group else (),
            plus_one=bool(group and group.plus_one and spec.name.endswith(".weight")),
        )

    def _kv_step(self, attention: str, kv: Numeric) -> Step:
        outputs = [
            Output(
                TensorSpec(part.name, part.shape, part.dtype),
                part.part,
                f"calibration: {part.part[0]} amax / {kv.maxbound:g}",
            )
            for part in self._spelling.kv_parts(attention, self._draft.options.dtype)
        ]
        return Step((), tuple(outputs), attention=attention, kv=kv)

    def _shared(self) -> Iterator[InputGroup]:
        """Groups cut to their quantized members, where two or more are left."""
        readings = Counter(module for group in self._draft.structure.groups for module in dict.fromkeys(group.modules))
        for group in self._draft.structure.groups:
            members = tuple(dict.fromkeys(module for module in group.modules if module in self._formats))
            if len(members) >= MANY:
                # an unquantized member reads the norm as it is; one that runs twice has only one pre-scale
                alone = group.alone and all(m in members and readings[m] == 1 for m in group.modules)
                yield dataclasses.replace(group, modules=members, alone=alone)

    def _folding(self) -> Iterator[InputGroup]:
        """Groups whose pre-scale goes into their norm: nothing else reads it, and the norm has no second group."""
        norms = [group.norm for group in self._draft.structure.groups]
        for group in dict.fromkeys(self._groups.values()):
            formats = {self._formats[module] for module in group.modules}
            folds = len(formats) == 1 and all(f.prescales and self._spelling.folds(f) for f in formats)
            weighted = f"{group.norm}.weight" in self._carried  # a norm may have none
            if group.norm and weighted and group.alone and folds and norms.count(group.norm) == 1:
                yield group

    def _filed(self, steps: Sequence[Step]) -> list[Step]:
        """Assign every output to its shard, in the order in which a model's state dict has them."""
        limit = parse_size(self._draft.options.shard_size)
        files = divide(_state_order(steps), limit)
        return [
            dataclasses.replace(
                step, outputs=tuple(dataclasses.replace(o, file=files[o.spec.name]) for o in step.outputs)
            )
            for step in steps
        ]


def _out_in(spec: TensorSpec, site: Site) -> tuple[int, int]:
    if site.layout in ("out_in", "conv"):
        out, in_ = spec.shape[:2]
    else:
        in_, out = spec.shape[-2:]
    return out, in_


def _one_tile(format_: Format, shape: tuple[int, int]) -> bool:
    block = format_.weight[0].block
    return len(block) == 2 and shape[0] <= block[0] and shape[1] <= block[1]


def _output(part: Part, format_: Format, spec: TensorSpec, group: int) -> Output:
    first = format_.weight[0]
    weight = f"{spec.name} / pre_quant_scale" if format_.prescales else spec.name
    block = f" of {'×'.join(map(str, first.block))}" if first.block else ""
    bound = f"{first.maxbound:g}"
    shared = f", the largest of {group}" if group >= MANY else ""
    text = {
        "weight": f"codes({weight})",
        "scale": f"amax({weight}, {first.per}{block}) / {bound}",
        "scale_2": f"amax({weight}){shared} / {6 * 448 if len(format_.weight) == 1 else 448}",
        "input_scale": f"calibration: input amax{shared} / {format_.input.maxbound if format_.input else 1:g}",
        "pre_quant_scale": f"calibration: {format_.algorithm}{f', mean of {group}' if group >= MANY else ''}",
    }
    return Output(TensorSpec(part.name, part.shape, part.dtype), part.part, text.get(part.part, part.part))


def _state_order(steps: Sequence[Step]) -> list[TensorSpec]:
    """Tensors as a state dict has them: a module's own, its companions, KV scales last in their attention module."""
    companions: dict[str, list[TensorSpec]] = {}
    for step in steps:
        if step.site and step.format:
            holder = step.site.module.rpartition(".")[0] if step.site.stacked else step.site.module
            companions.setdefault(holder, []).extend(o.spec for o in step.outputs if o.part != "weight")
    scales = {step.attention: [o.spec for o in step.outputs] for step in steps if step.attention}
    found: list[TensorSpec] = []
    within = ""

    def leave(module: str) -> None:
        """Close every module that does not hold `module`."""
        nonlocal within
        while within and within != module:
            found.extend(companions.pop(within, []))
            if module.startswith(f"{within}."):
                return
            found.extend(scales.pop(within, []))
            within = within.rpartition(".")[0]

    for step in steps:
        for output in step.outputs if not step.attention else ():
            if output.part == "weight":
                module = output.spec.name.rpartition(".")[0]
                leave(module)
                within = module
                found.append(output.spec)
    leave("\0")
    return found
