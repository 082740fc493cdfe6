"""Fills a user's `tp.Module` with what target tripy wrote; names every difference first, and then loads nothing.

nvtripy checks names, then shapes and dtypes up to the first that differs; what decides the numbers (the quantized
dtype, the axis of the scales, the layout of blocks, a pre-scale) it cannot know. All of that is compared here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.container import SafetensorsFile
from bridge.errors import PlanError, SourceError, UsageError, fold_problems
from bridge.planning import DEFAULT_FILE, Plan
from bridge.sources.loading import as_tensor
from bridge.tripy.config import section
from bridge.tripy.frontend import nvtripy
from bridge.tripy.lint import contract
from bridge.tripy.prefixes import Prefixes, found_prefixes
from bridge.tripy.section import Entry, read_section
from bridge.values import TensorSpec

BESIDE = (".weight_scale", ".input_scale", ".pre_quant_scale")
LOADED = "_loaded_by_bridge"  # on a module: names that are no tensors of its own, though they have values now
Problems = Iterator[tuple[str, str]]  # a tensor or a part of the module, and what is wrong with it


def load(directory: str | Path, module: Any) -> None:
    """Load what target tripy wrote into `module`, strictly; PlanError lists all that differs, and nothing is loaded.

    Tensors that the user's own classes made themselves, a causal mask for one, are left as they are. A tensor that the
    file holds under two names needs one of them in the module: a head may be the embedding, transposed.

    >>> load("tiny-gpt2-int8", GPT(config))  # doctest: +SKIP
    """
    found, _ = read_section(directory)
    tp, where = nvtripy(), Path(directory)
    file = SafetensorsFile(where / DEFAULT_FILE)
    if broken := fold_problems(contract(file, found)):
        raise SourceError("\n  ".join([f"{where}: its files contradict each other; nothing was loaded:", *broken]))
    own = fit(Written(file.specs, found.modules, found.copies), module, str(where))
    expected = module.state_dict()
    taken = {name: spec for name, spec in file.specs.items() if name in expected}
    state = {name: tp.Tensor(as_tensor(file.read(name), spec.dtype)) for name, spec in taken.items()}
    module.load_state_dict(state, strict=not own)
    object.__setattr__(module, LOADED, frozenset(state) | getattr(module, LOADED, frozenset()))


def fit(written: Written, module: Any, where: str) -> set[str]:
    """Compare what was written, or is planned, with a module; PlanError lists all that differs.

    Returns the names of tensors that the module's own classes made, which nothing is loaded into.
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
    settled = {name for name, _ in problems}  # their scales differ for a reason that is told
    problems += _tensors(parts, expected, own, settled, written)
    if problems:
        lines = fold_problems(problems)
        raise PlanError("\n  ".join([f"{where} does not fit {type(module).__name__}; nothing was loaded:", *lines]))
    return own


@dataclass(frozen=True)
class Written:
    """What a directory holds: its tensors, quantized modules, and which names are second ones."""

    specs: Mapping[str, TensorSpec]
    modules: Mapping[str, Entry]
    copies: Mapping[str, str]

    @staticmethod
    def planned(plan: Plan) -> Written:
        """What a conversion will write."""
        said = section(plan)
        modules = {name: Entry(**row) for name, row in said["modules"].items()}
        return Written({output.spec.name: output.spec for output in plan.outputs}, modules, said["copies"])

    def under(self, prefixes: Prefixes) -> Written:
        """The same with the module's names."""
        new = prefixes.renamed
        copies = {new(name): new(first) for name, first in self.copies.items()}
        specs = {new(name): spec for name, spec in self.specs.items()}
        return Written(specs, {new(name): entry for name, entry in self.modules.items()}, copies)

    def surplus(self, expected: Mapping[str, Any]) -> list[str]:
        """Tensors that the module has under no name."""
        held = {self.copies.get(name, name) for name in expected}
        return [name for name in self.specs if name not in expected and self.copies.get(name, name) not in held]


def _prefixes(expected: Mapping[str, Any], own: set[str], written: Written) -> Prefixes | None:
    """What the module's names begin with instead of what the file's do; scales may differ for another reason."""
    lacking = [name for name in expected if name not in written.specs and name not in own]
    return found_prefixes(
        *([name for name in names if not name.endswith(BESIDE)] for names in (written.surplus(expected), lacking))
    )


def parts_of(module: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every module inside, by its full name."""
    for name, child in module.named_children():
        yield prefix + name, child
        yield from parts_of(child, f"{prefix}{name}.")


def _own(tp: Any, module: Any, parts: Mapping[str, Any], expected: Mapping[str, Any], written: Written) -> set[str]:
    """Tensors with a value that the file lacks, in classes that are neither Tripy's nor ours: not parameters.

    What an earlier load filled is one.
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


def _quantization(tp: Any, parts: Mapping[str, Any], written: Written) -> Problems:
    """Where module and file do not quantize alike; a user's class that does not say how it quantizes is trusted."""
    from bridge.tripy.layers import BlockLinear

    for name, part in parts.items():
        entry, quantized = written.modules.get(name), getattr(part, "quant_dtype", None)
        if entry is None:
            if quantized is not None:
                yield name, f"{quantized.name} in the module, not quantized in the file; leave out quant_dtype"
            continue
        wanted = _wanted(name, entry, written.specs)
        if entry.layout == "in_out" and isinstance(part, tp.Linear):
            yield name, f"stored [in, out] in blocks along `in`, which tp.Linear cannot hold; {wanted}"
        elif entry.layout == "out_in" and isinstance(part, BlockLinear):
            yield name, f"stored [out, in], which BlockLinear does not hold; {wanted}"
        elif hasattr(part, "quant_dtype") and quantized is None:
            yield name, f"{entry.quant_dtype} in the file, not quantized in the module; {wanted}"
        elif quantized is not None and quantized.name != entry.quant_dtype:
            yield name, f"{entry.quant_dtype} in the file, {quantized.name} in the module; {wanted}"
        elif (along := getattr(part, "weight_quant_dim", entry.weight_quant_dim)) != entry.weight_quant_dim:
            yield name, f"weight_quant_dim {entry.weight_quant_dim} in the file, {along} in the module; {wanted}"
        elif entry.pre_quant_scale and getattr(part, "pre_quant_scale", None) is None:
            yield name, f"with a pre-scale in the file, by which the input must be multiplied; {wanted}"


def _wanted(name: str, entry: Entry, specs: Mapping[str, TensorSpec]) -> str:
    """What to write in the module instead."""
    if entry.layout == "in_out" and (weight := specs.get(f"{name}.weight")):
        settings = f"{', '.join(map(str, weight.shape))}, bias={f'{name}.bias' in specs}, dtype=tp.{weight.dtype}"
        return (
            f"write bridge.tripy.layers.BlockLinear({settings}, block={entry.block}, "
            f"pre_quant_scale={entry.pre_quant_scale}), "
            "or convert with quant='int4_wo', linear=True, which tp.Linear holds at a loss, without a pre-scale"
        )
    settings = f"quant_dtype=tp.{entry.quant_dtype}, weight_quant_dim={entry.weight_quant_dim}"
    return f"write {'bridge.tripy.layers.SmoothLinear' if entry.pre_quant_scale else 'tp.Linear'}(..., {settings})"


def _tensors(
    parts: Mapping[str, Any], expected: Mapping[str, Any], own: set[str], settled: set[str], written: Written
) -> Problems:
    """Names, shapes and dtypes that differ, but for the scales of parts that are `settled`."""
    from nvtripy.frontend.module.parameter import OptionalParameter

    def told(name: str) -> bool:
        return name.endswith(BESIDE) and name.rpartition(".")[0] in settled

    for name, value in expected.items():
        needed = not isinstance(value, OptionalParameter) and not told(name)
        if needed and name not in written.specs and name not in own:
            yield name, "missing in the file"
    for name in written.surplus(expected):
        if not told(name):
            yield name, "in the file, but no parameter of the module"
    for name, spec in written.specs.items():
        if name not in expected or told(name):
            continue
        value = expected[name]
        if value.dtype.name != spec.dtype:
            yield (
                name,
                f"{spec.dtype} in the file, {value.dtype.name} in the module; convert with "
                f"dtype='{value.dtype.name}', or build the module in tp.{spec.dtype}",
            )
        stored = _stored(name, parts, written)
        if value.shape is not None and tuple(map(int, value.shape)) != stored:  # tp.Linear has None for any shape
            yield name, f"shape {stored} in the file, {tuple(map(int, value.shape))} in the module"


def _stored(name: str, parts: Mapping[str, Any], written: Written) -> tuple[int, ...]:
    """The shape in the file, turned to how the module holds it, since `_quantization` tells that they differ."""
    from bridge.tripy.layers import BlockLinear

    owner, _, last = name.rpartition(".")
    shape, entry = written.specs[name].shape, written.modules.get(owner)
    turned = entry is not None and (entry.layout == "in_out") != isinstance(parts.get(owner), BlockLinear)
    return shape[::-1] if turned and last == "weight" else shape
