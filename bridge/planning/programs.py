"""What programs load: the rows of contracts, as `bridge.planning.contract_files` reads them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bridge.core.values import Format, with_positive_scales
from bridge.planning.joined_and_cut import words_of
from bridge.planning.plan import Plan
from bridge.planning.registries import served
from bridge.quant.describe import contract_words, explained
from bridge.quant.schemes.scheme import Scheme


@dataclass(frozen=True)
class Evidence:
    """How it is known that a program loads a format: `run`, `built` or `read`, and the test or the file of its source.

    `built`: its compiler made a program of it, which no run executed.
    """

    how: str
    where: str


@dataclass(frozen=True)
class Row:
    """One pair of formats, one format of the KV cache, or unquantized output, that a program loads.

    `out`: rows of each matrix that it fuses with others, but the last, are a multiple of this. `inner`: the same of
    `in` of every matrix; `held`: of `out` of every matrix as the program holds it, fused with others or alone. All hold
    for the part of each rank, too. `experts`: whether experts may have it. `prescales`:
    whether it may have pre-scales. `dtypes`: of what stays unquantized; empty if any. Architectures, as in config.json:
    `but_not`, whose classes do not read it; `only`, the ones that evidence is about, empty if any. `inputs`: what the
    program rounds inputs to although the scheme leaves them. `computes`: what a compiler makes of the products, "gemm"
    of codes on both sides, "weight-only" or "dequantized". `since`: the first architecture of GPUs with the formats.
    `whole`: whether both extents of a matrix are multiples of its block's. Of modules that its model joins or cuts:
    `parts`, whether they may be quantized; `beside`, whether they, and experts, may stay unquantized.
    """

    evidence: Evidence
    out: int = 1
    inner: int = 1
    held: int = 1
    experts: bool = True
    prescales: bool = True
    dtypes: tuple[str, ...] = ()
    but_not: tuple[str, ...] = ()
    only: tuple[str, ...] = ()
    inputs: str = ""
    computes: str = ""
    since: str = ""
    whole: bool = False
    parts: bool = True
    beside: bool = True

    def why_not(self, what: str, architecture: str) -> str:
        """Why `what`, this row's formats, is not read in models of the architecture; "" if it is."""
        if architecture in self.but_not:
            return f"reads no {what} in {architecture}"
        shown = not self.only or architecture in self.only
        return "" if shown else f"no run and no source shows that it reads {what} in {architecture}"


@dataclass(frozen=True)
class SparseKernels:
    """How it is known that a program is faster on weights with two zeros in every four, and the `option` that asks."""

    evidence: Evidence
    option: str


@dataclass(frozen=True)
class Contract:
    """What a program loads of one target's output, written with `options`.

    `loads`: weights and inputs, in the words of `contract_words`, to its row. `kv`: the same of the KV cache.
    `prescales`: whether formats with pre-scales may be written for it. `kept`: whether it reads matrices that it fuses
    if they stay unquantized in a quantized model. `unlike`: whether experts may differ in format, and routers be
    quantized. None if there is no evidence: `mixed`, that modules may differ in format; `either`, that scales of INT4
    may be negative; `head`, that the output head may be quantized; `plain`, for unquantized output; `ranks`, that ranks
    may share matrices; `buffers`, that keys and values may lie in buffers of one length; `sparse`, that it has kernels
    for 2:4 zeros in these files as they are. Architectures whose source has a layer's experts in one tensor -> how it
    is known that it reads them: `stacked`, in one still; `split`, as modules of each. `but_not`: architectures that it
    loads in no format. `float32_as`: the dtype of a float32 source.
    """

    target: str
    options: Mapping[str, Any]
    loads: Mapping[str, Row]
    kv: Mapping[str, Row] = field(default_factory=dict)
    mixed: Evidence | None = None
    either: Evidence | None = None
    prescales: bool = True
    kept: bool = True
    unlike: bool = True
    head: Evidence | None = None
    plain: Row | None = None
    ranks: Evidence | None = None
    buffers: Evidence | None = None
    sparse: SparseKernels | None = None
    stacked: Mapping[str, Evidence] = field(default_factory=dict)
    split: Mapping[str, Evidence] = field(default_factory=dict)
    but_not: tuple[str, ...] = ()
    float32_as: str = ""

    def flags(self, target: str = "") -> str:
        """Target and options as a user gives them; without the target if it is given: `--format modelopt`."""
        flags = [flag(name.replace("_", "-"), value) for name, value in self.options.items()]
        return " ".join(flags if flags and target == self.target else [f"--target {self.target}", *flags])

    def lacks(self, formats: Collection[Format], architecture: str = "") -> str:
        """Why the formats of a model are not loaded: one has no row, or they may not stand together; "" if they are."""
        if architecture in self.but_not:
            return f"loads no {architecture} there"
        words = sorted({contract_words(format_) for format_ in formats})
        if missing := [word for word in words if word not in self.loads]:
            plain = missing[0].replace(" zeros", "")
            if plain != missing[0] and plain in self.loads:
                return f"loads {explained(plain)} there, but not their zero points"
            return f"loads no {explained(missing[0])} there"
        if why := next(filter(None, (self.loads[word].why_not(explained(word), architecture) for word in words)), ""):
            return why
        smoothed = [contract_words(format_) for format_ in formats if format_.prescales]
        if smoothed and not (self.prescales and all(self.loads[words].prescales for words in smoothed)):
            return "loads no formats with pre-scales there"
        alike = self.mixed or len(words) < 2
        return "" if alike else f"reads one format for all modules there, not {'; and '.join(map(explained, words))}"

    def reads_negative(self, scheme: Scheme) -> bool:
        """Whether it takes scales of either sign in each format of a scheme that has such."""
        signed = any(with_positive_scales(format_) != format_ for format_ in scheme.formats)
        return self.either is not None or not signed

    def written_by(self, plan: Plan) -> bool:
        """Whether the plan is for this target and these options.

        The format of target hf says how quantized numbers are spelled: without any, one output is like the other.
        """
        alike = ("format",) if not plan.quantized and self.plain else ()
        options = {name: value for name, value in self.options.items() if name not in alike}
        return plan.target == self.target and all(plan.options.get(n) == value for n, value in options.items())


def flag(name: str, value: Any) -> str:
    """An option as the command line takes it."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} {value}"


@dataclass(frozen=True)
class Runtime:
    """A program, in one version. `name`: as users type it. `fused`: names of modules that it holds as one matrix.

    `contracts` are in the order of choice. `mistakes`: what it takes and does not understand, a format of target hf or
    the words of a row -> what it does. `faults`: a fault of `bridge.planning.faults` -> what it makes of it, and how
    that is known. `not_run`: architectures with a table of which no run loaded an output. `instead`: what loads a model
    that it has no class for.
    """

    name: str
    program: str
    version: str
    contracts: tuple[Contract, ...]
    aliases: tuple[str, ...] = ()
    fused: tuple[tuple[str, ...], ...] = ()
    mistakes: Mapping[str, str] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
    not_run: tuple[str, ...] = ()
    instead: str = ""

    def fused_in(self, architecture: str) -> Sequence[Sequence[str]]:
        """Names of modules that it holds as one matrix, with those that its class of an architecture does."""
        known = served(self.name, architecture)
        return tuple(dict.fromkeys((*self.fused, *(known.fused if known else ()))))

    @property
    def title(self) -> str:
        return f"{self.program} {self.version}"

    def contract_of(self, plan: Plan) -> Contract | None:
        """The contract for what is planned; None if the program loads nothing of that target and those options."""
        return next((contract for contract in self.contracts if contract.written_by(plan)), None)

    def mistake_of(self, plan: Plan) -> str:
        """What it makes of a plan that it takes and does not understand; "" if there is nothing of that kind."""
        words = [str(plan.options.get("format")), *dict.fromkeys(map(words_of, plan.quantized))]
        return next((self.mistakes[word] for word in words if word in self.mistakes), "")
