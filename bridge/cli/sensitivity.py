"""`qbridge sensitivity`: `bridge.sensitivity` as a command."""

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
    Kv,
    Memory,
    Model,
    Quiet,
    Runtime,
    Sequence,
    Tokenizer,
    complete_scheme,
    complete_target,
)
from bridge.cli.terminal import session
from bridge.cli.verb import Option, verb
from bridge.core.errors import UsageError


@verb("qbridge sensitivity MODEL --quant int4_awq,fp8 --budget 4.8bits")
def sensitivity(
    model: Model,
    quant: Annotated[
        str,
        Option(help="scheme name, recipe file, or schemes to choose from: int4_awq,fp8", complete=complete_scheme),
    ],
    data: Data = None,
    target: Annotated[str | None, Option(help="what the recipe is for; default: hf", complete=complete_target)] = None,
    runtime: Runtime = None,
    budget: Annotated[
        str | None, Option(help="6.5bits per weight on average, 7GB of weights, or kl=0.01 nats per token")
    ] = None,
    fallback: Annotated[
        str | None,
        Option(help="scheme of excluded layers; default: unquantized", complete=complete_scheme),
    ] = None,
    method: Annotated[
        str,
        Option(
            help="kl: one run per layer; modelopt: ModelOpt's gradient scores, in one run; block: errors of blocks, "
            "with one block in memory"
        ),
    ] = "kl",
    out: Annotated[Path | None, Option(help="recipe to write: NAME.toml, for --quant of the other verbs")] = None,
    samples: Annotated[int | None, Option(min=1, help="number of calibration sequences; default: 32")] = None,
    sequence: Sequence = None,
    field: Field = None,
    kv: Kv = None,
    device: Device = None,
    memory: Memory = None,
    config: Config = None,
    tokenizer: Tokenizer = None,
    overwrite: Annotated[bool, Option("--overwrite", help="replace OUT")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Rank layers by the cost of quantizing each one alone.

    The cost is the divergence of the model's output distribution on held-out text; with --method block, the error of a
    block's output, which takes the memory of a block. With a budget, a recipe excludes layers from the scheme, or gives
    each layer one of several schemes, so that the sum of costs is the least possible.
    """
    with session(debug=debug, quiet=quiet) as terminal:
        from bridge.api.sensitivity.run import sensitivity as run
        from bridge.core.output.directory import check_file_free

        if out is not None:
            if budget is None:
                raise UsageError(f"--out {out}: a recipe needs --budget, for example 6.5bits or kl=0.01")
            check_file_free(out, overwrite, "a recipe", ".toml")
        result = run(
            model, quant.split(",") if "," in quant else quant, data, target=target, runtime=runtime, budget=budget,
            fallback=fallback, method=method, kv=kv, device=device, memory=memory, config=config, tokenizer=tokenizer,
            samples=samples, sequence=sequence, field=field, progress=terminal.progress,
        )  # fmt: skip
        if out is not None:
            result.save(out, overwrite)
        if as_json:
            terminal.print(result.to_json())
        elif not quiet:
            terminal.print(result, *([f"written: {out}"] if out else []))
