"""`qbridge prune`: `bridge.prune` as a command."""

from __future__ import annotations

from typing import Annotated, Any

from bridge.cli.arguments import (
    Config,
    Data,
    Debug,
    Device,
    DropLayers,
    Field,
    Json,
    Keep,
    Memory,
    Model,
    Planned,
    Quiet,
    Sparse,
    Tokenizer,
    Verbose,
    complete_target,
    numbers_of,
    sizes_of,
    target_verb,
)
from bridge.cli.terminal import session
from bridge.cli.verb import Option
from bridge.core.text import byte_count


@target_verb("qbridge prune MODEL --keep ffn=75% --repair --out small")
def prune(
    model: Model,
    options: dict[str, Any],
    keep: Keep = None,
    drop_layers: DropLayers = None,
    out: Annotated[str | None, Option(help="directory to write; default: MODEL-pruned-SCHEME-TARGET")] = None,
    target: Annotated[str, Option(help="what to write; default: hf", complete=complete_target)] = "hf",
    quant: Planned = None,
    data: Data = None,
    importance: Annotated[
        str, Option(help="output, minitron (ModelOpt's), weights (without a run), or a file of scores")
    ] = "output",
    repair: Annotated[
        bool, Option("--repair", help="fit the matrices that read fewer channels by least squares")
    ] = False,
    order: Annotated[str, Option(help="of what is kept: source, or importance, as ModelOpt sorts")] = "source",
    sparse: Sparse = None,
    sparse_method: Annotated[str, Option(help="sparsegpt, wanda, or magnitude (without a run)")] = "sparsegpt",
    samples: Annotated[int | None, Option(min=1, help="number of sequences to run; default: 64")] = None,
    sequence: Annotated[int | None, Option(min=1, help="tokens per sequence; default: 256")] = None,
    field: Field = None,
    device: Device = None,
    config: Config = None,
    tokenizer: Tokenizer = None,
    memory: Memory = None,
    overwrite: Annotated[bool, Option("--overwrite", help="replace OUT, if bridge wrote it")] = False,
    no_resume: Annotated[bool, Option("--no-resume", help="discard what an unfinished run left")] = False,
    no_verify: Annotated[bool, Option("--no-verify", help="do not re-read and run the output")] = False,
    verbose: Verbose = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Write a model with fewer channels, heads or layers.

    What is left out adds least to the output on the data. Only rows and columns that stay are read.
    """
    with session(debug=debug, quiet=quiet) as terminal:
        import bridge
        from bridge.reporting.report import report_table

        report = bridge.prune(
            model, sizes_of(keep), out, target=target, quant=quant, drop_layers=numbers_of(drop_layers), data=data,
            importance=importance, repair=repair, order=order, sparse=sparse,
            sparse_method=sparse_method, config=config, tokenizer=tokenizer, samples=samples,
            sequence=sequence, field=field, device=device, verify=not no_verify, overwrite=overwrite,
            resume=not no_resume, progress=terminal.progress, memory=None if memory is None else byte_count(memory),
            **options,
        )  # fmt: skip
        terminal.finish(report, report_table(report, verbose), as_json, quiet)
