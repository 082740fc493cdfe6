"""Load an output into a user's `tp.Module`, if both agree.

nvtripy checks names, and shapes and dtypes up to the first difference. It cannot check the settings that decide the
numbers: the quantized dtype, the axis of the scales, the layout of blocks, a pre_quant_scale. All of them are compared
here, and every difference is reported before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from bridge.core.errors import PlanError, SourceError, UsageError
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.core.text import fold_problems
from bridge.core.values import TensorSpec
from bridge.planning.plan import DEFAULT_FILE, Plan
from bridge.sources.live_models.loading import as_tensor
from bridge.targets.tripy.frontend import nvtripy
from bridge.targets.tripy.lint import Problems, contract
from bridge.targets.tripy.section import Entry, read_section, section_of

COMPANIONS = (".weight_scale", ".input_scale", ".pre_quant_scale")
LOADED = "_loaded_by_bridge"  # on a module: names that have values now, but not tensors of its own class


def load(directory: str | Path, module: Any) -> None:
    """Load an output of target tripy into `module`, strictly; PlanError lists all differences, and nothing is loaded.

    Tensors that the user's own classes made, such as a causal mask, are left as they are. A tensor that the file has
    under two names needs one of them in the module: a head may be the embedding, transposed.

    >>> load("tiny-gpt2-int8", GPT(config))  # doctest: +SKIP
    """
    section, _ = read_section(directory)
    tp, where = nvtripy(), Path(directory)
    file = SafetensorsFile(where / DEFAULT_FILE)
    if broken := fold_problems(contract(file, section)):
        raise SourceError("\n  ".join([f"{where}: its files contradict each other; nothing was loaded:", *broken]))
    own = fit(StateDictFiles(file.specs, section.modules, section.copies), module, str(where))
    expected = module.state_dict()
    taken = {name: spec for name, spec in file.specs.items() if name in expected}
    state = {name: tp.Tensor(as_tensor(file.read(name), spec.dtype)) for name, spec in taken.items()}
    module.load_state_dict(state, strict=not own)
    object.__setattr__(module, LOADED, frozenset(state) | getattr(module, LOADED, frozenset()))


def fit(written: StateDictFiles, module: Any, where: str) -> set[str]:
    """Compare a written or planned state dict with a module; PlanError lists all differences.

    Returns the names of tensors that the module's own classes made; nothing is loaded into them.
    """
    tp = nvtripy()
    if not isinstance(module, tp.Module):
        raise UsageError(f"load takes a tp.Module to fill, not {type(module).__name__}; build(directory) makes one")
    parts, expected = dict(parts_of(module)), module.state_dict()
    own = _own(tp, module, parts, expected, written)
    problems: list[tuple[str, str]] = []
    if renamed := _prefixes(expected, own, written):
        problems.append(("", str(renamed)))
        written = written.under(renamed)
        own = _own(tp, module, parts, expected, written)
    problems += _quantization(tp, parts, written)
    reported = {name for name, _ in problems}  # their scales differ for the reported reason
    problems += _tensors(parts, expected, own, reported, written)
    if problems:
        lines = fold_problems(problems)
        raise PlanError("\n  ".join([f"{where} does not fit {type(module).__name__}; nothing was loaded:", *lines]))
    return own


@dataclass(frozen=True)
class StateDictFiles:
    """The content of a directory: tensors, quantized modules, and second names of tensors."""

    specs: Mapping[str, TensorSpec]
    modules: Mapping[str, Entry]
    copies: Mapping[str, str]

    @staticmethod
    def planned(plan: Plan) -> StateDictFiles:
        """The content that a plan will write."""
        section = section_of(plan)
        return StateDictFiles({o.spec.name: o.spec for o in plan.outputs}, section.modules, section.copies)

    def under(self, prefixes: Prefixes) -> StateDictFiles:
        """The same under the module's names."""
        new = prefixes.renamed
        copies = {new(name): new(first) for name, first in self.copies.items()}
        specs = {new(name): spec for name, spec in self.specs.items()}
        return StateDictFiles(specs, {new(name): entry for name, entry in self.modules.items()}, copies)

    def surplus(self, expected: Mapping[str, Any]) -> list[str]:
        """Tensors that the module has under none of their names."""
        present = {self.copies.get(name, name) for name in expected}
        return [name for name in self.specs if name not in expected and self.copies.get(name, name) not in present]


def _prefixes(expected: Mapping[str, Any], own: set[str], written: StateDictFiles) -> Prefixes | None:
    """The prefixes in which the module's names differ from the file's; scales may differ for another reason."""
    lacking = [name for name in expected if name not in written.specs and name not in own]
    names = (written.surplus(expected), lacking)
    return differing_prefixes(*([name for name in side if not name.endswith(COMPANIONS)] for side in names))


def parts_of(module: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every module inside, by its full name."""
    for name, child in module.named_children():
        yield prefix + name, child
        yield from parts_of(child, f"{prefix}{name}.")


def _own(
    tp: Any, module: Any, parts: Mapping[str, Any], expected: Mapping[str, Any], written: StateDictFiles
) -> set[str]:
    """Tensors that have a value, are not in the file, and belong to classes that are neither Tripy's nor ours.

    They are not parameters. A tensor that an earlier load filled is one.
    """
    owners = {"": module} | dict(parts)
    loaded: frozenset[str] = getattr(module, LOADED, frozenset())
    return {
        name
        for name, value in expected.items()
        if name not in written.specs
        and name not in loaded
        and isinstance(value, tp.Tensor)
        and not type(owners.get(name.rpartition(".")[0], module)).__module__.startswith(("nvtripy.", "bridge."))
    }


def _quantization(tp: Any, parts: Mapping[str, Any], written: StateDictFiles) -> Problems:
    """Differences in quantization; a user's class without quantization attributes is trusted."""
    from bridge.targets.tripy.models.layers import BlockLinear

    for name, part in parts.items():
        entry, quantized = written.modules.get(name), getattr(part, "quant_dtype", None)
        if entry is None:
            if quantized is not None:
                yield name, f"{quantized.name} in the module, not quantized in the file; leave out quant_dtype"
            continue
        remedy = _remedy(name, entry, written.specs)
        if entry.layout == "in_out" and isinstance(part, tp.Linear):
            yield name, f"stored [in, out] in blocks along `in`, which tp.Linear cannot hold; {remedy}"
        elif entry.layout == "out_in" and isinstance(part, BlockLinear):
            yield name, f"stored [out, in], which BlockLinear does not hold; {remedy}"
        elif hasattr(part, "quant_dtype") and quantized is None:
            yield name, f"{entry.quant_dtype} in the file, not quantized in the module; {remedy}"
        elif quantized is not None and quantized.name != entry.quant_dtype:
            yield name, f"{entry.quant_dtype} in the file, {quantized.name} in the module; {remedy}"
        elif (along := getattr(part, "weight_quant_dim", entry.weight_quant_dim)) != entry.weight_quant_dim:
            yield name, f"weight_quant_dim {entry.weight_quant_dim} in the file, {along} in the module; {remedy}"
        elif entry.pre_quant_scale and getattr(part, "pre_quant_scale", None) is None:
            yield name, f"has a pre-scale in the file, which the input must be multiplied by; {remedy}"


def _remedy(name: str, entry: Entry, specs: Mapping[str, TensorSpec]) -> str:
    if entry.layout == "in_out" and (weight := specs.get(f"{name}.weight")):
        settings = f"{', '.join(map(str, weight.shape))}, bias={f'{name}.bias' in specs}, dtype=tp.{weight.dtype}"
        return (
            f"write bridge.targets.tripy.models.layers.BlockLinear({settings}, block={entry.block}, "
            f"pre_quant_scale={entry.pre_quant_scale}), "
            "or convert with quant='int4_wo', linear=True, which tp.Linear holds at a loss, without a pre-scale"
        )
    settings = f"quant_dtype=tp.{entry.quant_dtype}, weight_quant_dim={entry.weight_quant_dim}"
    linear = "bridge.targets.tripy.models.layers.SmoothLinear" if entry.pre_quant_scale else "tp.Linear"
    return f"write {linear}(..., {settings})"


def _tensors(
    parts: Mapping[str, Any], expected: Mapping[str, Any], own: set[str], reported: set[str], written: StateDictFiles
) -> Problems:
    """Differences in names, shapes and dtypes, except scales of parts that are `reported` already."""
    from nvtripy.frontend.module.parameter import OptionalParameter

    def known(name: str) -> bool:
        return name.endswith(COMPANIONS) and name.rpartition(".")[0] in reported

    for name, value in expected.items():
        needed = not isinstance(value, OptionalParameter) and not known(name)
        if needed and name not in written.specs and name not in own:
            yield name, "missing in the file"
    for name in written.surplus(expected):
        if not known(name):
            yield name, "in the file, but not a parameter of the module"
    for name, spec in written.specs.items():
        if name not in expected or known(name):
            continue
        value = expected[name]
        if value.dtype.name != spec.dtype:
            other = value.dtype.name
            remedy = f"convert with dtype='{other}', or build the module in tp.{spec.dtype}"
            yield name, f"{spec.dtype} in the file, {other} in the module; {remedy}"
        stored = _stored(name, parts, written)
        if value.shape is not None and tuple(map(int, value.shape)) != stored:  # tp.Linear has None for any shape
            yield name, f"shape {stored} in the file, {tuple(map(int, value.shape))} in the module"


def _stored(name: str, parts: Mapping[str, Any], written: StateDictFiles) -> tuple[int, ...]:
    """The shape in the file, in the module's axes if these differ, since `_quantization` reports that."""
    from bridge.targets.tripy.models.layers import BlockLinear

    owner, _, last = name.rpartition(".")
    shape, entry = written.specs[name].shape, written.modules.get(owner)
    transposed = entry is not None and (entry.layout == "in_out") != isinstance(parts.get(owner), BlockLinear)
    return shape[::-1] if transposed and last == "weight" else shape


@dataclass(frozen=True)
class Prefixes:
    """Prefixes of the names in a file and in a module; each is empty or ends with a dot."""

    file: str
    module: str

    def __str__(self) -> str:
        file, module = self.file[:-1], self.module[:-1]
        if not module:
            return f"names begin with {self.file!r} in the file only; make this module the part {file!r} of another"
        if not file:
            return f"names begin with {self.module!r} in the module only; load its part {module!r} alone"
        return f"names begin with {self.file!r} in the file, with {self.module!r} in the module; call it {file!r} there"

    def renamed(self, name: str) -> str:
        """The module's name for a name of the file."""
        return self.module + name[len(self.file) :] if name.startswith(self.file) else name


def differing_prefixes(surplus: Sequence[str], lacking: Sequence[str]) -> Prefixes | None:
    """The only pair of prefixes that turns all names of one side into names of the other; None if there is none.

    >>> differing_prefixes(["transformer.wte.weight", "transformer.h.0.bias"], ["body.wte.weight", "body.h.0.bias"])
    Prefixes(file='transformer.', module='body.')
    """
    candidates = {Prefixes(file, module) for file, module in _prefix_pairs(surplus, lacking)}
    candidates |= {Prefixes(file, module) for module, file in _prefix_pairs(lacking, surplus)}
    return candidates.pop() if len(candidates) == 1 else None


def _prefix_pairs(some: Sequence[str], whole: Sequence[str]) -> set[tuple[str, str]]:
    """Pairs of prefixes such that exchanging them turns all of `whole` into names of `some`."""
    if not whole:
        return set()
    known, owners = set(some), [name.split(".")[:-1] for name in whole]
    shared = takewhile(lambda pair: pair[0] == pair[1], zip(min(owners), max(owners), strict=False))
    ours = "".join(f"{part}." for part, _ in shared)
    rest = whole[0].removeprefix(ours)
    theirs = [name.removesuffix(rest) for name in some if name == rest or name.endswith(f".{rest}")]
    pairs = [(prefix, ours) for prefix in theirs if all(prefix + name.removeprefix(ours) in known for name in whole)]
    return {_shortest(*pair) for pair in pairs}


def _shortest(*prefixes: str) -> tuple[str, str]:
    """Drop equal components at the end of both."""
    one, other = (prefix.split(".")[:-1] for prefix in prefixes)
    while one and other and one[-1] == other[-1]:
        one.pop(), other.pop()
    return "".join(f"{part}." for part in one), "".join(f"{part}." for part in other)
