"""`qbridge sensitivity`: the verb of `bridge.sensitivity`; must never do its work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bridge.arguments import Config, Data, Debug, Device, Json, Kv, Model, Quiet, Tokenizer
from bridge.errors import UsageError
from bridge.terminal import session


def sensitivity(
    model: Model,
    quant: Annotated[str, typer.Option(help="the scheme, or a recipe's path, that layers are taken out of")],
    data: Data = None,
    budget: Annotated[
        str | None, typer.Option(help="6.5bits a weight on average, 7GB of weights, or kl=0.01 nats a token")
    ] = None,
    fallback: Annotated[str | None, typer.Option(help="scheme of layers taken out; default: unquantized")] = None,
    method: Annotated[str, typer.Option(help="kl: a run for each layer; modelopt: its gradient scores, in one")] = "kl",
    out: Annotated[Path | None, typer.Option(help="recipe to write: NAME.toml, for --quant of the other verbs")] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="how many sequences calibrate; an eighth more measure")
    ] = None,
    sequence: Annotated[int | None, typer.Option(min=1, help="tokens of each")] = None,
    kv: Kv = None,
    device: Device = None,
    config: Config = None,
    tokenizer: Tokenizer = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace OUT")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Rank layers by what quantizing each alone costs.

    The cost is the divergence of the model's output distribution on held-out text. With a budget, layers that cost much
    for their bytes are left out of the scheme, and a recipe says so.
    """
    with session(debug=debug, quiet=quiet) as terminal:
        from bridge.costs.run import sensitivity as run
        from bridge.output import check_file_free

        if out is not None:
            if budget is None:
                raise UsageError(f"--out {out}: a recipe needs --budget, say 6.5bits or kl=0.01")
            check_file_free(out, overwrite, "a recipe", ".toml")
        found = run(
            model, quant, data, budget=budget, fallback=fallback, method=method, kv=kv, device=device, config=config,
            tokenizer=tokenizer, samples=samples, sequence=sequence, progress=terminal.progress,
        )  # fmt: skip
        if out is not None:
            found.save(out, overwrite)
        if as_json:
            terminal.print(found.to_json())
        elif not quiet:
            terminal.print(found, *([f"written: {out}"] if out else []))
