"""Quality of schemes and of other programs, and the best for a purpose, from `mappings/quality.toml`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from bridge.api.advice import PURPOSES, best_for
from bridge.api.sensitivity.budget import is_automatic
from bridge.calibration.data import SAMPLES
from bridge.calibration.requirements import default_samples
from bridge.core.errors import BridgeError
from bridge.planning.contract_files import runtimes
from bridge.quant.describe import input_bits, nominal_bits
from bridge.quant.schemes.catalog import layout_of, rules_of, scheme_names
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.quality import (
    DITHERED,
    EMBEDDING,
    GIVEN,
    KINDS,
    PLAIN,
    Quality,
    Rows,
    read_quality,
)  # fmt: skip
from bridge.quant.schemes.scheme import Scheme
from docs.generate.matrix import address, table

NOT = "not measured"
OLDER = "*"  # behind a figure, for what `older_words` says
BESIDE = "schemes/"  # links of the page that stands beside the schemes' own
SMALL = ("tiny-llama", "tiny-gpt2")
(ENCODER,) = EMBEDDING
# What a user wants, the scheme, and the reason; the figures beside them are measured.
PICKS = (
    ("a loss that hardly shows, no data", "int8_wo", "weights only: half of the memory, arithmetic as before"),
    ("faster arithmetic with 8 bits, no data", "fp8_pc_pt", "scales of activations are computed at run time"),
    ("the same in every program with FP8", "fp8", "static scales; 32 sequences of any text are enough"),
    ("the same without FP8 hardware", "int8", "static scales after SmoothQuant, 128 sequences of text"),
    ("4-bit weights, no data", "nvfp4_wo_mse", "blocks of 16 under searched scales"),
    ("4-bit integer weights, no data", "int4:rtn", "the largest weight of a block takes code -8"),
    ("4-bit integer weights, calibrated", "int4:gptq", "codes chosen column by column, scales of either sign"),
    ("4-bit weights and activations", "nvfp4_mse", "the arithmetic of nvfp4, less loss of the weights"),
    ("the same without data", "nvfp4_input_scale1", "no calibration; a model of any size streams"),
    ("the same where it hurts least", "nvfp4_mlp_only", "attention stays unquantized"),
    ("llama.cpp, 4 bits", "q4_0_imatrix", "`q4_0` takes no data; `q4_k_m` takes none, and loses less with more bits"),
    ("llama.cpp, 8 bits", "q8_0", "no data"),
)
# A layout, and the rows that write it: ours, and those of other programs.
LAYOUTS = (
    ("INT4 in blocks of 64, calibrated",
     ("int4:gptq", "int4:gptq --samples 32", "int4:awq", "int4:imatrix", "int4:signround steps=20 --samples 32",
      "int4_gptq", "int4_awq"),
     ("AutoRound 20", "AutoRound 200", "llm-compressor GPTQ", "ModelOpt INT4_AWQ_CFG")),
    ("NVFP4 weights, calibrated",
     ("nvfp4_wo:gptq", "nvfp4_wo:gptq --samples 32", "nvfp4_wo:imatrix"), ("llm-compressor GPTQ NVFP4A16",)),
    ("MXFP4 weights, calibrated",
     ("mxfp4_wo:gptq", "mxfp4_wo:gptq --samples 32", "mxfp4_wo:imatrix"), ("llm-compressor GPTQ MXFP4A16",)),
    ("INT4 in blocks of 64, no data", ("int4:rtn", "int4_mse", "int4_wo"),
     ("llm-compressor RTN", "ModelOpt INT4_BLOCKWISE_WEIGHT_ONLY_CFG")),
    ("NVFP4 weights, no data", ("nvfp4_wo:mse", "nvfp4_wo"), ("llm-compressor NVFP4A16", "ModelOpt W4A16_NVFP4_CFG")),
    ("MXFP4 weights, no data", ("mxfp4_wo:mse",), ("llm-compressor MXFP4A16",)),
    ("INT4 in blocks of 32 and the head, for ONNX Runtime, calibrated",
     ("int4:gptq --target ort --group 32 --vocabulary quantize",
      "int4:imatrix --target ort --group 32 --vocabulary quantize"),
     ("onnxruntime-genai int4",)),
    ("INT4 in blocks of 32 and the head, for ONNX Runtime, no data",
     ("int4:rtn --target ort --group 32 --vocabulary quantize",), ("onnxruntime-genai int4",)),
    ("FP8 and inputs by token", ("fp8_pc_pt",), ("llm-compressor FP8_DYNAMIC",)),
    ("INT8 by channel", ("int8_wo",), ("llm-compressor RTN INT8", "ModelOpt INT8_WEIGHT_ONLY_CFG")),
)  # fmt: skip


def schemes() -> str:
    """A row for each scheme on the real model: those with few bits first, the best of them first."""
    found = {**{name: {} for name in scheme_names()}, **read_quality()}
    rows = [_row(name, found[name], _data(name)) for name in sorted(found, key=lambda name: _order(found[name], name))]
    return table(_heads("scheme", "data"), rows)


def peers() -> str:
    """A row for each other program, in the same order."""
    found = read_quality(KINDS[1])
    rows = [_row(name, found[name], "") for name in sorted(found, key=lambda name: _order(found[name], None))]
    made = table([head for head in _heads("program", "") if head], [[*row[:2], *row[3:]] for row in rows])
    return "\n\n".join(filter(None, [made, _on_example(found)]))


def _on_example(found: Rows) -> str:
    """The figures of programs that were measured on the first example model alone, beside `int4:rtn` there."""
    model = SMALL[0]
    alone = {name: rows[model] for name, rows in found.items() if not {*rows} & {GIVEN, DITHERED} and model in rows}
    figures = [f"`{name}` {_cell(one, 'kl', '.4f')} ({_cell(one, 'bits', '.2f')} bits)" for name, one in alone.items()]
    beside = _cell(read_quality().get("int4:rtn", {}).get(model), "kl", ".4f")
    text = f"Measured on {model} alone, by KL: {', '.join(figures)}; `int4:rtn` of `bridge` {beside} there."
    return text if alone else ""


def layouts() -> str:
    """A row for each layout: our best row, the best of other programs, and how much lower ours is."""
    found = {kind: read_quality(kind) for kind in KINDS}
    rows = []
    for layout, ours, theirs in LAYOUTS:
        (kl, name), (least, peer) = _first(found[KINDS[0]], ours), _first(found[KINDS[1]], theirs)
        same, like = _first(found[KINDS[0]], on_same_rows(ours))
        alone = [_with_kl(like, same), _lower(same, least)] if like != name else ["", ""]
        rows.append([layout, _with_kl(name, kl), _with_kl(peer, least), _lower(kl, least), *alone])
    heads = ["layout", "best of bridge", "best of other programs", "lower by", f"on {SAMPLES} rows", "lower by"]
    return table(heads, rows)


def on_same_rows(names: Iterable[str]) -> list[str]:
    """Those that calibrate on as many rows of text as other programs get."""
    same = f"--samples {SAMPLES}"
    return [name for name in names if same in name or default_samples(_scheme(name)) == SAMPLES]


def _lower(kl: float, least: float) -> str:
    return f"{100 * (1 - kl / least):.0f} %" if max(kl, least) < math.inf else ""


def _first(found: Rows, names: Iterable[str]) -> tuple[float, str]:
    """The least KL of these rows on the dithered model, and the row; infinite if none was measured."""
    return min((_kl(found, name), name) for name in names)


def _kl(found: Rows, name: str) -> float:
    kl = found.get(name, {}).get(DITHERED, Quality()).kl
    return math.inf if kl is None else kl


def _with_kl(name: str, kl: float) -> str:
    return f"`{name}` {kl:.4f}" if kl < math.inf else NOT


def small() -> str:
    """A row for each scheme on the example models and the encoder; reasons stand below the table."""
    notes: dict[str, int] = {}
    first, second = SMALL
    rows = []
    for name in sorted(scheme_names(), key=lambda name: (int(_bits(name)), _value(name, first, "kl"))):
        found = read_quality().get(name, {})
        cells = [
            _cell(found.get(model), figure, form, notes)
            for model, figure, form in (
                (first, "kl", ".4f"), (first, "perplexity", ".2f"), (second, "kl", ".4f"),
                (second, "perplexity", ".2f"), (ENCODER, "cosine", ".4f"), (ENCODER, "error", ".3f"),
            )
        ]  # fmt: skip
        rows.append([_link(name), f"{_bits(name):.2f}", str(input_bits(load_scheme(name))), _data(name), *cells])
    plain = read_quality()[PLAIN]
    ends = [f"{plain[model].perplexity:.2f}" for model in SMALL]
    rows.append(["unquantized", "16", "16", "no", "0", ends[0], "0", ends[1], "1", "0"])
    columns = ["scheme", "bits", "of inputs", "data", f"{first}: KL", "perplexity", f"{second}: KL", "perplexity"]
    whys = " ".join(f"[{mark}] {why[0].upper()}{why[1:]}." for why, mark in notes.items())
    made = table([*columns, f"{ENCODER}: cosine", "error"], rows)
    return "\n\n".join(filter(None, [made, older_words(made), whys]))


def older_words(made: str) -> str:
    """What the mark of older figures means, "" for a table without any."""
    return (
        "\\* Measured before the other figures, not by other programs: the weights were decoded by the codecs of this "
        "package, inputs were quantized by them, too, and bits are those of the plan."
        if f"\\{OLDER}" in made
        else ""
    )


def tasks() -> str:
    """A row for each measured accuracy on the task: by KL, with both ranks."""
    found = {
        (name, model): quality
        for kind in KINDS
        for name, rows in read_quality(kind).items()
        for model, quality in rows.items()
        if quality.accuracy is not None and quality.kl is not None
    }
    by_kl = sorted(found, key=lambda key: found[key].kl or 0)
    by_task = sorted(found, key=lambda key: -(found[key].accuracy or 0))
    rows = [
        [f"`{name}`", model, f"{found[name, model].kl:.4f}", f"{found[name, model].accuracy:.3f}",
         str(by_kl.index((name, model)) + 1), str(by_task.index((name, model)) + 1)]
        for name, model in by_kl
    ]  # fmt: skip
    return table(["row", "model", "KL", "accuracy", "rank by KL", "rank by accuracy"], rows) if rows else f"{NOT}."


def reports() -> str:
    """A row for each conversion whose report foretold the loss, beside what was measured."""
    rows = []
    for name, found in read_quality().items():
        for model, quality in found.items():
            plain = read_quality()[PLAIN].get(model, Quality()).perplexity
            if quality.reported is not None and quality.perplexity and plain:
                rise = math.log(quality.perplexity / plain)
                rows.append([_link(name), model, f"{quality.reported:.4f}", f"{rise:.4f}", _cell(quality, "kl", ".4f")])
    heads = ["scheme", "model", "rise by the report", "rise measured", "KL measured"]
    made = table(heads, rows)
    return "\n\n".join(filter(None, [made, older_words(made)])) if rows else f"{NOT}."


def picks() -> str:
    """A row for each purpose: the scheme, what it costs, and why."""
    rows = [
        [purpose, _link(name, BESIDE), f"{_bits(name):.2f}", kl_words(name), reason] for purpose, name, reason in PICKS
    ]
    return table(["wanted", "scheme", "bits", "KL", "why {: .wide }"], rows)


def best() -> str:
    """A row for each program: of the schemes that it loads, those with the least KL divergence."""
    rows = []
    for runtime in runtimes():
        rows.append([f"`{runtime.name}`", *map(_least, best_for(runtime).values())])
    return table(["program", *PURPOSES], rows)


def kl_words(name: str) -> str:
    """The KL divergence of a scheme on the dithered real model, else on the given one, in words."""
    found = read_quality().get(name, {})
    dithered, given = (found.get(model, Quality()).kl for model in (DITHERED, GIVEN))
    if dithered is not None:
        return f"{dithered:.4f}"
    return NOT if given is None else f"{given:.4f} given"


def _heads(first: str, data: str) -> list[str]:
    return [
        first, "bits", data, "given: KL", "&#177;", "perplexity", "top-1", "dithered: KL", "&#177;", "draws", "MB",
        "CPU s", "peak MB",
    ]  # fmt: skip


def _row(name: str, found: dict[str, Quality], data: str) -> list[str]:
    given, dithered = (found.get(model) for model in (GIVEN, DITHERED))
    one = given or dithered or Quality()
    shown = name if name == PLAIN else _link(name) if name in scheme_names() else f"`{name}`"
    bits = _cell(one, "bits", ".2f") or (f"{nominal_bits(load_scheme(name)):.2f}" if name in scheme_names() else "")
    figures = [_cell(given, "kl", ".4f"), _cell(given, "kl_error", ".4f")]
    figures += [_cell(given, "perplexity", ".2f"), _cell(given, "agreement", ".3f")]
    figures += [_cell(dithered, "kl", ".4f"), _cell(dithered, "kl_error", ".4f"), _draws(dithered)]
    ends = [_cell(one, "megabytes", ".0f"), _cell(one, "seconds", ".0f"), _cell(one, "memory", ".0f")]
    return [shown, bits, data, *figures, *ends]


def _draws(quality: Quality | None) -> str:
    return f"{len(quality.draws)}, &#177;{quality.spread:.4f}" if quality and quality.spread is not None else ""


def _cell(quality: Quality | None, figure: str, form: str, notes: dict[str, int] | None = None) -> str:
    """A figure; "not measured" or the reason in place of the first of a model."""
    if quality is None:
        return NOT if figure in ("kl", "cosine") else ""
    if quality.why:
        return f"[{notes.setdefault(quality.why, len(notes) + 1)}]" if notes is not None else quality.why
    value = getattr(quality, figure)
    mark = f"\\{OLDER}" if quality.older and figure in ("kl", "cosine") else ""
    return "" if value is None else f"{value:{form}}{mark}"


def _least(name: str) -> str:
    return f"{_link(name, BESIDE)} {kl_words(name)}" if name else ""


def _value(name: str, model: str, figure: str) -> float:
    """A figure of a row; infinite if it was not measured, so that it comes last."""
    value = getattr(read_quality().get(name, {}).get(model, Quality()), figure)
    return float("inf") if value is None else float(value)


def _order(found: dict[str, Quality], scheme: str | None) -> tuple[float, float, float]:
    kls = [found.get(model, Quality()).kl for model in (DITHERED, GIVEN)]
    measured = next(_all_bits(found), 16.0 if scheme in (PLAIN, None) else None)
    bits = _bits(str(scheme)) if measured is None else measured
    return (16 if scheme == PLAIN else int(bits), *(float("inf") if kl is None else kl for kl in kls))  # type: ignore[return-value]


def _data(name: str) -> str:
    if name == PLAIN:
        return "no"
    try:
        measured = layout_of(name.split()[0]) is not None or is_automatic(name)
        return "yes" if measured or _scheme(name).needs_calibration else "no"
    except BridgeError:  # a scheme that is no longer there
        return ""


def _link(name: str, base: str = "") -> str:
    return f"[`{name}`]({address(name).removeprefix(base)})"


def _bits(name: str) -> float:
    measured = next(_all_bits(read_quality().get(name, {})), None)
    return nominal_bits(_scheme(name)) if measured is None else measured  # `auto:` has no scheme of its own


def _scheme(row: str) -> Scheme:
    """The scheme of a row; of `int4:best` one of the rules that it chooses from, which have the same bits."""
    name = row.split()[0]
    path = layout_of(name)
    return load_scheme(f"{path.stem}:{rules_of(path)[0]}" if path else name)


def _all_bits(found: dict[str, Quality]) -> Iterator[float]:
    return (quality.bits for quality in found.values() if quality.bits)
