"""Which program loads which scheme: the contracts of mappings/runtimes as tables."""

from __future__ import annotations

from bridge.planning.contract_files import load_runtime, runtimes
from bridge.planning.faults import FAULTS
from bridge.planning.programs import Contract, Runtime
from bridge.quant.describe import contract_words
from bridge.quant.schemes.catalog import scheme_names
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.scheme import Scheme
from bridge.workflows.doctor.finding import NOT_SHOWN, SERVING
from docs.generate.matrix import table


def schemes() -> str:
    """A row per scheme, a column per program: `run`, `built`, `read`, or `no` if it is refused."""
    known = runtimes()
    rows = [[f"`{name}`", *(_cell(runtime, load_scheme(name)) for runtime in known)] for name in scheme_names()]
    return table(["scheme", *(f"`{runtime.name}`" for runtime in known)], rows)


def _cell(runtime: Runtime, scheme: Scheme) -> str:
    """How it is known of the first output that has the scheme, which `--for` writes."""
    for contract in runtime.contracts:
        if not contract.lacks(scheme.formats):
            evidence = {contract.loads[contract_words(format_)].evidence.how for format_ in scheme.formats}
            return next((how for how in ("read", "built") if how in evidence), "run")
    return "no"


def faults() -> str:
    """What `qbridge check` finds in checkpoints of other programs, how bad it is, and what each program makes of it."""
    rows = []
    for rule, severity in FAULTS.items():
        known = [
            (runtime.title, runtime.faults[rule]) for runtime in map(load_runtime, SERVING) if rule in runtime.faults
        ]
        said = "<br>".join(f"{title} {does}" for title, does in known)
        rows.append([f"`{rule}`", severity, said or NOT_SHOWN])
    return table(["finding", "how bad", "what programs make of it {: .wide }"], rows)


def compiled(name: str) -> str:
    """What a program's compiler makes of each pair of formats, the first architecture that has it, and its schemes."""
    (contract,) = load_runtime(name).contracts
    rows = []
    for words, row in contract.loads.items():
        weights, _, inputs = words.partition(" | ")
        loaded = [f"`{one}`" for one in scheme_names() if {*map(contract_words, load_scheme(one).formats)} == {words}]
        rows.append([", ".join(loaded) or "a recipe", weights, inputs, row.computes, row.since.upper()])
    return table(["schemes", "weights", "inputs", "products are", "since"], rows)


def evidence() -> str:
    """What each program loads of each output, and where that is known from."""
    rows = []
    for runtime in runtimes():
        for contract in runtime.contracts:
            places = dict.fromkeys(f"{row.evidence.how}: `{row.evidence.where}`" for row in contract.loads.values())
            rows.append([runtime.title, f"`{contract.flags()}`", ", ".join(_names(contract)), "<br>".join(places)])
    return table(["program", "output", "schemes", "how that is known {: .wide }"], rows)


def _names(contract: Contract) -> list[str]:
    return [f"`{name}`" for name in scheme_names() if not contract.lacks(load_scheme(name).formats)]
