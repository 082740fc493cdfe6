"""Check contracts of runtimes against the targets whose output they are about."""

from __future__ import annotations

from bridge.core.errors import TableError, UsageError
from bridge.core.mappings import TableFile, read_table, table_files
from bridge.planning.contract_files import parse_runtime
from bridge.targets import load_target, make_options


def check_contracts() -> list[str]:
    """The problems of every file of `mappings/runtimes`, none if all can be used."""
    return [problem for path in table_files("runtimes") for problem in check_contract(read_table(path))]


def check_contract(file: TableFile) -> list[str]:
    """The problems of one file: a row that cannot be read, a target or an option that does not exist."""
    try:
        runtime = parse_runtime("", file)
    except TableError as error:
        return [str(error)]
    problems = []
    for contract in runtime.contracts:
        try:
            make_options(load_target(contract.target), dict(contract.options))
        except UsageError as error:
            problems.append(f"{file.name}: target {contract.target!r} with options {dict(contract.options)}: {error}")
    return problems
