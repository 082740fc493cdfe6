"""The rules of a layout that are possible here, and their cost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bridge.calibration.requirements import default_samples, flops_of
from bridge.core.errors import PlanError, SchemeError, UsageError
from bridge.core.machine import cores
from bridge.core.text import duration, nearest, number
from bridge.core.values import Structure, TensorSpec
from bridge.planning.plan import Plan
from bridge.quant.describe import chosen_words
from bridge.quant.schemes.catalog import BEST, RULE, candidates_by_default, layout_of, rules_of, without_data
from bridge.quant.schemes.group_size import with_dividing_blocks, with_group, with_zero_points
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.recipe import layout_asked, load_recipe
from bridge.quant.schemes.scheme import Scheme
from bridge.sources.source import Source

Planner = Callable[[Scheme], Plan]
Blocks = tuple[int | None, bool]  # their size, None for the scheme's own, and whether they have zero points
FINALISTS = 2  # of the rules, by errors of outputs; of these the divergence of the whole model is measured
FLOPS = 1e10  # a second of one core in float32, for a plan, which measures nothing; two cores at 2.5 GHz have 2 to 3e10


@dataclass(frozen=True)
class Candidate:
    """A rule, and the plan that writes a model by it."""

    name: str
    scheme: Scheme
    plan: Plan
    quant: Any = None
    """What asks for it: its name, or a recipe with this rule."""

    @property
    def demand(self) -> tuple[bool, bool]:
        """What it needs of a calibration: those with more come first, and the others may use theirs."""
        return bool(chosen_words(self.scheme.formats)), self.scheme.needs_calibration


@dataclass(frozen=True)
class Candidates:
    """The rules to choose from, those that need most of a calibration first.

    `name`: what was asked for. `refused`: other rules -> why they are impossible. `default`: the rule without data.
    """

    name: str
    layout: str
    rules: tuple[Candidate, ...]
    refused: Mapping[str, str]
    default: str

    @property
    def samples(self) -> int:
        """The default number of sequences: the largest of the rules'."""
        return max(default_samples(one.scheme) for one in self.rules)

    @property
    def without_data(self) -> Candidate:
        """The rule to take if nothing can be measured; SchemeError if all that are possible need data."""
        free = [one for one in self.rules if not one.scheme.needs_calibration]
        if not free:
            names = ", ".join(one.name for one in self.rules)
            raise SchemeError(f"quant={self.name!r}: {names} need a calibration, which is not possible here")
        return next((one for one in free if one.name == self.default), free[0])

    @property
    def calibrations(self) -> list[Candidate]:
        """The rules that a calibration is made for; the others use one of these."""
        needed = [one for one in self.rules if one.scheme.needs_calibration]
        own = [one for one in needed if one.demand[0]]
        return own or needed[:1]

    @property
    def runs(self) -> int:
        """Rules under which the whole model is run; none where one quantizes inputs of experts, which no hook does."""
        steps = [step for one in self.rules for step in one.plan.quantized if step.format and step.format.input]
        hidden = any(step.site and (step.site.stacked or step.site.expert is not None) for step in steps)
        return 0 if hidden else min(FINALISTS, len(self.rules))

    def planned(self, source: Source, structure: Structure, tokens: tuple[int, int]) -> Plan:
        """The plan of the rule that needs most, which names all. `tokens`: to calibrate with, and held out."""
        first = self.rules[0]
        return replace(first.plan, scheme=self.name, notes=(*first.plan.notes, self.line(source, structure, tokens)))

    def line(self, source: Source, structure: Structure, tokens: tuple[int, int]) -> str:
        """What will be measured, and what that costs."""
        names = ", ".join(one.name for one in self.rules)
        others = "".join(f"; not {name}: {why}" for name, why in self.refused.items())
        if len(self.rules) == 1 or not any(one.scheme.needs_calibration for one in self.rules):
            return f"{self.name} takes {self.without_data.name if len(self.rules) > 1 else names}{others}"
        work = self.work(source, structure, tokens)
        whole = f"{self.runs} of the whole model" if self.runs else "none of the whole model (inputs of its experts)"
        return (
            f"{self.name} measures {names} on {tokens[1]:,} held-out tokens and takes the best: "
            f"{number(len(self.calibrations), 'calibration')}, then {number(len(self.rules), 'comparison')} of each "
            f"matrix and {whole}, {work / 1e15:.2g} PFLOP, "
            f"{duration(work / (FLOPS * cores()))} at {FLOPS / 1e9:g} GFLOP/s a core{others}"
        )

    def work(self, source: Source, structure: Structure, tokens: tuple[int, int]) -> float:
        """FLOP of the choice: calibrations, errors of the outputs of each matrix, runs of the whole model."""
        calibrated, held = tokens
        made = sum(flops_of(source, structure, one.scheme, calibrated, held) for one in self.calibrations)
        weights = [source.specs[site.weight] for site in structure.sites if site.weight in source.specs]
        runs = 2.0 * held * (2 + self.runs) * sum(spec.size for spec in weights)
        return made + runs + 2.0 * (1 + len(self.rules)) * sum(_products(spec) for spec in weights)


def _products(spec: TensorSpec) -> int:
    return spec.size * spec.shape[-1]


def candidates_of(
    quant: str | Path,
    kv: str | None,
    structure: Structure,
    source: Source,
    planned: Planner,
    only: str | Sequence[str] | None = None,
    blocks: Blocks = (None, False),
) -> Candidates:
    """The rules of `int4:best` that `planned` does not refuse; SchemeError with all reasons if it refuses all.

    Of a recipe that asks for it, the recipe with each rule.
    `only`: the rules to choose from, "gptq,imatrix"; UsageError if one is unknown or impossible. `blocks`: their size
    and zero points, as `scheme_of` takes them.
    """
    path = layout_asked(quant)
    assert path
    asked, rules, refused = _asked(only, path), [], {}
    of_recipe = layout_of(quant) is None
    stem = Path(quant).stem if of_recipe else path.stem
    for rule in asked or candidates_by_default(path):
        name = f"{stem}{RULE}{rule}"
        try:
            one = load_recipe(Path(quant), rule) if of_recipe else name
            sized = with_zero_points(with_group(load_scheme(one, kv), blocks[0]), blocks[1])
            scheme = with_dividing_blocks(sized.bound(structure.sites), structure, source.specs)
            rules.append(Candidate(name, scheme, planned(scheme), one))
        except (PlanError, SchemeError) as error:
            if len(asked) == 1:
                raise
            if asked:
                raise UsageError(
                    f"candidates={_words(only)!r} (--candidates): {name} is impossible here: {error}"
                ) from error
            refused[name] = str(error)
    if not rules:
        raise SchemeError("\n  ".join([f"quant={quant!r}: no rule is possible here", *map(": ".join, refused.items())]))
    rules.sort(key=lambda one: one.demand, reverse=True)
    why = {name: _reason(text) for name, text in refused.items()}
    free = without_data(path).replace(path.stem, stem, 1)
    return Candidates(f"{stem}{RULE}{BEST}", path.stem, tuple(rules), why, free)


def _reason(text: str) -> str:
    """The reason in the last line of an error, without the modules before it."""
    line = text.split("\n")[-1].strip()
    return line.partition(": ")[2] or line


def check_unused(candidates: object, quant: Any) -> None:
    """UsageError for candidates without a choice among rules."""
    if candidates is not None:
        raise UsageError(
            f"candidates= (--candidates) narrows the choice of a name such as int4:best, and quant is {quant!r}"
        )


def _asked(only: str | Sequence[str] | None, path: Path) -> list[str]:
    """The rules that were asked for, each once; UsageError if one is unknown, or if the text names none."""
    if only is None:
        return []
    if not (isinstance(only, Collection) and all(isinstance(word, str) for word in only)):
        raise UsageError(f"candidates={only!r} (--candidates): give names of rules, 'gptq,imatrix' or a list of them")
    known, layout = rules_of(path), f"{path.stem}{RULE}"
    found = [word.strip().lower().removeprefix(layout) for word in _listed(only)]
    for word in found or [""]:
        if word not in known:
            raise UsageError(
                f"candidates={_words(only)!r} (--candidates): {path.stem} has no rule {word!r}; {nearest(word, known)}"
            )
    return [*dict.fromkeys(found)]


def _listed(only: str | Iterable[str]) -> list[str]:
    return only.split(",") if isinstance(only, str) else [*only]


def _words(only: str | Iterable[str] | None) -> str:
    return ",".join(_listed(only or []))
