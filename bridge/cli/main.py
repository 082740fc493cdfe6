"""The command line: the verbs of `bridge.api` by the same names, targets' options as flags; must never do their work.

Importing this reads the targets' option tables and nothing else: `qbridge --help` is part of how a tool feels.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import bridge
from bridge.arguments import (
    Config,
    Data,
    Debug,
    Device,
    Json,
    Kv,
    Model,
    Paths,
    Quant,
    Quiet,
    Target,
    Tokenizer,
    What,
    byte_count,
    print_json,
    takes_target_options,
)  # fmt: skip
from bridge.commands import batch, golden, sensitivity
from bridge.errors import number
from bridge.terminal import BELOW, FAILED, Exit, Terminal, guarded, keep_pages, load_kernels, open_streams, session

if TYPE_CHECKING:
    from bridge.report import Report

# rich's markup costs 0.12 s of every --help; typer's own tracebacks would hide ours
app = typer.Typer(
    name="qbridge",
    help="Trained models, quantized, onto inference runtimes: planned first, streamed, proved.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

EXITS = "Exit codes: 0 done, 1 failed, 2 usage, 3 written but parity below its threshold."


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"qbridge {bridge.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version and exit")
    ] = False,
) -> None:
    """Take the options that belong to no verb; their callbacks have done what they ask for."""


def main() -> None:
    """Run the verb that the command line names; `bridge.__main__` is where the console command begins."""
    open_streams()
    with guarded():
        keep_pages()
        app()


@app.command(epilog=EXITS)
@takes_target_options
def convert(
    model: Model,
    target: Target,
    options: dict[str, Any],
    quant: Quant = None,
    out: Annotated[str | None, typer.Option(help="directory or address to write; default: MODEL-SCHEME-TARGET")] = None,
    calib: Annotated[str | None, typer.Option(help="a saved calibration, or data as `calibrate` takes it")] = None,
    kv: Kv = None,
    device: Device = None,
    config: Config = None,
    tokenizer: Tokenizer = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace OUT, if bridge wrote it")] = False,
    no_resume: Annotated[bool, typer.Option("--no-resume", help="discard what a killed run left")] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="do not re-read and run what was written")] = False,
    memory: Annotated[str | None, typer.Option(help="byte budget of the stream: 2GB, 512MiB")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Convert a model to what the target loads.

    The output appears whole or not at all.
    """
    with session(debug=debug, quiet=quiet) as terminal:
        load_kernels()
        report = bridge.convert(
            model, target, quant, out, calib=calib, kv=kv, device=device, config=config, tokenizer=tokenizer,
            verify=not no_verify, overwrite=overwrite, resume=not no_resume, progress=terminal.progress,
            memory=byte_count(memory), **options,
        )  # fmt: skip
        _finish(terminal, report, as_json, quiet)


@app.command()
@takes_target_options
def plan(
    model: Model,
    target: Target,
    options: dict[str, Any],
    quant: Quant = None,
    kv: Kv = None,
    config: Config = None,
    every: Annotated[bool, typer.Option("--all", help="one line a tensor instead of one a kind of layer")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print what `convert` would write, from headers alone.

    Every tensor with its shape, dtype, bytes and expression; what stays unquantized and why; memory and disk.
    """
    with session(debug=debug) as terminal:
        terminal.progress(0, 0, "plan")  # torch alone takes seconds where an architecture has no table
        made = bridge.plan(model, target, quant, kv=kv, config=config, **options)
        if as_json:
            print_json(terminal, {**made.to_dict(), "digest": made.digest})
            return
        from bridge.show import plan_table

        terminal.print(plan_table(made, every))


@app.command()
def calibrate(
    model: Model,
    quant: Annotated[str, typer.Option(help="a scheme (`qbridge show schemes`) or a recipe's path")],
    out: Annotated[Path, typer.Option(help="file to write: NAME.safetensors")],
    data: Data = None,
    samples: Annotated[int | None, typer.Option(min=1, help="how many sequences")] = None,
    sequence: Annotated[int | None, typer.Option(min=1, help="tokens of each")] = None,
    kv: Kv = None,
    device: Device = None,
    config: Config = None,
    tokenizer: Tokenizer = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace OUT")] = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run a model with ModelOpt once and save its statistics.

    One calibration serves every target.
    """
    with session(debug=debug, quiet=quiet) as terminal:
        from bridge.output import check_file_free

        check_file_free(out, overwrite, "a calibration", ".safetensors")
        made = bridge.calibrate(
            model, quant, data, kv=kv, device=device, config=config, tokenizer=tokenizer, samples=samples,
            sequence=sequence, progress=terminal.progress,
        )  # fmt: skip
        made.save(out)
        if not quiet:
            from bridge.describe import calibration_table

            terminal.print(calibration_table(made), f"written: {out}")


@app.command(epilog=EXITS)
def verify(
    out: Annotated[str, typer.Argument(metavar="OUT", help="a directory that `convert` wrote, or its address")],
    against: Annotated[str, typer.Option(help="the model it was made from: a directory or a hub id")],
    data: Data = None,
    tokenizer: Tokenizer = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Compare a written model with its source, and run it."""
    with session(debug=debug, quiet=quiet) as terminal:
        report = bridge.verify(out, against, data=data, tokenizer=tokenizer, progress=terminal.progress)
        _finish(terminal, report, as_json, quiet)


@app.command()
def check(
    paths: Paths = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check tables and schemes, or the files in PATH.

    Exits with 1 if anything is wrong.
    """
    with session(debug=debug, quiet=True) as terminal:
        from bridge.describe import Problem, check_path

        if paths:
            problems = [Problem(f"{path}: {text}", fatal) for path in paths for text, fatal in check_path(path)]
        else:
            problems = [Problem(line) for line in bridge.check()]
        if as_json:
            print_json(terminal, [problem._asdict() for problem in problems])
        else:
            where = ", ".join(map(str, paths or [])) or "tables and schemes"
            count = number(len(problems), "problem") if problems else "all is well"
            terminal.print(*(problem.text for problem in problems), f"{where}: {count}")
        if any(problem.fatal for problem in problems):
            raise Exit(FAILED)


@app.command()
def show(
    what: What,
    every: Annotated[bool, typer.Option("--all", help="one line a tensor; every spelling of a dialect")] = False,
    dialect: Annotated[str | None, typer.Option(help="a dialect, as megatron: beside an architecture's table")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a list, a scheme, an architecture's table, a written model, a calibration."""
    with session(debug=debug, quiet=True) as terminal:
        from bridge.describe import describe

        data, tables = describe(what, every, dialect)
        if as_json:
            print_json(terminal, data)
        else:
            terminal.print(*tables)


app.add_typer(golden.app, name="golden")
app.command()(sensitivity.sensitivity)
app.command(epilog=batch.EXITS)(batch.batch)


def _finish(terminal: Terminal, report: Report, as_json: bool, quiet: bool) -> None:
    if as_json:
        terminal.print(report.to_json())
    elif not quiet:
        terminal.print(report)
    if not report.passed:
        raise Exit(BELOW)


if __name__ == "__main__":
    main()
