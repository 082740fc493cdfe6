"""The verbs of `bridge.api.verbs` as commands, with the targets' options as flags.

Importing this module reads only the targets' option tables, so that `qbridge --help` answers at once.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

import bridge
from bridge.calibration.walk.workers.processes import launched
from bridge.cli import batch, distill, golden, inspect, prune, search, sensitivity
from bridge.cli.arguments import (
    Compute,
    Config,
    Data,
    Debug,
    Device,
    Field,
    Json,
    Kv,
    Memory,
    Model,
    Planned,
    Quant,
    Quiet,
    Runtime,
    Samples,
    Scheme,
    Sequence,
    Target,
    TargetCommand,
    Tokenizer,
    Verbose,
    Written,
    count_or_auto,
    epilog,
    print_json,
    takes_target_options,
)
from bridge.cli.terminal import FAILED, Exit, guarded, open_streams, session
from bridge.core.errors import UsageError
from bridge.core.machine import keep_pages
from bridge.core.output.names import MANIFEST
from bridge.core.text import byte_count, number

# rich's markup costs 0.12 s of every --help; typer's own tracebacks would hide ours
app = typer.Typer(
    name="qbridge",
    help="Convert and quantize trained models for inference runtimes.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

EXITS = "Exit codes: 0 done, 1 failed, 2 usage, 3 written but parity failed."


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
    """Take the options that belong to no verb; their callbacks do the work."""


def main() -> None:
    """Run the verb; `bridge.__main__` is the entry point of the console command."""
    open_streams()
    with guarded():
        keep_pages()
        app()


@app.command(cls=TargetCommand, epilog=epilog("qbridge convert meta-llama/Llama-3.1-8B --target hf --quant fp8", EXITS))
@takes_target_options
def convert(
    model: Model,
    target: Target,
    options: dict[str, Any],
    runtime: Runtime = None,
    quant: Quant = None,
    out: Annotated[str | None, typer.Option(help="directory or address to write; default: MODEL-SCHEME-TARGET")] = None,
    calib: Annotated[str | None, typer.Option(help="a saved calibration")] = None,
    data: Data = None,
    samples: Samples = None,
    sequence: Sequence = None,
    field: Field = None,
    kv: Kv = None,
    device: Device = None,
    compute: Compute = None,
    config: Config = None,
    tokenizer: Tokenizer = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace OUT, if bridge wrote it")] = False,
    no_resume: Annotated[bool, typer.Option("--no-resume", help="discard what an unfinished run left")] = False,
    verbose: Verbose = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="do not re-read and run the output")] = False,
    memory: Memory = None,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Convert a model to the target's format.

    A partial output is never published. Processes of `torchrun` share the calibration.
    """
    with session(debug=debug, quiet=quiet, silent=launched()[0] > 0) as terminal:
        from bridge.reporting.report import report_table

        report = bridge.convert(
            model, target, quant, out, calib=calib, data=data, samples=count_or_auto(samples),
            sequence=sequence, field=field, kv=kv,
            device=device, config=config, tokenizer=tokenizer, verify=not no_verify, overwrite=overwrite,
            resume=not no_resume, progress=terminal.progress, memory=None if memory is None else byte_count(memory),
            runtime=runtime, compute=compute, **options,
        )  # fmt: skip
        terminal.finish(report, report_table(report, verbose), as_json, quiet)


@app.command(cls=TargetCommand, epilog=epilog("qbridge plan meta-llama/Llama-3.1-8B --target trt --quant nvfp4"))
@takes_target_options
def plan(
    model: Model,
    target: Target,
    options: dict[str, Any],
    runtime: Runtime = None,
    quant: Planned = None,
    kv: Kv = None,
    config: Config = None,
    memory: Memory = None,
    keep: prune.Keep = None,
    drop_layers: prune.DropLayers = None,
    sparse: prune.Sparse = None,
    every: Annotated[bool, typer.Option("--all", help="one line per tensor instead of one per kind of layer")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print what `convert` would write, from headers alone.

    Each kind of weight, or with --all each tensor: its shape, dtype, bytes and expression; what stays unquantized and
    why; memory and disk.
    """
    with session(debug=debug) as terminal:
        terminal.progress(0, 0, "plan")  # torch's import takes seconds if an architecture has no table
        sizes, dropped = prune.sizes_of(keep), prune.numbers_of(drop_layers)
        result = bridge.plan(
            model, target, quant, kv=kv, config=config, runtime=runtime, memory=memory, keep=sizes, drop_layers=dropped,
            sparse=sparse, **options,
        )  # fmt: skip
        if as_json:
            print_json(terminal, {**result.to_dict(), "digest": result.digest})
            return
        from bridge.reporting.plan_table import plan_table

        terminal.print(plan_table(result, every))


@app.command(epilog=epilog("qbridge calibrate MODEL --quant fp8 --out fp8.safetensors"))
def calibrate(
    model: Model,
    quant: Scheme,
    out: Annotated[Path, typer.Option(help="file to write: NAME.safetensors")],
    data: Data = None,
    samples: Samples = None,
    sequence: Sequence = None,
    field: Field = None,
    kv: Kv = None,
    device: Device = None,
    compute: Compute = None,
    config: Config = None,
    tokenizer: Tokenizer = None,
    memory: Memory = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace OUT")] = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Run a model once and save its statistics.

    ModelOpt collects them, except importance matrices. One calibration serves every target. Processes of `torchrun`
    share the data.
    """
    first = launched()[0] == 0
    with session(debug=debug, quiet=quiet, silent=not first) as terminal:
        from bridge.core.output.directory import check_file_free

        if first:
            check_file_free(out, overwrite, "a calibration", ".safetensors")
        calibration = bridge.calibrate(
            model, quant, data, kv=kv, device=device, config=config, tokenizer=tokenizer,
            samples=count_or_auto(samples), sequence=sequence, field=field, memory=memory,
            partial=out.with_name(f"{out.name}.partial"), progress=terminal.progress, compute=compute,
        )  # fmt: skip
        if not first:
            return
        calibration.save(out)
        if not quiet:
            from bridge.cli.show import calibration_table
            from bridge.reporting.columns import line

            target = "gguf" if calibration.input_square else "hf"
            words = ["qbridge", "convert", model, "--target", target, "--quant", quant, "--calib", str(out)]
            given = {"--kv": kv, "--config": config, "--tokenizer": tokenizer}
            words += [word for flag, value in given.items() if value for word in (flag, value)]
            result = [calibration_table(calibration)] if verbose else calibration.lines()
            terminal.print(*result, line("written", str(out)), line("next", shlex.join(words)))


@app.command(epilog=epilog("qbridge verify llama-fp8 --against meta-llama/Llama-3.1-8B", EXITS))
def verify(
    out: Written,
    against: Annotated[str, typer.Option(help="the model it was made from: a directory, a hub id or an address")],
    data: Data = None,
    tokenizer: Tokenizer = None,
    as_json: Json = False,
    verbose: Verbose = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Compare a written model with its source and run it."""
    with session(debug=debug, quiet=quiet) as terminal:
        from bridge.reporting.report import report_table

        report = bridge.verify(out, against, data=data, tokenizer=tokenizer, progress=terminal.progress)
        terminal.finish(report, report_table(report, verbose), as_json, quiet)


@app.command(epilog=epilog('qbridge run llama-fp8 "The capital of France is"'))
def run(
    out: Annotated[str, typer.Argument(metavar="OUT", help="a written model, or a chain of steps (.toml)")],
    text: Annotated[str | None, typer.Argument(metavar="[TEXT]", help="what the model continues")] = None,
    tokens: Annotated[int, typer.Option(help="number of tokens at most")] = 64,
    chat: Annotated[bool, typer.Option("--chat", help="put TEXT into the model's chat template")] = False,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token; above 0, tokens are drawn")] = 0.0,
    seed: Annotated[int, typer.Option(help="of the random numbers")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="of a chain: replace what is there")] = False,
    no_resume: Annotated[bool, typer.Option("--no-resume", help="of a chain: begin all steps again")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Continue a text with a written model, or run a chain.

    The last line has the tokens per second, and with what the model ran.
    """
    is_chain = out.endswith(".toml")
    with session(debug=debug, silent=is_chain and launched()[0] > 0) as terminal:
        if is_chain:
            if text is not None:
                raise UsageError(f"{out} is a chain of steps, which takes no text")
            made = bridge.chain(out, overwrite=overwrite, resume=not no_resume, progress=terminal.progress)
            terminal.finish(made, "\n".join(made.lines()), as_json, False)
            return
        if text is None:
            raise UsageError(f'give the text that {out} continues: qbridge run {out} "The capital of France is"')
        terminal.progress(0, 0, "load")
        stream = None if as_json else terminal.write
        result = bridge.run(out, text, tokens=tokens, chat=chat, temperature=temperature, seed=seed, stream=stream)
        terminal.print(result.to_json() if as_json else f"\n{result}")


@app.command(epilog=epilog("qbridge check llama-fp8 recipe.toml"))
def check(
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATH]...", help="written models, .onnx and .gguf files, recipes, tables"),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Check tables and schemes, or the files in PATH.

    Exits with 1 if anything is wrong.
    """
    with session(debug=debug, quiet=True) as terminal:
        from bridge.cli.check import Problem, check_paths, loaded_by

        problems = check_paths(paths) if paths else [Problem(line) for line in bridge.check()]
        if as_json:
            print_json(terminal, [problem._asdict() for problem in problems])
        else:
            where = ", ".join(map(str, paths or [])) or "tables and schemes"
            written = any((Path(path) / MANIFEST).is_file() for path in paths or [])
            well = "all is well" + ("; `qbridge verify` compares the weights with their source" if written else "")
            count = number(len(problems), "problem") if problems else well
            terminal.print(
                *(problem.text for problem in problems), *loaded_by(paths or [], problems), f"{where}: {count}"
            )
        if any(problem.fatal for problem in problems):
            raise Exit(FAILED)


@app.command(epilog=epilog("qbridge show schemes"))
def show(
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="schemes, targets, architectures, runtimes; a scheme, table, output or calibration",
        ),
    ],
    every: Annotated[bool, typer.Option("--all", help="one line per tensor; every spelling of a dialect")] = False,
    dialect: Annotated[
        str | None, typer.Option(help="a dialect, such as megatron, to show next to an architecture's table")
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Show a scheme, table, written model or calibration."""
    with session(debug=debug, quiet=True) as terminal:
        from bridge.cli.show import describe

        data, tables = describe(what, every, dialect)
        if as_json:
            print_json(terminal, data)
        else:
            terminal.print(*tables)


app.add_typer(golden.app, name="golden")
app.command(epilog=sensitivity.EPILOG)(sensitivity.sensitivity)
app.command(epilog=inspect.EPILOG)(inspect.inspect)
app.command(cls=TargetCommand, epilog=prune.EPILOG)(takes_target_options(prune.prune))
app.command(epilog=search.EPILOG)(search.search)
app.command(cls=TargetCommand, epilog=distill.EPILOG)(takes_target_options(distill.distill))
app.command(epilog=batch.EPILOG)(batch.batch)
