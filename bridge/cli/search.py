"""`qbridge search`: `bridge.search` as a command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bridge.cli.arguments import (
    Config,
    Data,
    Debug,
    Device,
    Field,
    Json,
    Model,
    Planned,
    Quiet,
    Tokenizer,
)
from bridge.cli.terminal import session
from bridge.cli.verb import Option, verb
from bridge.core.errors import UsageError


@verb("qbridge search MODEL --parameters 60% --dims ffn,heads,layers")
def search(
    model: Model,
    parameters: Annotated[
        str | None, Option(metavar="SIZE", help="budget: a share of all values, 60%, or a number of them")
    ] = None,
    bytes_: Annotated[
        str | None, Option("--bytes", metavar="SIZE", help="budget: tensors as written with --quant: 3GB, 50%")
    ] = None,
    latency: Annotated[
        str | None, Option(metavar="SHARE", help="budget: bytes of weights that one decoded token reads: 70%")
    ] = None,
    dims: Annotated[str | None, Option(metavar="DIM,DIM", help="dims that may change; default: all")] = None,
    quant: Planned = None,
    data: Data = None,
    importance: Annotated[
        str, Option(help="output, minitron (ModelOpt's), weights (without a run), or a file of scores")
    ] = "output",
    repair: Annotated[
        bool, Option("--repair", help="repair each candidate by least squares before it is measured")
    ] = False,
    scores: Annotated[
        Path | None, Option(help="file to write scores to, so that prune keeps the same parts: NAME.safetensors")
    ] = None,
    samples: Annotated[int | None, Option(min=1, help="number of sequences to run; default: 64")] = None,
    sequence: Annotated[int | None, Option(min=1, help="tokens per sequence; default: 256")] = None,
    field: Field = None,
    device: Device = None,
    config: Config = None,
    tokenizer: Tokenizer = None,
    overwrite: Annotated[bool, Option("--overwrite", help="replace the file of --scores")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Find the pruned sizes that cost least within a budget.

    Each size of each dim is measured alone on held-out text; combinations of them are chosen by the sums, and the best
    are measured. The last line is the command that prunes.
    """
    with session(debug=debug, quiet=quiet) as terminal:
        import bridge
        from bridge.core.output.directory import check_file_free
        from bridge.workflows.prune.searched import searched_table

        given = {"parameters": parameters, "bytes": bytes_, "latency": latency}
        budget = {kind: size for kind, size in given.items() if size is not None}
        if len(budget) != 1:
            raise UsageError("give one of --parameters, --bytes and --latency, as in --parameters 60%")
        if scores is not None:
            if repair:
                raise UsageError(f"--scores {scores}: a repair leaves no scores; leave one of the two out")
            check_file_free(scores, overwrite, "a file of scores", ".safetensors")
        result = bridge.search(
            model, budget, dims=None if dims is None else [dim.strip() for dim in dims.split(",")], data=data,
            importance=importance, repair=repair, quant=quant, config=config, tokenizer=tokenizer, samples=samples,
            sequence=sequence, field=field, device=device, progress=terminal.progress,
        )  # fmt: skip
        path = str(result.scores.save(scores)) if scores is not None and result.scores else ""
        if as_json:
            terminal.print(result.to_json(path))
        elif not quiet:
            terminal.print(searched_table(result, path))
