"""`qbridge verify`: `bridge.verify` as a command."""

from __future__ import annotations

from typing import Annotated

import bridge
from bridge.cli.arguments import Base, Data, Debug, Json, Quiet, Tokenizer, Verbose, Written
from bridge.cli.terminal import session
from bridge.cli.verb import EXITS, Option, verb


@verb("qbridge verify llama-fp8 --against meta-llama/Llama-3.1-8B", EXITS)
def verify(
    out: Written,
    against: Annotated[str, Option(help="the model it was made from: a directory, a hub id or an address")],
    data: Data = None,
    tokenizer: Tokenizer = None,
    base: Base = None,
    as_json: Json = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Compare a written model with its source and run it."""
    with session(debug=debug, quiet=quiet) as terminal:
        from bridge.reporting.report import report_table

        report = bridge.verify(out, against, data=data, tokenizer=tokenizer, base=base, progress=terminal.progress)
        terminal.finish(report, report_table(report, verbose), as_json, quiet)
