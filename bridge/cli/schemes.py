"""List the schemes to begin with, those of one program, or all."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bridge.api.advice import divergence, loaded_by, measured_as, recommended
from bridge.core.mappings import find_table_file, table_files
from bridge.core.text import number
from bridge.planning.contract_files import load_runtime
from bridge.quant.describe import input_bits, nominal_bits
from bridge.quant.schemes.catalog import RULE, scheme_names
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.quality import DITHERED, Quality, read_quality
from bridge.quant.schemes.scheme import Scheme
from bridge.reporting.columns import Columns

WIDTH = 80
WEIGHTS_ONLY = ", activations unquantized"  # which the column of inputs says
COLUMNS = ("scheme", "bits", "in", "KL", "data", "what it is")


def schemes(every: bool, runtime: str | None) -> tuple[Any, list[Any]]:
    """Their data, all that the program loads, and the list that is printed."""
    program = None if runtime is None else load_runtime(runtime)
    known = scheme_names() if program is None else loaded_by(program)
    chosen = dict.fromkeys(known, "") if every else recommended(program)
    rows = list(_rows(chosen, program.contracts[0].target if program else "hf"))
    return [scheme_data(load_scheme(name)) for name in known], [
        Columns(COLUMNS, rows, (1, 2, 3), wrap=False), "", _note(len(chosen), len(known), runtime)
    ]  # fmt: skip


def _rows(chosen: Mapping[str, str], target: str) -> Iterator[tuple[str, ...]]:
    """A row a scheme, rules of choosing codes below the scheme or the layout whose files they write."""
    names = {name: f"  {name}" if RULE in name else name for name in _in_order(chosen)}
    text = WIDTH - sum((max(map(len, names.values())), 4, 2, 6, 4)) - 2 * len(COLUMNS)
    for name, shown in names.items():
        if name not in chosen:
            yield shown, "", "", "", "", _wrapped([_best_words(name)], text)
            continue
        scheme, kl = load_scheme(name), divergence(name, target)
        quality = read_quality().get(measured_as(name, target), {}).get(DITHERED, Quality())
        bits, loss = quality.bits or nominal_bits(scheme), "-" if kl is None else f"{kl:.4f}"
        summary = scheme.summary.removesuffix(WEIGHTS_ONLY)
        yield shown, f"{bits:.2f}", f"{input_bits(scheme):g}", loss, _data(scheme), _wrapped(
            [summary, *([chosen[name]] if chosen[name] else [])], text
        )  # fmt: skip


def _in_order(chosen: Iterable[str]) -> list[str]:
    """The names with each rule after its layout, which is named too."""
    found = dict.fromkeys(chosen)
    layouts = [path.stem for path in table_files("rules")]
    ordered: dict[str, None] = {}
    for name in found:
        layout, colon, _ = name.partition(RULE)
        if colon and layout in layouts:
            ordered |= dict.fromkeys([layout, *(one for one in found if one.startswith(f"{layout}{RULE}"))])
        else:
            ordered |= {name: None}
            ordered |= dict.fromkeys(one for one in found if one.startswith(f"{name}{RULE}"))
    return list(ordered)


def _best_words(layout: str) -> str:
    """What the name of a layout without a rule means."""
    scheme = load_scheme(layout).summary.removesuffix(WEIGHTS_ONLY) if find_table_file("schemes", layout) else ""
    return scheme or "the best of its rules on your model"


def _data(scheme: Scheme) -> str:
    return ("CUDA" if scheme.needs_cuda else "yes") if scheme.needs_calibration else "no"


def _wrapped(texts: Iterable[str], width: int) -> str:
    return "\n".join(
        line for text in texts for line in textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)
    )


def _note(shown: int, known: int, runtime: str | None) -> str:
    """What the columns mean, and which list has more."""
    option = f" --for {runtime}" if runtime else ""
    lines = [
        "bits: of the file, a weight (16 of one that is left out). in: bits of inputs.",
        "KL: nats a token on SmolLM2-135M, dithered; -: not measured. data: calibrated?",
        *([f"`qbridge show schemes{option} --all`: all {number(known, 'scheme')}."] if shown < known else []),
        *([] if runtime else ["`qbridge show schemes --for vllm`: what a program loads."]),
        "`qbridge show fp8`: more of one.",
    ]
    return "\n".join(lines)


def scheme_data(scheme: Scheme) -> dict[str, Any]:
    """Everything that a scheme's file says, for scripts."""
    fields = dataclasses.asdict(scheme)
    fields["told"] = fields.pop("note")  # the key that scripts read
    return {key: value for key, value in fields.items() if key not in ("origin", "depth")}
