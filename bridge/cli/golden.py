"""`qbridge golden record | check | diff`: the verbs of `bridge.golden`; must never do their work."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bridge.arguments import Config, Debug, Json, Quiet, Tokenizer, print_json
from bridge.errors import first_of
from bridge.terminal import FAILED, Exit, Terminal, load_kernels, session

if TYPE_CHECKING:
    from bridge.golden import Golden, Moved

NAMED = 3  # tensors that a note names
EXITS = "Exit codes: 0 nothing moved, 1 something moved or failed, 2 usage."

app = typer.Typer(
    help="Keep what a written model was, and say what has moved since.", no_args_is_help=True, rich_markup_mode=None
)

Out = Annotated[str, typer.Argument(metavar="OUT", help="a directory that `convert` wrote, or its address")]
Kept = Annotated[Path, typer.Argument(metavar="GOLDEN", help="the golden: a small directory of a repository")]


@app.command()
def record(
    out: Out,
    golden: Kept,
    reason: Annotated[str, typer.Option(help="why an existing golden changes; it is kept")] = "",
    against: Annotated[str | None, typer.Option(help="verify OUT against this model first")] = None,
    quant: Annotated[str | None, typer.Option(help="the recipe that OUT was converted by, if it was one")] = None,
    tolerance: Annotated[float | None, typer.Option(help="how far outputs may be off later, relative L2")] = None,
    no_run: Annotated[bool, typer.Option("--no-run", help="keep bytes alone, run nothing")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Record a written model as a golden."""
    with session(debug=debug, quiet=quiet) as terminal:
        import bridge

        load_kernels()
        made = bridge.golden.record(
            out, golden, reason=reason, against=against, quant=quant, tolerance=tolerance, run=not no_run,
            progress=terminal.progress,
        )  # fmt: skip
        if made.reference.not_run and not no_run:
            terminal.note(f"{golden} keeps bytes alone, no inputs and outputs: {made.reference.not_run}")
        count, not_run, bad = len(made.snapshot.tensors), made.reference.not_run, _not_finite(made)
        if as_json:
            said = {"golden": str(golden), "digest": made.digest, "tensors": count, "not_run": not_run}
            print_json(terminal, {**said, "not_finite": bad})
        elif not quiet:
            terminal.print(f"{golden}: {count:,} tensors, digest {made.digest[:12]}")
            if bad:
                named = first_of([f"{name} ({values:,})" for name, values in bad.items()], NAMED)
                hold = "tensor holds" if len(bad) == 1 else "tensors hold"
                terminal.print(f"note: {len(bad):,} {hold} values that are not finite: {named}")


@app.command(epilog=EXITS)
def check(
    golden: Kept,
    out: Annotated[
        str | None, typer.Argument(metavar="[OUT]", help="a directory that `convert` wrote, or its address")
    ] = None,
    model: Annotated[str | None, typer.Option(help="in the place of OUT: convert this model again")] = None,
    calib: Annotated[str | None, typer.Option(help="with --model: another calibration than the golden's")] = None,
    run: Annotated[
        bool | None, typer.Option("--run/--no-run", help="run the model; default: only where a byte moved")
    ] = None,
    work: Annotated[Path | None, typer.Option(help="with --model: where to convert; default: the system's")] = None,
    config: Config = None,
    tokenizer: Tokenizer = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Say what of a written model is not what its golden has."""
    with session(debug=debug, quiet=quiet) as terminal:
        import bridge

        moved = bridge.golden.check(
            golden, out, model=model, calib=calib, run=run, work=work, config=config, tokenizer=tokenizer,
            progress=terminal.progress,
        )  # fmt: skip
        _tell(terminal, moved, as_json, quiet)


@app.command(epilog=EXITS)
def diff(
    a: Annotated[
        str, typer.Argument(metavar="A", help="a golden, or a directory that `convert` wrote, or its address")
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="another one")],
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Say what moved from A to B."""
    with session(debug=debug, quiet=quiet) as terminal:
        import bridge

        _tell(terminal, bridge.golden.diff(a, b, progress=terminal.progress), as_json, quiet)


def _not_finite(golden: Golden) -> dict[str, int]:
    """The tensors that hold NaN or infinity, and how many of their values are such."""
    counts: dict[str, int] = {}
    for tensor in golden.snapshot.tensors.values():
        if tensor.statistics and tensor.statistics.nonfinite:
            counts[tensor.name] = counts.get(tensor.name, 0) + tensor.statistics.nonfinite  # of all ranks
    return counts


def _tell(terminal: Terminal, moved: Moved, as_json: bool, quiet: bool) -> None:
    if as_json:
        terminal.print(moved.to_json())
    elif not quiet:
        terminal.print(str(moved))
    if not moved.passed:
        raise Exit(FAILED)
