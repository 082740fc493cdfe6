"""Which program loads which scheme: the contracts of mappings/runtimes as tables."""

from __future__ import annotations

from bridge.planning.contract_files import runtimes
from bridge.planning.contracts import Runtime
from bridge.quant.describe import contract_words
from bridge.quant.schemes.catalog import scheme_names
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.scheme import Scheme
from docs.generate.matrix import table


def schemes() -> str:
    """A row per scheme, a column per program: `run` or `read`, and the flags of the output; `no` if it is refused."""
    known = runtimes()
    rows = [[f"`{name}`", *(_cell(runtime, load_scheme(name)) for runtime in known)] for name in scheme_names()]
    return table(["scheme", *(runtime.title for runtime in known)], rows)


def _cell(runtime: Runtime, scheme: Scheme) -> str:
    """The first output of the program's contract that has the scheme."""
    for contract in runtime.contracts:
        if contract.has(scheme.formats):
            evidence = {contract.loads[contract_words(format_)].evidence.how for format_ in scheme.formats}
            return f"{'run' if evidence == {'run'} else 'read'}: `{contract.flags('hf')}`"
    return "no"


def evidence() -> str:
    """What the rows of each contract rest on."""
    rows = []
    for runtime in runtimes():
        for contract in runtime.contracts:
            places = dict.fromkeys((row.evidence.how, row.evidence.where) for row in contract.loads.values())
            rows += [[runtime.title, f"`{contract.flags()}`", how, f"`{where}`"] for how, where in places]
    return table(["program", "output", "how", "where {: .wide }"], rows)
