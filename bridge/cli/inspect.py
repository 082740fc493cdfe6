"""`qbridge inspect`: `bridge.inspect` as a command."""

from __future__ import annotations

from typing import Annotated

import typer

from bridge.cli.arguments import Data, Debug, Field, Json, Model, Quiet, Tokenizer, epilog
from bridge.cli.terminal import session

EPILOG = epilog("qbridge inspect MODEL --against OUT --out seen")


def inspect(
    model: Model,
    against: Annotated[str, typer.Option(metavar="OUT", help="what `convert` wrote of MODEL for target hf")],
    data: Data = None,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="directory for inspect.html, .json and .csv")] = None,
    worst: Annotated[int, typer.Option(min=1, help="number of modules to print; default: 10")] = 10,
    samples: Annotated[int | None, typer.Option(min=1, help="number of sequences to run; default: 32")] = None,
    sequence: Annotated[int | None, typer.Option(min=1, help="tokens per sequence; default: 128")] = None,
    field: Field = None,
    tokenizer: Tokenizer = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace an inspection in DIR")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Show where a quantized model loses most, module by module.

    Each is compared with that of the source: alone, with the source's input, and with all errors of those before.
    """
    with session(debug=debug, quiet=quiet) as terminal:
        import bridge
        from bridge.workflows.inspect.result import inspection_table

        seen = bridge.inspect(
            model, against=against, data=data, out=out, samples=samples, sequence=sequence, field=field,
            tokenizer=tokenizer, overwrite=overwrite, progress=terminal.progress,
        )  # fmt: skip
        if as_json:
            terminal.print(seen.to_json())
        elif not quiet:
            terminal.print(inspection_table(seen, worst, out))
