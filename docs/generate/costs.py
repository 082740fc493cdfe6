"""What each scheme costs, and the best for a purpose and for a program, from `mappings/costs.toml`."""

from __future__ import annotations

from collections.abc import Callable

from bridge.core.dtypes import DTYPES
from bridge.planning.contract_files import runtimes
from bridge.quant.describe import input_bits, nominal_bits
from bridge.quant.schemes.catalog import scheme_names
from bridge.quant.schemes.costs import EMBEDDING, LANGUAGE, PLAIN, Cost, read_costs
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.scheme import Scheme
from docs.generate.matrix import address, table

FIRST, SECOND = LANGUAGE
(ENCODER,) = EMBEDDING
# What a user wants, the scheme, and the reason; the figures beside them are measured.
PICKS = (
    ("a loss that hardly shows, no data", "int8_wo", "weights only: half of the memory, arithmetic as before"),
    ("faster arithmetic with 8 bits, no data", "fp8_pc_pt", "scales of activations are computed at run time"),
    ("the same in every program with FP8", "fp8", "static scales; 32 sequences of any text are enough"),
    ("the same without FP8 hardware", "int8", "static scales after SmoothQuant, 128 sequences of text"),
    ("4-bit weights, no data", "nvfp4_wo_mse", "blocks of 16 under searched scales"),
    ("4-bit integer weights, no data", "int4_mse", "the files of int4_wo, which most programs have kernels for"),
    ("4-bit integer weights, calibrated", "int4_awq", "measure it against int4_mse: it is better on some models only"),
    ("4-bit weights and activations", "nvfp4_mse", "the arithmetic of nvfp4, less loss of the weights"),
    ("the same without data", "nvfp4_input_scale1", "no calibration; a model of any size streams"),
    ("the same where it hurts least", "nvfp4_mlp_only", "attention stays unquantized"),
    ("llama.cpp, 4 bits", "q4_0_imatrix", "`q4_0` takes no data; K-quants need rows of 256 values, not measured here"),
    ("llama.cpp, 8 bits", "q8_0", "no data"),
)


def costs() -> str:
    """A row for each scheme, those with few bits first and the best of them first; reasons stand below the table."""
    notes: dict[str, int] = {}
    rows = [_row(name, read_costs().get(name, {}), notes) for name in sorted(scheme_names(), key=_order)]
    plain = read_costs()[PLAIN]
    first, second = (f"{plain[model].perplexity:.2f}" for model in LANGUAGE)
    rows.append(["unquantized", "16", "16", "no", "0", first, "0", second, "1", "0", "", ""])
    columns = [
        "scheme", "bits of weights", "of inputs", "data", f"{FIRST}: KL", "perplexity", f"{SECOND}: KL", "perplexity",
        f"{ENCODER}: cosine", "error", f"seconds: {FIRST}", ENCODER,
    ]  # fmt: skip
    whys = " ".join(f"[{mark}] {why[0].upper()}{why[1:]}." for why, mark in notes.items())
    return f"{table(columns, rows)}\n\n{whys}"


def picks() -> str:
    """A row for each purpose: the scheme, what it costs, and why."""
    rows = []
    for purpose, name, reason in PICKS:
        kl = _kl(name)
        rows.append([purpose, _link(name), f"{_bits(name):.2f}", "" if kl is None else f"{kl:.4f}", reason])
    return table(["wanted", "scheme", "bits", "KL", "why {: .wide }"], rows)


def best() -> str:
    """A row for each program: of the schemes that it loads, those with the least KL divergence."""
    classes: dict[str, Callable[[Scheme], bool]] = {
        "8-bit weights": lambda s: _code_bits(s) == 8 and s.input is None,
        "8-bit weights and inputs": lambda s: _code_bits(s) == 8 and s.input is not None,
        "4-bit weights, no data": lambda s: _code_bits(s) == 4 and s.input is None and not s.needs_calibration,
        "4-bit weights, calibrated": lambda s: _code_bits(s) == 4 and s.input is None and s.needs_calibration,
        "4-bit weights, 4- or 8-bit inputs": lambda s: _code_bits(s) == 4 and s.input is not None,
    }
    whole = [scheme for scheme in map(load_scheme, scheme_names()) if not scheme.only]
    rows = []
    for runtime in runtimes():
        loaded = [s for s in whole if any(not contract.lacks(s.formats) for contract in runtime.contracts)]
        rows.append([f"`{runtime.name}`", *(_least([s.name for s in loaded if fits(s)]) for fits in classes.values())])
    return table(["program", *classes], rows)


def _least(names: list[str]) -> str:
    found = [(kl, name) for name in names if (kl := _kl(name)) is not None]
    return f"{_link(min(found)[1])} {min(found)[0]:.4f}" if found else ""


def _row(name: str, found: dict[str, Cost], notes: dict[str, int]) -> list[str]:
    first, second, encoder = (found.get(model, Cost()) for model in (*LANGUAGE, *EMBEDDING))
    figures = (
        (first, first.kl, ".4f"), (first, first.perplexity, ".2f"), (second, second.kl, ".4f"),
        (second, second.perplexity, ".2f"), (encoder, encoder.cosine, ".4f"), (encoder, encoder.error, ".3f"),
        (first, first.seconds, ".1f"), (encoder, encoder.seconds, ".1f"),
    )  # fmt: skip
    cells = []
    for cost, figure, form in figures:
        mark = f"[{notes.setdefault(cost.why, len(notes) + 1)}]" if cost.why else ""
        cells.append(mark if figure is None else format(figure, form))
    scheme = load_scheme(name)
    data = "yes" if scheme.needs_calibration else "no"
    return [_link(name), f"{_bits(name):.2f}", str(input_bits(scheme)), data, *cells]


def _link(name: str) -> str:
    return f"[`{name}`]({address(name).removeprefix('schemes/')})"


def _code_bits(scheme: Scheme) -> int:
    return DTYPES[scheme.weight[0].dtype].bits


def _kl(name: str) -> float | None:
    return read_costs().get(name, {}).get(FIRST, Cost()).kl


def _bits(name: str) -> float:
    measured = (cost.bits for cost in read_costs().get(name, {}).values() if cost.bits)
    return next(measured, nominal_bits(load_scheme(name)))


def _order(name: str) -> tuple[int, float]:
    kl = _kl(name)
    return int(_bits(name)), 1.0 if kl is None else kl
