"""`qbridge prune`: `bridge.prune` as a command."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from bridge.cli.arguments import (
    Config,
    Data,
    Debug,
    Device,
    Field,
    Json,
    Memory,
    Model,
    Planned,
    Quiet,
    Tokenizer,
    Verbose,
    complete_target,
    epilog,
)
from bridge.cli.terminal import session
from bridge.core.errors import UsageError
from bridge.core.text import byte_count

EPILOG = epilog("qbridge prune MODEL --keep ffn=75% --repair --out small")
Keep = Annotated[
    list[str] | None,
    typer.Option(
        metavar="DIM=SIZE",
        help="size of a dim: ffn=75%, heads=24, hidden, kv_heads, layers, experts, moe_ffn, shared_ffn, vocab",
    ),
]
DropLayers = Annotated[str | None, typer.Option(metavar="N,N", help="numbers of layers to leave out, from 0")]
Sparse = Annotated[
    str | None, typer.Option(metavar="2:4", help="set two of every four weights to zero; all sizes stay")
]


def prune(
    model: Model,
    options: dict[str, Any],
    keep: Keep = None,
    drop_layers: DropLayers = None,
    out: Annotated[str | None, typer.Option(help="directory to write; default: MODEL-pruned-SCHEME-TARGET")] = None,
    target: Annotated[str, typer.Option(help="what to write; default: hf", autocompletion=complete_target)] = "hf",
    quant: Planned = None,
    data: Data = None,
    importance: Annotated[
        str, typer.Option(help="output, minitron (ModelOpt's), weights (without a run), or a file of scores")
    ] = "output",
    repair: Annotated[
        bool, typer.Option("--repair", help="fit the matrices that read fewer channels by least squares")
    ] = False,
    order: Annotated[str, typer.Option(help="of what is kept: source, or importance, as ModelOpt sorts")] = "source",
    sparse: Sparse = None,
    sparse_method: Annotated[str, typer.Option(help="sparsegpt, wanda, or magnitude (without a run)")] = "sparsegpt",
    samples: Annotated[int | None, typer.Option(min=1, help="number of sequences to run; default: 64")] = None,
    sequence: Annotated[int | None, typer.Option(min=1, help="tokens per sequence; default: 256")] = None,
    field: Field = None,
    device: Device = None,
    config: Config = None,
    tokenizer: Tokenizer = None,
    memory: Memory = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace OUT, if bridge wrote it")] = False,
    no_resume: Annotated[bool, typer.Option("--no-resume", help="discard what an unfinished run left")] = False,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="do not re-read and run the output")] = False,
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


def sizes_of(keep: list[str] | None) -> dict[str, int | str] | None:
    """The dims and sizes of `--keep`; None without it."""
    sizes: dict[str, int | str] = {}
    for text in keep or []:
        dim, equals, size = text.partition("=")
        if not equals or not dim.strip() or not size.strip():
            raise UsageError(f"--keep {text}: give a dim and its size, as in ffn=75%")
        if dim.strip() in sizes:
            raise UsageError(f"--keep {text}: {dim.strip()} is given twice")
        sizes[dim.strip()] = size.strip()
    return sizes or None


def numbers_of(text: str | None) -> list[int] | None:
    """The layers of `--drop-layers`; None without it."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--drop-layers {text}: give numbers with commas between them, as in 3,4") from None
