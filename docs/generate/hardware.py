"""What to begin with on a machine, and what each generation of GPUs multiplies in."""

from __future__ import annotations

from collections.abc import Iterator

from bridge.api.advice import best_of, measured_as, read_advice
from bridge.core.mappings import mappings, read_table
from bridge.planning.contract_files import load_runtime
from bridge.planning.programs import Runtime
from bridge.quant.describe import contract_words
from bridge.quant.schemes.catalog import scheme_names
from bridge.quant.schemes.load import load_scheme
from docs.generate.matrix import table
from docs.generate.quality import kl_words

SERVERS = ("vllm", "sglang", "trtllm")
BUILDER = "tensorrt-rtx"


def advice() -> str:
    """A row a machine: its programs, the options to begin with, and those of 4 bits, with their KL."""
    rows = []
    for row in read_advice():
        first, *others = row.programs
        programs = ", ".join(load_runtime(name).program for name in row.programs)
        also = f" (or {', '.join(f'`{name}`' for name in others)})" if others else ""
        made = [[f"`--target {first} --quant {name}`{also}", _kl(name, first)] for name in (row.scheme, row.small)]
        rows.append([row.machine, programs, *made[0], *made[1]])
    return table(
        ["hardware", "server", "`qbridge convert MODEL --out OUT` ...", "KL", "if memory is short", "KL"], rows
    )


def _kl(name: str, program: str) -> str:
    """The KL of the file that a program's target writes: a rule's row alone is of compressed-tensors."""
    target = load_runtime(program).contracts[0].target
    return kl_words(measured_as(name, target))


def gpus() -> str:
    """A row an architecture: formats of products, schemes with codes on both sides or weights alone, and their KL."""
    rows = []
    for architecture, row in read_table(mappings() / "runtimes" / f"{BUILDER}.toml").section("multiplies").items():
        both = "; ".join(_multiplied(row["formats"].split(", "), architecture))
        alone = ", ".join(
            f"`{name}` ({kl_words(name)})"
            for words, name in _schemes()
            if _computes(words, architecture) == "weight-only"
        )
        rows.append([row["shown"], architecture.upper(), row["formats"], both, alone or "no engine: see `trtexec.txt`"])
    heads = ["GPUs", "architecture", "multiplies in", "codes on both sides: loaded by", f"weights alone in {_title()}"]
    return table(heads, rows)


def _title() -> str:
    return load_runtime(BUILDER).program


def _schemes() -> Iterator[tuple[str, str]]:
    """The words of each pair of formats that is a scheme of its own, and the scheme that has it with the least KL."""
    alike: dict[str, list[str]] = {}
    for name in scheme_names():
        words = {contract_words(format_) for format_ in load_scheme(name).formats}
        if len(words) == 1:
            alike.setdefault(words.pop(), []).append(name)
    for pair, names in alike.items():
        yield pair, best_of(names) or names[0]


def _multiplied(formats: list[str], architecture: str) -> Iterator[str]:
    """Schemes whose inputs and weights have one of some formats, each with the programs that load it.

    Weights in INT4 become FP8 before the product.
    """
    for words, name in _schemes():
        weights, inputs = (_format(side) for side in words.split(" | "))
        programs = [load_runtime(server).program for server in SERVERS if _loads(load_runtime(server), name)]
        programs += [_title()] if _computes(words, architecture) == "gemm" else []
        if inputs in formats and weights in (*formats, "int4") and programs:
            yield f"`{name}` ({kl_words(name)}): {', '.join(programs)}"


def _format(words: str) -> str:
    return "mxfp8" if words.startswith("fp8") and "e8m0" in words else words.split()[0]


def _loads(runtime: Runtime, scheme: str) -> bool:
    return any(not contract.lacks(load_scheme(scheme).formats) for contract in runtime.contracts)


def _computes(words: str, architecture: str) -> str:
    """What the builder makes of products of these formats for an architecture; "" if it builds none."""
    order = list(read_table(mappings() / "runtimes" / f"{BUILDER}.toml").section("gpus"))
    row = load_runtime(BUILDER).contracts[0].loads.get(words)
    known = row and architecture in order and order.index(row.since) <= order.index(architecture)
    return row.computes if row and known else ""
