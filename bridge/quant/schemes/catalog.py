"""Schemes and KV cache formats by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bridge.core.dtypes import SEARCHED
from bridge.core.errors import SchemeError, UsageError
from bridge.core.mappings import find_table_file, mappings, shown, table_files
from bridge.core.parsing.file_cache import cached_by_file
from bridge.core.text import nearest
from bridge.core.values import Format, Numeric
from bridge.quant.schemes.grammar import (
    ALGORITHMS,
    check_keys,
    parse_activation,
    parse_only,
    parse_options,
    parse_parity,
    parse_policies,
    parse_weight,
    read_toml,
)
from bridge.quant.schemes.scheme import Scheme

# Types of llama.cpp whose codes its own quantizer chooses.
_GGML = (
    "q4_1", "q5_0", "q5_1", "q2_k", "q2_k_s", "q3_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s", "q4_k_m", "q5_k_s",
    "q5_k_m", "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq2_m", "iq3_xxs", "iq3_xs", "iq3_s",
    "iq3_m", "iq4_nl", "iq4_xs", "tq1_0", "tq2_0",
)  # fmt: skip
# What other tools call a scheme, where no scheme here is the same thing.
ELSEWHERE = {
    **{
        name: "only llama-quantize makes it: convert with --target gguf --dtype fp16 and no scheme, then "
        f"run llama-quantize model.gguf out.gguf {name.upper()}; q4_k, q5_k, q6_k, q4_0 and q8_0 are schemes here, "
        "the first four also with _imatrix behind, and a recipe mixes them"
        for name in _GGML
    },
    **dict.fromkeys(
        ("imatrix", "q8_0_imatrix"),
        "llama.cpp weighs errors by an importance matrix in q4_k_imatrix, q5_k_imatrix, q6_k_imatrix and q4_0_imatrix",
    ),
    "w8a8": "with FP8 that is fp8 (or fp8_pc_pt), with INT8 int8_sq (or int8)",
    "w4a16": "int4_awq is calibrated, int4_wo takes no data",
    "int4": "int4_awq is calibrated, int4_wo takes no data",
    "mxfp4": "mxfp4_wo has MXFP4 weights, mxfp8 has MXFP8 weights and activations",
    "fp8_dynamic": "fp8_pc_pt has weights per channel and activations per token",
    "nvfp4a16": "nvfp4_wo has NVFP4 weights and no quantized activations",
    **dict.fromkeys(("fp16", "float16"), "it is a dtype; leave the scheme out, and pass dtype='fp16' (--dtype fp16)"),
    **dict.fromkeys(("bf16", "bfloat16"), "it is a dtype; leave the scheme out, and pass dtype='bf16' (--dtype bf16)"),
    "bnb": "bitsandbytes' kernels quantize at load; int4_wo and nvfp4_wo take no data either",
    "bitsandbytes": "its kernels quantize at load; int4_wo and nvfp4_wo take no data either",
    "fp4": "nvfp4 and mxfp4_wo are the schemes with 4-bit floats",
    "gptq": "int4_gptq chooses the codes of int4_wo by GPTQ; format='gptq' (--format gptq) writes its file format",
    "nf4": "NF4 belongs to bitsandbytes, whose kernels quantize at load; int4_wo and nvfp4_wo take no data either",
}
# The weight that awq_clip may have. With a second numeric ModelOpt measures amax again and drops the clips, of NVFP4 it
# clips the scale above the blocks alone, and an input's amax would be that of the last batch.
CLIPPED = ("int4", "block", "", 1)
KEYS = {
    "summary", "aliases", "algorithm", "needs_cuda",
    "weight", "input", "options", "parity", "policy", "only",
}  # fmt: skip


def scheme_names() -> list[str]:
    """Names of the schemes, without aliases."""
    return [path.stem for path in table_files("schemes") if path.stem != "kv"]


def kv_names() -> list[str]:
    """Values that `kv=` accepts."""
    return sorted(read_toml(mappings() / "schemes" / "kv.toml"))


def kv_numeric(kv: str) -> Numeric:
    """The format of a KV cache by its name; UsageError if the name is unknown."""
    path = mappings() / "schemes" / "kv.toml"
    tables = read_toml(path)
    if kv not in tables:
        raise UsageError(f"kv={kv!r} is unknown; {nearest(kv, tables)}")
    words = {key: value for key, value in tables[kv].items() if key != "summary"}
    return parse_activation(words, f"{path}: [{kv}]")


def named_scheme(name: str) -> Scheme:
    """The scheme of that name or alias, in any case; UsageError if there is none."""
    for word in dict.fromkeys((name, name.lower())):
        if word != "kv" and (path := find_table_file("schemes", word)):
            return read_scheme(path)
    word = name.lower()
    aliases: dict[str, Path] = {}
    for file in table_files("schemes"):
        aliases |= {alias: file for alias in read_toml(file).get("aliases", [])}
    if word in aliases:
        return read_scheme(aliases[word])
    if word in ELSEWHERE:
        raise UsageError(f"quant={name!r} is not a scheme here: {ELSEWHERE[word]}; `qbridge show schemes` lists all")
    hint = "a recipe is given by its path, ending in .toml"
    raise UsageError(f"quant={name!r} is unknown; {nearest(name, [*scheme_names(), *aliases])}; {hint}")


@cached_by_file
def read_scheme(path: Path) -> Scheme:
    """Parse the scheme in `path`; SchemeError names the file and the key."""
    words = read_toml(path)
    where = shown(path)
    check_keys(words, KEYS, where)
    for key in ("summary", "weight", "parity"):
        if key not in words:
            raise SchemeError(f"{where}: `{key}` is missing")
    algorithm = words.get("algorithm", "max")
    if algorithm not in ALGORITHMS:
        raise SchemeError(f"{where}: algorithm {algorithm!r} is unknown; {nearest(str(algorithm), ALGORITHMS)}")
    weights = words["weight"]
    if not isinstance(weights, list) or not weights or not all(isinstance(w, dict) for w in weights):
        raise SchemeError(f"{where}: `weight` is written as one or several [[weight]] tables")
    activation = words.get("input")
    numerics = tuple(parse_weight(w, f"{where}: [[weight]]") for w in weights)
    if algorithm == "imatrix" and any(numeric.dtype not in SEARCHED for numeric in numerics):
        raise SchemeError(
            f"{where}: algorithm 'imatrix' chooses codes of {', '.join(SEARCHED)} only, llama.cpp's blocks"
        )
    entry = None if activation is None else parse_activation(activation, f"{where}: [input]")
    form, options = Format(numerics, entry, algorithm), parse_options(words.get("options", {}), algorithm, where)
    if form.clipped and (entry or [(n.dtype, n.per, n.search, len(n.block)) for n in numerics] != [CLIPPED]):
        raise SchemeError(
            f"{where}: algorithm {algorithm!r} clips INT4 in blocks along `in`, without [input] or search"
        )
    _check_chosen(algorithm, numerics, where)
    return Scheme(
        name=path.stem,
        summary=str(words["summary"]),
        weight=numerics,
        input=entry,
        parity=parse_parity(words["parity"], where),
        algorithm=algorithm,
        options=options,
        policies=parse_policies(words.get("policy", {}), where),
        needs_cuda=str(words.get("needs_cuda", "")),
        only=parse_only(words.get("only", []), where),
        origin=where,
    )


def _check_chosen(algorithm: str, numerics: Sequence[Numeric], where: str) -> None:
    """SchemeError for a weight whose codes or scales an algorithm cannot choose."""
    first = numerics[0]
    kind = (first.dtype, first.scale_dtype, len(first.block), first.search, len(numerics))
    nvfp4, int4 = ("float4_e2m1fn", "float8_e4m3fn", 1, "", 1), ("int4", "float32", 1, "", 1)
    if algorithm == "gptq" and kind not in (nvfp4, int4):
        raise SchemeError(f"{where}: algorithm 'gptq' is for one [[weight]] of INT4 or NVFP4 in blocks along `in`")
    if algorithm == "local_hessian" and kind != nvfp4:
        raise SchemeError(f"{where}: algorithm 'local_hessian' is for one [[weight]] of NVFP4, without search")
