"""`qbridge inspect`: `bridge.inspect` as a command."""

from __future__ import annotations

from typing import Annotated

from bridge.cli.arguments import Data, Debug, Device, Field, Json, Model, Planned, Quiet, Tokenizer
from bridge.cli.terminal import BELOW, Exit, session
from bridge.cli.verb import Option, verb


@verb("qbridge inspect MODEL --against OUT --out seen")
def inspect(
    model: Model,
    against: Annotated[
        str | None, Option(metavar="OUT", help="what `convert` wrote of MODEL for target hf, to compare with it")
    ] = None,
    config: Annotated[
        str | None, Option(metavar="FILE", help="config.yaml of what to look at; default: activations, weights")
    ] = None,
    quant: Planned = None,
    calib: Annotated[str | None, Option(help="saved calibration, for static scales, SmoothQuant and AWQ")] = None,
    data: Data = None,
    out: Annotated[str | None, Option(metavar="DIR", help="directory for inspect.html, .json and .csv")] = None,
    features: Annotated[
        list[str] | None, Option(metavar="DIR", help="folder of Python files with feature classes; repeat it")
    ] = None,
    steps: Annotated[
        int | None, Option(min=1, help="batches of at most 8 rows to run, held-out ones too; default: all")
    ] = None,
    gradients: Annotated[bool, Option("--gradients", help="also run the next-token loss backward")] = False,
    nan: Annotated[bool, Option("--nan", help="name the module that makes the first NaN or infinity")] = False,
    cost: Annotated[bool, Option("--cost", help="also measure time and memory of each module")] = False,
    worst: Annotated[int, Option(min=1, help="lines to print, shared by the schemes; default: 10")] = 10,
    samples: Annotated[int | None, Option(min=1, help="number of sequences to run; default: 32")] = None,
    sequence: Annotated[int | None, Option(min=1, help="tokens per sequence; default: 128")] = None,
    field: Field = None,
    device: Device = None,
    tokenizer: Tokenizer = None,
    overwrite: Annotated[bool, Option("--overwrite", help="replace an inspection in DIR")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Show where a model loses most, layer by layer.

    With --against each module is compared with the source's: alone, with the source's input, and with all errors
    before it. Without, the model runs, and statistics of its tensors are recorded. The exit code is 3 if a NaN or an
    infinity was seen.
    """
    with session(debug=debug, quiet=quiet) as terminal:
        import bridge
        from bridge.workflows.inspect.result import inspection_table

        seen = bridge.inspect(
            model, config, against=against, quant=quant, calib=calib, data=data, steps=steps, gradients=gradients,
            nan=nan, cost=cost, out=out, samples=samples, sequence=sequence, field=field, device=device,
            tokenizer=tokenizer, overwrite=overwrite, feature_dirs=features or None, progress=terminal.progress,
        )  # fmt: skip
        if as_json:
            terminal.print(seen.to_json())
        elif not quiet:
            terminal.print(inspection_table(seen, worst, out))
        if not seen.finite:
            raise Exit(BELOW)
