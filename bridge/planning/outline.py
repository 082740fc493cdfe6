"""One module of each kind of a plan, for questions about all."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from bridge.core.text import numbered, pattern
from bridge.core.values import Format, main_dtype
from bridge.planning.plan import Layout, Plan, Step


@dataclass(frozen=True)
class Outline:
    """A plan without the repetitions of its layers and experts.

    `plan`: of its steps those of modules and caches; of alike layers the first, and of its alike experts the first.
    `members`: a module of it -> the modules that it stands for. `dtype`: of most values that stay unquantized, in all
    layers.
    """

    plan: Plan
    members: Mapping[str, Sequence[str]]
    dtype: str

    def every(self, problems: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str]]:
        """Problems of the outline's modules, "" for none, as those of all modules of the plan."""
        for module, why in problems:
            yield from ((member, why) for member in self.members.get(module, (module,)))


class _Item(NamedTuple):
    """A step, with the name of its module cut at numbers."""

    texts: list[str]
    numbers: list[int]
    kind: int
    module: str
    step: Step


class _Group(NamedTuple):
    """What has one number in its name: a layer, an expert; or the whole model.

    `kind`: equal if groups are alike. `items`: all of it. `kept`: places in `items` -> those that they stand for.
    """

    kind: int
    items: list[_Item]
    kept: dict[int, list[int]]


class _Kinds:
    """Numbers for what is alike: steps by all that contracts ask of them, groups by the kinds inside."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._formats: dict[int, Format] = {}  # by identity: most steps share one, and a hash takes long
        self._equal: dict[Format, Format] = {}
        self._kinds: dict[Hashable, int] = {}

    def group(self, items: Sequence[_Item], depth: int) -> _Group:
        """Items whose names begin alike up to `depth` numbers."""
        kinds: list[Hashable] = []
        every: list[_Item] = []
        kept: dict[int, list[int]] = {}
        below: dict[str, dict[int, list[_Item]]] = {}
        for item in items:
            if len(item.numbers) > depth:
                below.setdefault(item.texts[depth], {}).setdefault(item.numbers[depth], []).append(item)
                continue
            kinds.append((item.texts[depth], item.kind))
            kept[len(every)] = [len(every)]
            every.append(item)
        for text, numbers in below.items():
            first: dict[int, tuple[int, _Group]] = {}
            for group in (self.group(inside, depth + 1) for inside in numbers.values()):
                start, alike = first.setdefault(group.kind, (len(every), group))
                for place, members in alike.kept.items():
                    kept.setdefault(start + place, []).extend(len(every) + member for member in members)
                every += group.items
                kinds.append((text, group.kind))
        return _Group(self._number(tuple(kinds)), every, kept)

    def items(self) -> Iterator[_Item]:
        """The steps of modules and of caches."""
        sources = self._plan.sources
        for step in self._plan.steps:
            site, scale = step.site, next((o.spec.shape for o in step.outputs if o.part == "scale"), ())
            if site is None and not step.attention:
                continue
            module = site.module if site else step.attention
            read = tuple(
                (sources[p.source].shape if p.source else (), p.rows, p.cols, p.transposed, p.expert is None)
                for p in step.inputs
            )
            asked = (
                (site.layout, site.roles, site.keep, site.expert is None, tuple(map(pattern, site.live)))
                if site
                else ()
            )
            kind = self._number((id(self._format(step.format)), len(scale), read, step.kv, asked))
            yield _Item(*numbered(module), kind, module, step)

    def _format(self, one: Format | None) -> Format | None:
        """The first of equal formats."""
        if one is not None and id(one) not in self._formats:
            self._formats[id(one)] = self._equal.setdefault(one, one)
        return self._formats[id(one)] if one else None

    def _number(self, kind: Hashable) -> int:
        return self._kinds.setdefault(kind, len(self._kinds))


def outline_of(plan: Plan) -> Outline:
    """Return a plan's outline."""
    kinds = _Kinds(plan)
    whole = kinds.group([*kinds.items()], 0)
    kept = {id(whole.items[place].step) for place in whole.kept}
    return Outline(
        replace(plan, steps=tuple(step for step in plan.steps if id(step) in kept)),
        {whole.items[at].module: [whole.items[place].module for place in places] for at, places in whole.kept.items()},
        main_dtype(o.spec for step in plan.steps if step.layout is Layout.PLAIN for o in step.outputs),
    )
