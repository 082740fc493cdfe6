"""Schemes: what is quantized to what, read from `mappings/schemes/*.toml` as data; never runs a model.

A scheme is one TOML file, its name the file's. A recipe (`bridge.quant.recipe`) is a user's TOML that starts from a
scheme and changes it by rules. Both end as one frozen `Scheme`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

from bridge.errors import SchemeError, UsageError, fold_layers, nearest
from bridge.quant.grammar import (
    ALGORITHMS,
    Gate,
    Parity,
    Policies,
    check_keys,
    parse_numeric,
    parse_options,
    parse_parity,
    parse_policies,
    read_toml,
)
from bridge.remote.address import check_here
from bridge.tables.files import find_table_file, mappings, shown, table_files
from bridge.values import Format, Numeric, Site


@dataclass(frozen=True)
class Rule:
    """One change of a recipe. Keys are ANDed, the entries of a key ORed; `format` None leaves the site unquantized.

    `layers` holds inclusive ranges; negative numbers count from the end.
    """

    label: str
    quant: str
    format: Format | None
    gate: Gate | None
    roles: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    layers: tuple[tuple[int, int], ...] = ()
    override: bool = False

    def touches(self, site: Site, depth: int) -> frozenset[str] | None:
        """The roles of `site` that the rule names (all of them without `roles`), or None where it does not match."""
        if self.modules and not any(fnmatchcase(site.module, glob) for glob in self.modules):
            return None
        if self.layers and (site.layer is None or not any(a <= site.layer <= b for a, b in self.spans(depth))):
            return None
        if not self.roles:
            return frozenset(site.roles)
        hit = frozenset(role for role in site.roles if any(fnmatchcase(role, glob) for glob in self.roles))
        return hit or None

    def spans(self, depth: int) -> list[tuple[int, int]]:
        """The ranges with negative ends counted from `depth`."""
        ends = [end for span in self.layers for end in span]
        assert depth or min(ends, default=0) >= 0, "negative layers need Scheme.bound"
        return [(a + depth if a < 0 else a, b + depth if b < 0 else b) for a, b in self.layers]

    def problems(self, sites: Sequence[Site], depth: int) -> list[str]:
        """What does not fit: layers the model does not have, roles or modules that no site has, nothing matched."""
        if not depth and self.layers:
            return [f"{self.label}: no module of this model lies in a numbered layer, so `layers` cannot match"]
        bad = [end for span in self.spans(depth) for end in span if not 0 <= end < depth]
        if bad:
            return [f"{self.label}: the model has layers 0 to {depth - 1}; `layers` reaches {bad[0]}"]
        if any(self.touches(site, depth) for site in sites if site.roles):
            return []
        if not self.roles and any(self.touches(site, depth) is not None for site in sites):
            return []
        roles = sorted({role for site in sites for role in site.roles})
        if self.roles and not roles:
            return [
                f"{self.label}: this architecture has no table, so its modules have no roles; match `modules` instead"
            ]
        if self.roles:
            return [f"{self.label}: matches no module; {nearest(self.roles[0], roles)}"]
        names = fold_layers(site.module for site in sites)
        return [f"{self.label}: matches no module; the quantizable ones are {', '.join(names[:12])}"]


@dataclass(frozen=True)
class Scheme:
    """Weight numerics (one after the other), input numeric, algorithm, KV numeric, the rules of a recipe, gates.

    `needs_cuda` is the reason why calibration needs CUDA, "" where a CPU does; `simulation_needs_cuda` the reason why
    ModelOpt's fake-quantized model runs there only (calibration may do without it). `options` are the algorithm's
    parameters, sorted. `depth` is the number of layers of the model, from which negative layers count (see `bound`).
    """

    name: str
    summary: str
    weight: tuple[Numeric, ...]
    input: Numeric | None
    parity: Parity
    algorithm: str = "max"
    options: tuple[tuple[str, float], ...] = ()
    kv: Numeric | None = None
    rules: tuple[Rule, ...] = ()
    policies: Policies = field(default_factory=Policies)
    needs_cuda: str = ""
    simulation_needs_cuda: str = ""
    depth: int = 0
    origin: str = field(default="", compare=False)

    @property
    def format(self) -> Format:
        """What happens to a site that no rule touches."""
        return Format(self.weight, self.input, self.algorithm)

    @property
    def formats(self) -> tuple[Format, ...]:
        """Every format a site may get, the scheme's own first."""
        return (self.format, *(rule.format for rule in self.rules if rule.format))

    @property
    def needs_calibration(self) -> bool:
        """True when statistics of activations enter what is written."""
        kv = self.kv is not None and is_static(self.kv)
        return kv or any(is_calibrated(form) for form in self.formats)

    @property
    def digest(self) -> str:
        """Digest of everything that enters a calibration; the name, the gates and the words do not."""
        rules = [(asdict(r.format) if r.format else None, r.roles, r.modules, r.layers) for r in self.rules]
        said = [asdict(self.format), self.options, asdict(self.kv) if self.kv else None, rules]
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()

    def bound(self, sites: Sequence[Site]) -> Scheme:
        """This scheme with its depth taken from `sites`; SchemeError lists every rule that does not fit the model.

        A rule that matches no site is one of them, and so is a layer that the model does not have.
        """
        depth = 1 + max((site.layer for site in sites if site.layer is not None), default=-1)
        known = replace(self, depth=depth)
        problems = [problem for rule in self.rules for problem in rule.problems(sites, depth)]
        for site in sites:
            try:
                known.rule_of(site)
            except SchemeError as error:
                problems.append(str(error))
        if problems:
            head = f"{self.origin or self.name}: {len(problems)} rules do not fit the model"
            raise SchemeError("\n  ".join([head, *fold_layers(dict.fromkeys(problems))]))
        return known

    def rule_of(self, site: Site) -> Rule | None:
        """The rule that decides `site`, or None; SchemeError where rules contradict or cut a fused site.

        Rules have no order: two that want different things of one site are an error unless the later one says
        `override = true`.
        """
        winner: Rule | None = None
        for rule in self.rules:
            hit = rule.touches(site, self.depth)
            if hit is None:
                continue
            if rest := set(site.roles) - hit:
                raise SchemeError(
                    f"{rule.label} names {', '.join(sorted(hit))} but {site.module} holds "
                    f"{', '.join(sorted(rest))} in the same matrix; name all of them, or none"
                )
            if winner and not rule.override and winner.format != rule.format:
                raise SchemeError(
                    f"{winner.label} (quant {winner.quant!r}) and {rule.label} "
                    f"(quant {rule.quant!r}) both match {site.module}; narrow one, or write `override = true` "
                    f"into {rule.label}"
                )
            winner = rule
        return winner

    def format_of(self, site: Site) -> Format | str:
        """The format of `site`, or the reason why it is kept as it is."""
        rule = self.rule_of(site)
        if rule is None:
            return site.keep or _without_smoothing(self.format, site)
        if rule.format is None:
            return f'recipe: {rule.label} says quant = "none"'
        return _without_smoothing(rule.format, site)

    def gate_of(self, site: Site) -> Gate:
        """The gate that the weight of `site` must pass once quantized."""
        rule = self.rule_of(site)
        return rule.gate if rule and rule.gate else self.parity.tensor


def _without_smoothing(form: Format, site: Site) -> Format:
    # ModelOpt smooths Linear and Conv1D only: experts get the same numerics without a pre-scale (they would need one
    # input scale each, and share one input), convolutions have no single `in`
    if form.prescales and (site.expert is not None or site.layout == "conv"):
        return replace(form, algorithm="max")
    return form


def is_calibrated(form: Format) -> bool:
    """True when `form` cannot be written without statistics of activations."""
    return form.prescales or (form.input is not None and is_static(form.input))


def is_static(numeric: Numeric) -> bool:
    """True when a scale of `numeric` is fixed by calibration."""
    # NVFP4 activations: block scales come when the model runs, the one scale above them is calibrated
    return not numeric.dynamic or numeric.scale_dtype == "float8_e4m3fn"


def has_tensor_scale(form: Format) -> bool:
    """True where some scale covers the whole weight: per tensor, NVFP4's global one, the second of W4A8."""
    first = form.weight[0]
    return first.per == "tensor" or first.scale_dtype == "float8_e4m3fn" or len(form.weight) == 2


def scheme_names() -> list[str]:
    """The schemes' names, without aliases."""
    return [path.stem for path in table_files("schemes") if path.stem != "kv"]


def kv_names() -> list[str]:
    """What `kv=` accepts."""
    return sorted(read_toml(mappings() / "schemes" / "kv.toml"))


def check_schemes() -> list[str]:
    """Read every scheme and every KV numeric; returns what is wrong with them."""
    problems: list[str] = []
    owners: dict[str, str] = {}
    for path in table_files("schemes"):
        if path.stem == "kv":
            continue
        try:
            read_scheme(path)
            for word in [path.stem, *read_toml(path).get("aliases", [])]:
                if owners.setdefault(word, path.stem) != path.stem:
                    problems.append(f"{shown(path)}: {word!r} names {owners[word]} already")
        except SchemeError as error:
            problems.append(str(error))
    for name in kv_names():
        try:
            with_kv(read_scheme(mappings() / "schemes" / "fp8.toml"), name)
        except SchemeError as error:
            problems.append(str(error))
    return problems


def load_scheme(quant: str | Path | Scheme, kv: str | None = None) -> Scheme:
    """Return the scheme `quant` names: a scheme, an alias, a recipe's path, or a `Scheme`; `kv` adds the KV numeric.

    >>> load_scheme("fp8").input.dtype
    'float8_e4m3fn'
    """
    if not isinstance(quant, str | Path | Scheme):
        raise UsageError(f"quant takes a scheme's name, a recipe's path or a Scheme, not {type(quant).__name__}")
    check_here(quant=quant)
    if isinstance(quant, Scheme):
        scheme = quant
    elif isinstance(quant, Path) or str(quant).endswith(".toml") or "/" in str(quant):
        from bridge.quant.recipe import load_recipe

        scheme = load_recipe(Path(quant))
    else:
        scheme = _named(quant)
    return scheme if kv is None else with_kv(scheme, kv)


def kv_numeric(kv: str) -> Numeric:
    """What a KV cache is kept in, by its name; UsageError where that is unknown."""
    path = mappings() / "schemes" / "kv.toml"
    tables = read_toml(path)
    if kv not in tables:
        raise UsageError(f"kv={kv!r} is unknown; {nearest(kv, tables)}")
    words = {key: value for key, value in tables[kv].items() if key != "summary"}
    return parse_numeric(words, f"{path}: [{kv}]")


def with_kv(scheme: Scheme, kv: str) -> Scheme:
    """`scheme` with the KV cache in `kv`; UsageError where the name is unknown or the recipe says otherwise."""
    numeric = kv_numeric(kv)
    if scheme.kv not in (None, numeric):
        raise UsageError(
            f"kv={kv!r} contradicts {scheme.origin or scheme.name}, which sets another kv; drop one of the two"
        )
    return replace(scheme, kv=numeric)


def _named(name: str) -> Scheme:
    found = find_table_file("schemes", name) if name != "kv" else None
    if found:
        return read_scheme(found)
    aliases: dict[str, Path] = {}
    for path in table_files("schemes"):
        aliases |= {alias: path for alias in read_toml(path).get("aliases", [])}
    if name in aliases:
        return read_scheme(aliases[name])
    hint = "a recipe is given by its path, ending in .toml"
    raise UsageError(f"quant={name!r} is unknown; {nearest(name, [*scheme_names(), *aliases])}; {hint}")


def read_scheme(path: Path) -> Scheme:
    """Parse the scheme in `path`; SchemeError names the file and the key."""
    words = read_toml(path)
    where = shown(path)
    check_keys(
        words,
        {
            "summary",
            "aliases",
            "algorithm",
            "needs_cuda",
            "simulation_needs_cuda",
            "weight",
            "input",
            "options",
            "parity",
            "policy",
        },
        where,
    )
    for key in ("summary", "weight", "parity"):
        if key not in words:
            raise SchemeError(f"{where}: `{key}` is missing")
    algorithm = words.get("algorithm", "max")
    if algorithm not in ALGORITHMS:
        raise SchemeError(f"{where}: algorithm {algorithm!r} is unknown; {nearest(str(algorithm), ALGORITHMS)}")
    weights = words["weight"]
    if not isinstance(weights, list) or not weights or not all(isinstance(w, dict) for w in weights):
        raise SchemeError(f"{where}: `weight` is written as one or several [[weight]] tables")
    given = words.get("input")
    return Scheme(
        name=path.stem,
        summary=str(words["summary"]),
        weight=tuple(parse_numeric(w, f"{where}: [[weight]]") for w in weights),
        input=None if given is None else parse_numeric(given, f"{where}: [input]"),
        parity=parse_parity(words["parity"], where),
        algorithm=algorithm,
        options=parse_options(words.get("options", {}), algorithm, where),
        policies=parse_policies(words.get("policy", {}), where),
        needs_cuda=str(words.get("needs_cuda", "")),
        simulation_needs_cuda=str(words.get("simulation_needs_cuda", "")),
        origin=where,
    )
