"""`qbridge golden record | check | diff`: `bridge.golden` as commands."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import bridge
from bridge.cli.arguments import Config, Debug, Json, Quiet, Tokenizer, Written, print_json
from bridge.cli.terminal import FAILED, session
from bridge.cli.verb import Argument, Group, Option, verb
from bridge.core.text import first_of

MAX_NAMES = 3  # tensors that a note names
EXITS = "Exit codes: 0 nothing moved, 1 something moved or failed, 2 usage."

GoldenPath = Annotated[Path, Argument(metavar="GOLDEN", help="the golden: a small directory for version control")]


@verb("qbridge golden record llama-fp8 goldens/llama-fp8")
def record(
    out: Written,
    golden: GoldenPath,
    reason: Annotated[str, Option(help="why an existing golden changes; saved in its history")] = "",
    against: Annotated[str | None, Option(help="verify OUT against this model first")] = None,
    quant: Annotated[str | None, Option(help="the recipe that OUT was converted with, if any")] = None,
    tolerance: Annotated[float | None, Option(help="allowed difference of later outputs, relative L2")] = None,
    no_run: Annotated[bool, Option("--no-run", help="record bytes only, run nothing")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Record a written model as a golden."""
    with session(debug=debug, quiet=quiet) as terminal:
        result = bridge.golden.record(
            out, golden, reason=reason, against=against, quant=quant, tolerance=tolerance, run=not no_run,
            progress=terminal.progress,
        )  # fmt: skip
        count, not_run, values = len(result.snapshot.tensors), result.reference.not_run, Counter[str]()
        for tensor in result.snapshot.tensors.values():  # every rank may have a part of that name
            values[tensor.name] += tensor.statistics.nonfinite if tensor.statistics else 0
        bad = {name: n for name, n in values.items() if n}
        if not_run and not no_run:
            terminal.note(f"{golden} records bytes only, no inputs and outputs: {not_run}")
        if as_json:
            data = {"golden": str(golden), "digest": result.digest, "tensors": count, "not_run": not_run}
            print_json(terminal, {**data, "not_finite": bad})
        elif not quiet:
            terminal.print(f"{golden}: {count:,} tensors, digest {result.digest[:12]}")
            if bad:
                names = first_of([f"{name} ({n:,})" for name, n in bad.items()], MAX_NAMES)
                hold = "tensor holds" if len(bad) == 1 else "tensors hold"
                terminal.print(f"note: {len(bad):,} {hold} values that are not finite: {names}")


@verb("qbridge golden check goldens/llama-fp8 llama-fp8", EXITS)
def check(
    golden: GoldenPath,
    out: Annotated[
        str | None, Argument(metavar="[OUT]", help="a directory that `convert` wrote, or its address")
    ] = None,
    model: Annotated[str | None, Option(help="instead of OUT: convert this model again")] = None,
    calib: Annotated[str | None, Option(help="with --model: another calibration than the golden's")] = None,
    run: Annotated[bool | None, Option("--run/--no-run", help="run the model; default: only if a byte moved")] = None,
    work: Annotated[
        Path | None, Option(help="with --model: where to convert; default: the system's temporary directory")
    ] = None,
    config: Config = None,
    tokenizer: Tokenizer = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Check a model against its golden."""
    with session(debug=debug, quiet=quiet) as terminal:
        moved = bridge.golden.check(
            golden, out, model=model, calib=calib, run=run, work=work, config=config, tokenizer=tokenizer,
            progress=terminal.progress,
        )  # fmt: skip
        terminal.finish(moved, str(moved), as_json, quiet, FAILED)


@verb("qbridge golden diff goldens/llama-fp8 llama-fp8", EXITS)
def diff(
    a: Annotated[str, Argument(metavar="A", help="a golden, or a directory that `convert` wrote, or its address")],
    b: Annotated[str, Argument(metavar="B", help="another one")],
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Show what moved from A to B."""
    with session(debug=debug, quiet=quiet) as terminal:
        moved = bridge.golden.diff(a, b, progress=terminal.progress)
        terminal.finish(moved, str(moved), as_json, quiet, FAILED)


golden = Group("golden", help="Record and check regression snapshots.", commands=[record, check, diff])
