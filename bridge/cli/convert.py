"""`qbridge convert`: `bridge.convert` as a command."""

from __future__ import annotations

from typing import Annotated, Any

import bridge
from bridge.calibration.walk.workers.processes import launched
from bridge.cli.arguments import (
    Adapter,
    Base,
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
    Quant,
    Quiet,
    Runtime,
    Samples,
    Sequence,
    Target,
    Tokenizer,
    Verbose,
    count_or_auto,
    target_verb,
)
from bridge.cli.terminal import session
from bridge.cli.verb import EXITS, Option
from bridge.core.text import byte_count


@target_verb("qbridge convert meta-llama/Llama-3.1-8B --target hf --quant fp8", EXITS)
def convert(
    model: Model,
    target: Target,
    options: dict[str, Any],
    runtime: Runtime = None,
    quant: Quant = None,
    out: Annotated[str | None, Option(help="directory or address to write; default: MODEL-SCHEME-TARGET")] = None,
    calib: Annotated[str | None, Option(help="a saved calibration")] = None,
    data: Data = None,
    samples: Samples = None,
    sequence: Sequence = None,
    field: Field = None,
    kv: Kv = None,
    device: Device = None,
    compute: Compute = None,
    config: Config = None,
    tokenizer: Tokenizer = None,
    base: Base = None,
    adapter: Adapter = None,
    overwrite: Annotated[bool, Option("--overwrite", help="replace OUT, if bridge wrote it")] = False,
    no_resume: Annotated[bool, Option("--no-resume", help="discard what an unfinished run left")] = False,
    verbose: Verbose = False,
    no_verify: Annotated[bool, Option("--no-verify", help="do not re-read and run the output")] = False,
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
            runtime=runtime, compute=compute, base=base, adapter=adapter, **options,
        )  # fmt: skip
        terminal.finish(report, report_table(report, verbose), as_json, quiet)
