"""`Scheme`: formats of weights, inputs and KV cache; a recipe's rules."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import TypeGuard

from bridge.core.errors import SchemeError
from bridge.core.records import plain
from bridge.core.text import fold_layers, nearest, number
from bridge.core.values import AFFINE, NARROW, OURS, Format, Numeric, Site
from bridge.quant.schemes.grammar import Gate, Gates, Policies
from bridge.quant.schemes.layer_ranges import from_start

EMBEDDINGS = (
    "an embedding is looked up, not multiplied, and targets gguf, ort and mlx alone write its codes: "
    "vocabulary='quantize' "
    '(--vocabulary quantize), in the bits that a rule gives a tied head (roles = ["head.weight"])'
)
DRAFT_ROLE = "draft."  # how the roles of draft layers begin; `draft.attn.q.weight`


@dataclass(frozen=True)
class Rule:
    """One rule of a recipe. Keys are ANDed, the entries of a key ORed; `format` None leaves the site unquantized.

    `layers` are inclusive ranges; negative numbers count from the end.
    """

    label: str
    quant: str
    format: Format | None
    gate: Gate | None
    roles: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    layers: tuple[tuple[int, int], ...] = ()
    override: bool = False

    @property
    def of_drafts(self) -> bool:
        """Whether it is about draft layers alone."""
        return bool(self.roles) and all(role.startswith(DRAFT_ROLE) for role in self.roles)

    def matched_roles(self, site: Site, depth: int) -> frozenset[str] | None:
        """The roles of `site` that the rule names (all of them without `roles`), None if it does not match."""
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
        return from_start(self.layers, depth)

    def problem(self, sites: Sequence[Site], depth: int) -> str:
        """Why the rule does not fit this model ("" if it does): layers, roles or modules that it lacks, no match."""
        if self.of_drafts and not any(role.startswith(DRAFT_ROLE) for site in sites for role in site.roles):
            return ""  # planning knows them, and binds the scheme once more
        if not depth and self.layers:
            return "no module of this model lies in a numbered layer, so `layers` cannot match"
        bad = [end for span in self.spans(depth) for end in span if not 0 <= end < depth]
        if bad:
            return f"the model has layers 0 to {depth - 1}; `layers` reaches {bad[0]}"
        matches = [site for site in sites if self.matched_roles(site, depth) is not None]
        if any(site.roles for site in matches) or (matches and not self.roles):
            return ""
        roles = sorted({role for site in sites for role in site.roles})
        if self.roles and not roles:
            return "this architecture has no table, so its modules have no roles; match `modules` instead"
        if any("embed" in name for name in (*self.roles, *self.modules)):
            return f"matches no module: {EMBEDDINGS}"
        if self.roles:
            return f"matches no module; {nearest(self.roles[0], roles)}"
        names = fold_layers(site.module for site in sites)
        return f"matches no module; the quantizable ones are {', '.join(names[:12])}"


@dataclass(frozen=True)
class Scheme:
    """Weight formats (applied one after the other), input format, algorithm, KV format, a recipe's rules, gates.

    `needs_cuda`: why calibration needs CUDA, "" if a CPU is enough. `options`: the algorithm's parameters, sorted.
    `only`: globs of the modules that are quantized where no rule says otherwise; empty for all. `depth`: layers of the
    model, from which negative layers count (see `bound`). `note`: a change of a named scheme for this model.
    `rounding`: see `Format`. `sized`: its blocks were asked for, and no other size replaces them.
    `file_type`: llama.cpp's, whose type of each tensor target gguf takes where no rule says otherwise; "" for none.
    """

    name: str
    summary: str
    weight: tuple[Numeric, ...]
    input: Numeric | None
    parity: Gates
    algorithm: str = "max"
    options: tuple[tuple[str, float], ...] = ()
    kv: Numeric | None = None
    rules: tuple[Rule, ...] = ()
    policies: Policies = field(default_factory=Policies)
    needs_cuda: str = ""
    only: tuple[str, ...] = ()
    file_type: str = ""
    depth: int = 0
    origin: str = field(default="", compare=False)
    note: str = field(default="", compare=False)
    rounding: str = ""
    sized: bool = field(default=False, compare=False)

    @property
    def format(self) -> Format:
        """The format of a site that no rule matches."""
        return Format(self.weight, self.input, self.algorithm, self.rounding)

    @property
    def formats(self) -> tuple[Format, ...]:
        """Every format a site may get, the scheme's own first."""
        return (self.format, *(rule.format for rule in self.rules if rule.format))

    @property
    def needs_calibration(self) -> bool:
        """Whether the output depends on statistics of activations."""
        return is_measured(self.kv) or any(is_calibrated(form) for form in self.formats)

    @property
    def needs_modelopt(self) -> bool:
        """Whether ModelOpt collects any of these statistics; an importance matrix takes the plain model."""
        return is_measured(self.kv) or any(
            is_measured(form.input) or (is_calibrated(form) and not form.watched) for form in self.formats
        )

    @property
    def simulation_needs_cuda(self) -> str:
        """Why ModelOpt's fake-quantized model runs on CUDA only, "" if a CPU is enough. Calibration may need none."""
        numerics = [n for form in self.formats for n in (*form.weight, form.input) if n]
        if any(n.scale_dtype == "float8_e8m0fnu" for n in numerics):
            return "ModelOpt has no CPU code for MX blocks"
        searched = any(n.two_level and n.search for n in numerics) or any(form.rescaled for form in self.formats)
        return "ModelOpt has no CPU code for NVFP4 blocks whose scales are chosen" if searched else ""

    @property
    def not_simulated(self) -> str:
        """Why ModelOpt's fake-quantized model is another one on any device, "" if it is not."""
        weights = [n for form in self.formats for n in form.weight]
        ours = any(n.search in OURS or n.zero_points or n.dtype in (*AFFINE, *NARROW) for n in weights)
        return "ModelOpt has no quantizer with its scales" if ours else ""

    @property
    def digest(self) -> str:
        """Digest of everything that a calibration depends on; the name, the gates and the texts are left out."""
        rules = tuple((r.format, r.roles, r.modules, r.layers) for r in self.rules)
        parts = plain([self.format, self.options, self.kv, rules, self.only])
        parts += [self.file_type] if self.file_type else []
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def bound(self, sites: Sequence[Site]) -> Scheme:
        """This scheme with the depth of `sites`; SchemeError lists every rule that does not fit the model."""
        depth = 1 + max((site.layer for site in sites if site.layer is not None), default=-1)
        known = replace(self, depth=depth)
        problems = [f"{rule.label}: {text}" for rule in self.rules if (text := rule.problem(sites, depth))]
        for site in sites:
            try:
                known.rule_of(site)
            except SchemeError as error:
                problems.append(str(error))
        if problems:
            does = "does" if len(problems) == 1 else "do"
            head = f"{self.origin or self.name}: {number(len(problems), 'rule')} that {does} not fit the model"
            raise SchemeError("\n  ".join([head, *fold_layers(dict.fromkeys(problems))]))
        return known

    def rule_of(self, site: Site) -> Rule | None:
        """The rule for `site`, or None; SchemeError if rules contradict each other or cut a fused site.

        Rules have no order: two with different results for one site are an error unless the later one sets
        `override = true`.
        """
        winner: Rule | None = None
        for rule in self.rules:
            matched = rule.matched_roles(site, self.depth)
            if matched is None:
                continue
            if rest := set(site.roles) - matched:
                raise SchemeError(
                    f"{rule.label} names {', '.join(sorted(matched))} but {site.module} has "
                    f"{', '.join(sorted(rest))} in the same matrix; name all of them, or none"
                )
            if winner and not rule.override and winner.format != rule.format:
                raise SchemeError(
                    f"{winner.label} (quant {winner.quant!r}) and {rule.label} (quant {rule.quant!r}) "
                    f"both match {site.module}; narrow one, or write `override = true` in {rule.label}"
                )
            winner = rule
        return winner

    def format_of(self, site: Site) -> Format | str:
        """The format of `site`, or the reason why it stays unquantized."""
        rule = self.rule_of(site)
        if rule is None:
            form = _without_smoothing(self.format, site)
            return site.keep or self._why_excluded(site) or (site.unreached if _needs_inputs(form) else "") or form
        if rule.format is None:
            return f'recipe: {rule.label} says quant = "none"'
        return _without_smoothing(rule.format, site)

    def _why_excluded(self, site: Site) -> str:
        """Why the scheme leaves a module out; "" if it does not."""
        if not self.only or any(fnmatchcase(site.module, glob) for glob in self.only):
            return ""
        return f"scheme: only {', '.join(self.only)}"

    def gate_of(self, site: Site) -> Gate:
        """The gate that the quantized weight of `site` must pass."""
        rule = self.rule_of(site)
        return rule.gate if rule and rule.gate else self.parity.tensor


def _without_smoothing(form: Format, site: Site) -> Format:
    # ModelOpt smooths and clips Linear and Conv1D only: experts get the same formats without a pre_quant_scale (they
    # would need one input scale each, but share one input), convolutions have no single `in`. Its GPTQ, too, leaves out
    # experts, whose stack is one module with several matrices; its local Hessian takes them, not we. Our GPTQ takes
    # each expert with its own tokens; SignRound does not learn them
    changed = form.prescales or form.clipped or form.chosen
    expert = site.expert is not None or site.stacked
    if not changed or not (expert or site.layout == "conv"):
        return form
    if not form.ordered or site.layout == "conv":
        return replace(form, algorithm="max")
    return replace(form, algorithm="imatrix") if form.learned else form


def is_calibrated(form: Format) -> bool:
    """Whether `form` cannot be written without statistics of activations."""
    return form.prescales or form.clipped or form.watched or form.chosen or is_measured(form.input)


def _needs_inputs(form: Format) -> bool:
    """Whether a module that no input reaches cannot have `form`; AWQ and clips leave such a one as it is."""
    return form.chosen or is_measured(form.input)


def is_measured(numeric: Numeric | None) -> TypeGuard[Numeric]:
    """Whether calibration fixes a scale of `numeric`; None is not quantized."""
    return numeric is not None and numeric.static and not numeric.constant


def has_tensor_scale(form: Format) -> bool:
    """Whether one scale covers the whole weight: per tensor, NVFP4's global one, the second of W4A8."""
    first = form.weight[0]
    return first.per == "tensor" or first.two_level or len(form.weight) == 2
