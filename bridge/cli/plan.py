"""`qbridge plan`: `bridge.plan` as a command."""

from __future__ import annotations

from typing import Annotated, Any

import bridge
from bridge.cli.arguments import (
    Adapter,
    Base,
    Config,
    Debug,
    DropLayers,
    Json,
    Keep,
    Kv,
    Memory,
    Model,
    Planned,
    Runtime,
    Sparse,
    Target,
    numbers_of,
    print_json,
    sizes_of,
    target_verb,
)
from bridge.cli.terminal import session
from bridge.cli.verb import Option


@target_verb("qbridge plan meta-llama/Llama-3.1-8B --target trt --quant nvfp4")
def plan(
    model: Model,
    target: Target,
    options: dict[str, Any],
    runtime: Runtime = None,
    quant: Planned = None,
    kv: Kv = None,
    config: Config = None,
    base: Base = None,
    adapter: Adapter = None,
    memory: Memory = None,
    keep: Keep = None,
    drop_layers: DropLayers = None,
    sparse: Sparse = None,
    every: Annotated[bool, Option("--all", help="one line per tensor instead of one per kind of layer")] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print what `convert` would write, from headers alone.

    Each kind of weight, or with --all each tensor: its shape, dtype, bytes and expression; what stays unquantized and
    why; memory and disk; how long it would take on this machine, and what limits it.
    """
    with session(debug=debug) as terminal:
        terminal.progress(0, 0, "plan")  # torch's import takes seconds if an architecture has no table
        sizes, dropped = sizes_of(keep), numbers_of(drop_layers)
        result = bridge.plan(
            model, target, quant, kv=kv, config=config, runtime=runtime, memory=memory, keep=sizes, drop_layers=dropped,
            sparse=sparse, base=base, adapter=adapter, **options,
        )  # fmt: skip
        here = bridge.estimate(result, model)
        if as_json:
            estimate = {"seconds": here.seconds, "bound": here.bound, **vars(here)}
            print_json(terminal, {**result.to_dict(), "digest": result.digest, "estimate": estimate})
            return
        from bridge.reporting.columns import line
        from bridge.reporting.plan_table import plan_table

        terminal.print(plan_table(result, every), line("here", str(here)))
