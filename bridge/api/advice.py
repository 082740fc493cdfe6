"""Which scheme to begin with: a machine and its programs, from `mappings/advice.toml`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bridge.core.errors import TableError
from bridge.core.mappings import mappings, read_table
from bridge.core.values import EITHER, code_bits
from bridge.planning.programs import Contract, Runtime
from bridge.quant.schemes.catalog import RULE, scheme_names
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.quality import DITHERED, Quality, read_quality
from bridge.quant.schemes.scheme import Scheme
from bridge.targets import load_target, make_options

MOST = 8  # schemes of a list at first sight


def bits_of(scheme: Scheme) -> int:
    """Bits of the codes of its weights."""
    return code_bits(scheme.weight[0].dtype)


# What a user may want of a program, and which schemes are that.
PURPOSES: Mapping[str, Callable[[Scheme], bool]] = {
    "8-bit weights": lambda s: bits_of(s) == 8 and s.input is None,
    "8-bit weights and inputs": lambda s: bits_of(s) == 8 and s.input is not None,
    "4-bit weights, no data": lambda s: bits_of(s) == 4 and s.input is None and not s.needs_calibration,
    "4-bit weights, calibrated": lambda s: bits_of(s) == 4 and s.input is None and s.needs_calibration,
    "4-bit weights, 4- or 8-bit inputs": lambda s: bits_of(s) == 4 and s.input is not None,
}


@dataclass(frozen=True)
class Advice:
    """For a machine and the programs that serve there: a scheme, and one of 4 bits where memory is short."""

    machine: str
    programs: tuple[str, ...]
    scheme: str
    small: str


def read_advice() -> tuple[Advice, ...]:
    """Every row of the table.

    >>> next(row.scheme for row in read_advice() if "H100" in row.machine)
    'fp8_pc_pt'
    """
    table = read_table(mappings() / "advice.toml")
    table.known_keys(["row"])
    try:
        return tuple(Advice(**{**row, "programs": tuple(row["programs"])}) for row in table.data["row"])
    except (KeyError, TypeError) as error:
        raise TableError(f"{table.name}: a [[row]] has machine, programs, scheme and small ({error})") from error


def loaded_by(program: Runtime) -> list[str]:
    """The schemes that a program loads of an output that its target writes."""
    return [name for name in scheme_names() if any(_loads(one, load_scheme(name)) for one in program.contracts)]


def chosen_by_sign(scheme: Scheme) -> bool:
    """Whether calibration chooses codes for scales of either sign, so that they cannot be kept positive later."""
    return any(format_.ordered and format_.weight[0].search == EITHER for format_ in scheme.formats)


def _loads(contract: Contract, scheme: Scheme) -> bool:
    if contract.lacks(scheme.formats) or (contract.either is None and chosen_by_sign(scheme)):
        return False
    target = load_target(contract.target)
    options = make_options(target, dict(contract.options))
    return not any(target.why_unsupported(format_, options) for format_ in scheme.formats)


def recommended(program: Runtime | None = None) -> dict[str, str]:
    """The schemes to begin with, of one program or of all, each with what it is for."""
    rows = [row for row in read_advice() if program is None or program.name in row.programs]
    found: dict[str, str] = {}
    for name in dict.fromkeys([*(row.scheme for row in rows), *(row.small for row in rows)]):
        first, short = (
            "; ".join(row.machine for row in rows if getattr(row, field) == name) for field in ("scheme", "small")
        )
        found[name] = "; ".join(
            filter(None, [f"for {first}" if first else "", f"where memory is short: {short}" if short else ""])
        )
    if program is not None:
        for purpose, name in best_for(program).items():
            if name:
                found.setdefault(name, f"for {purpose}")
    return dict(list(found.items())[:MOST])


def best_for(program: Runtime) -> dict[str, str]:
    """The best scheme of each purpose that a program loads, "" without one that was measured."""
    gguf = any(contract.target == "gguf" for contract in program.contracts)
    loaded = [load_scheme(name) for name in loaded_by(program)]
    fit = [scheme for scheme in loaded if not scheme.only and (gguf or not measured_in_gguf(scheme))]
    return {purpose: best_of([scheme.name for scheme in fit if fits(scheme)]) for purpose, fits in PURPOSES.items()}


def measured_in_gguf(scheme: Scheme) -> bool:
    """Whether its figures are those of llama.cpp's own codes: other targets round the same blocks in their own way."""
    from bridge.quant.codec.ggml import own_rounding  # with numpy, which a plan does not load
    from bridge.targets.gguf.encodings import INTEGERS

    return scheme.weight[0].dtype in INTEGERS and own_rounding(scheme.weight[0], "q4_0")


def best_of(names: list[str]) -> str:
    """The scheme with the least KL divergence on the real model, "" without one that was measured."""
    return min((name for name in names if divergence(name) is not None), key=lambda n: divergence(n) or 0, default="")


def measured_as(name: str, target: str) -> str:
    """The row of the table of quality for the file that a target writes: a rule's row alone is of target hf."""
    return f"{name} --target {target}" if RULE in name and target != "hf" else name


def divergence(name: str, target: str = "hf") -> float | None:
    """The KL divergence of a scheme on SmolLM2-135M, dithered, in a target's file; None if it was not measured."""
    return read_quality().get(measured_as(name, target), {}).get(DITHERED, Quality()).kl
