"""The grammar of a scheme's TOML; unknown keys and values are errors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bridge.core.dtypes import DTYPES, SEARCHED
from bridge.core.errors import SchemeError
from bridge.core.parsing.file_cache import cached_by_file, copy_parsed
from bridge.core.parsing.limited import load_toml
from bridge.core.text import nearest
from bridge.core.values import AFFINE, FOUR_OVER_SIX, LLM_COMPRESSOR, MAXBOUND, MSE, NARROW, SEARCHES, WEIGHTED, Numeric

HEADROOM = "nvfp4_act_headroom"
ALGORITHMS = {
    # algorithm -> the parameters it takes, with ModelOpt's default
    "max": {},
    "smoothquant": {"alpha": 1.0},
    "awq": {"alpha_step": 0.1},
    "awq_clip": {"min_clip_ratio": 0.5, "shrink_step": 0.05},
    "awq_full": {"alpha_step": 0.1, "min_clip_ratio": 0.5, "shrink_step": 0.05},  # awq, then awq_clip
    "imatrix": {},  # llama.cpp's: errors are weighted by the mean square of the input of each `in`
    "local_hessian": {},
    HEADROOM: {},  # of NVFP4 inputs: ModelOpt's own percentiles and factor
    "gptq": {"perc_damp": 0.01},
    "signround": {"perc_damp": 0.01, "rate": 0.25, "steps": 200},  # from the codes of gptq
}
MOST_STEPS = 10_000
POLICIES = ("error", "floor", "peers")
NVFP4 = "FP4 in blocks under FP8 scales (NVFP4)"
_PER = ("tensor", "channel", "block", "token")
_KEYS = {"dtype", "per", "block", "scale_dtype", "dynamic"}
_SCALES = ("float32", "float8_e4m3fn", "float8_e8m0fnu")


@dataclass(frozen=True)
class Gate:
    """Two-sided threshold: least cosine, and limits of the norm ratio (a dropped scale leaves the cosine at 1)."""

    cosine: float
    norm: tuple[float, float]

    def loosest(self, other: Gate) -> Gate:
        """The gate that both pass: that of a model with mixed precision."""
        low, high = zip(self.norm, other.norm, strict=True)
        return Gate(min(self.cosine, other.cosine), (min(low), max(high)))


@dataclass(frozen=True)
class Gates:
    """Gates of one weight after dequantization (`tensor`) and of the model's outputs (`output`)."""

    tensor: Gate
    output: Gate


@dataclass(frozen=True)
class Policies:
    """How an unusable amax is replaced, see `bridge.calibration.policies`.

    The default for a non-finite amax is an error: an activation that overflows means a broken model.
    """

    zero: str = "peers"
    never_seen: str = "peers"
    not_finite: str = "error"


def parse_numeric(words: Any, where: str) -> Numeric:
    """Parse a table of dtype, per, block, scale_dtype, dynamic."""
    check_keys(words, _KEYS, where)
    for key, known in (("dtype", [*MAXBOUND, *SEARCHED, *AFFINE]), ("per", list(_PER)), ("scale_dtype", list(_SCALES))):
        if key not in words and key != "scale_dtype":
            raise SchemeError(f"{where}: `{key}` is missing")
        if key in words and words[key] not in known:
            raise SchemeError(f"{where}: {key} = {words[key]!r} is unknown; {nearest(str(words[key]), known)}")
    block = words.get("block", [])
    fits = isinstance(block, list) and all(type(n) is int and n > 0 for n in block) and len(block) <= 2
    if not fits or bool(block) != (words["per"] == "block"):
        raise SchemeError(
            f'{where}: per = {words["per"]!r} with block = {block!r}; per = "block" needs one or two sizes'
        )
    if type(words.get("dynamic", False)) is not bool:
        raise SchemeError(f"{where}: dynamic = {words['dynamic']!r}; expected true or false")
    if words["per"] == "token" and not words.get("dynamic", False):
        raise SchemeError(f'{where}: per = "token" is computed when the model runs: write dynamic = true')
    if words["dtype"] in SEARCHED and block != [DTYPES[words["dtype"]].block]:
        raise SchemeError(
            f"{where}: {words['dtype']} is llama.cpp's block: write block = [{DTYPES[words['dtype']].block}]"
        )
    scale = words.get("scale_dtype", "float32")
    if words["dtype"] in NARROW and (scale != "float32" or words["per"] not in ("channel", "block") or len(block) > 1):
        raise SchemeError(
            f'{where}: {words["dtype"]} is of weights, with float scales along `in`: per = "channel", or per = "block" '
            "with one size"
        )
    if words["dtype"] in AFFINE and (len(block), scale) != (1, "float32"):
        raise SchemeError(f'{where}: {words["dtype"]} has groups along `in` with float scales: per = "block", one size')
    return Numeric(words["dtype"], words["per"], tuple(block), scale, words.get("dynamic", False))


def parse_weight(words: Any, where: str) -> Numeric:
    """Parse the format of a weight: a numeric, `zero_points`, and `search`, how the scales of its blocks are chosen."""
    check_keys(words, _KEYS | {"search", "zero_points"}, where)
    numeric = parse_numeric({key: value for key, value in words.items() if key in _KEYS}, where)
    if "zero_points" in words:
        plain = (numeric.dtype in ("int4", *NARROW), numeric.scale_dtype, len(numeric.block)) == (True, "float32", 1)
        if words["zero_points"] is not True or "search" in words or not plain:
            raise SchemeError(
                f"{where}: zero_points = true is for INT4, or INT2 to INT6, in blocks without search; else leave it out"
            )
        return replace(numeric, zero_points=True)
    if "search" not in words:
        return numeric
    search = words["search"]
    if search not in SEARCHES:
        raise SchemeError(f"{where}: search = {search!r} is unknown; {nearest(str(search), SEARCHES)}")
    kind = (numeric.dtype, numeric.scale_dtype, len(numeric.block))
    nvfp4 = kind == ("float4_e2m1fn", "float8_e4m3fn", 1)
    int4 = kind == ("int4", "float32", 1)
    fp4 = nvfp4 or kind == ("float4_e2m1fn", "float8_e8m0fnu", 1)
    narrow = numeric.dtype in NARROW and len(numeric.block) == 1
    takers = {FOUR_OVER_SIX: nvfp4, MSE: nvfp4 or int4, WEIGHTED: fp4}
    if not takers.get(search, int4 or narrow):
        names = {FOUR_OVER_SIX: NVFP4, MSE: f"{NVFP4} and INT4 in blocks", WEIGHTED: "FP4 in blocks with FP8 scales"}
        known = names.get(search, "INT2 to INT6 in blocks")
        raise SchemeError(f"{where}: search = {search!r} is for {known}, not for {numeric.dtype} per {numeric.per}")
    return replace(numeric, search=search)


def parse_activation(words: Any, where: str) -> Numeric:
    """Parse the format of an input or of a cache: a numeric, and `constant`, an amax that is not measured."""
    check_keys(words, _KEYS | {"constant"}, where)
    numeric = parse_numeric({key: value for key, value in words.items() if key != "constant"}, where)
    if "constant" not in words:
        return numeric
    constant = words["constant"]
    if type(constant) not in (int, float) or not 0 < constant < math.inf:
        raise SchemeError(f"{where}: constant = {constant!r}; expected the amax, a positive number")
    if not numeric.static:
        raise SchemeError(f"{where}: constant = {constant}, but every scale is computed when the model runs; drop it")
    return replace(numeric, constant=float(constant))


def parse_parity(words: Any, where: str) -> Gates:
    """Parse [parity.tensor] and [parity.output]."""
    gates = {}
    if not isinstance(words, dict) or set(words) != {"tensor", "output"}:
        raise SchemeError(f"{where}: `parity` needs the tables [parity.tensor] and [parity.output]")
    for key, gate in words.items():
        at = f"{where}: [parity.{key}]"
        norm = gate.get("norm") if isinstance(gate, dict) else None
        if norm is None or set(gate) != {"cosine", "norm"} or not isinstance(norm, list) or len(norm) != 2:
            raise SchemeError(f"{at}: expected `cosine` and `norm = [low, high]`")
        numbers = (gate["cosine"], *norm)
        if not all(type(n) in (int, float) for n in numbers) or not (0 < numbers[0] <= 1 and norm[0] < 1 < norm[1]):
            raise SchemeError(f"{at}: cosine in (0, 1] and norm around 1, got {numbers}")
        gates[key] = Gate(float(gate["cosine"]), (float(norm[0]), float(norm[1])))
    return Gates(gates["tensor"], gates["output"])


def parse_options(words: Any, algorithm: str, where: str) -> tuple[tuple[str, float], ...]:
    """Parse the algorithm's parameters; missing ones get its defaults."""
    known = ALGORITHMS[algorithm]
    check_keys(words, set(known), f"{where}: [options] of algorithm {algorithm!r}")
    for key, value in words.items():
        if key == "steps":
            if type(value) is not int or not 1 <= value <= MOST_STEPS:
                raise SchemeError(f"{where}: [options] steps = {value!r}; expected a whole number, 1 to {MOST_STEPS}")
        elif type(value) not in (int, float) or not 0 < value <= 1:
            raise SchemeError(f"{where}: [options] {key} = {value!r}; expected a number in (0, 1]")
    if words.get("min_clip_ratio") == 1:
        raise SchemeError(f"{where}: [options] min_clip_ratio = 1 clips nothing; expected a number below 1")
    return tuple(sorted({**known, **{key: float(value) for key, value in words.items()}}.items()))


def parse_policies(words: Any, where: str) -> Policies:
    """Parse [policy]: how an amax that is zero, never seen or not finite is replaced."""
    check_keys(words, {"zero", "never_seen", "not_finite"}, f"{where}: [policy]")
    for key, value in words.items():
        if value not in POLICIES:
            raise SchemeError(f"{where}: [policy] {key} = {value!r} is unknown; {nearest(str(value), POLICIES)}")
    return Policies(**words)


def parse_only(words: Any, where: str) -> tuple[str, ...]:
    """Parse `only`: globs of module names."""
    if not isinstance(words, list) or not all(isinstance(glob, str) and glob for glob in words):
        raise SchemeError(f"{where}: only = {words!r}; expected names or globs in quotes")
    return tuple(words)


def check_keys(words: Any, known: set[str], where: str) -> None:
    """Raise SchemeError for what is not a table, or has unknown keys: a misspelled one must not be ignored."""
    if not isinstance(words, dict):
        raise SchemeError(f"{where}: expected a table, got {words!r}")
    for key in words:
        if key not in known:
            raise SchemeError(f"{where}: key `{key}` is unknown; {nearest(key, known)}")


def read_toml(path: Path) -> dict[str, Any]:
    """Read TOML as data; SchemeError names the file and the line."""
    words: dict[str, Any] = copy_parsed(_parsed(path))
    return words


@cached_by_file
def _parsed(path: Path) -> dict[str, Any]:
    try:
        return load_toml(path)
    except (OSError, ValueError) as cause:
        raise SchemeError(f"{path}: cannot be read as TOML: {cause}") from cause


def parse_rounding(words: dict[str, Any], where: str) -> str:
    """Whose numbers scales are: "" ModelOpt's, or `rounding`."""
    rounding = words.get("rounding", "")
    if rounding not in ("", LLM_COMPRESSOR):
        raise SchemeError(f"{where}: rounding = {rounding!r} is unknown; leave it out, or write {LLM_COMPRESSOR!r}")
    return str(rounding)
