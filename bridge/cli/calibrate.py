"""`qbridge calibrate`: `bridge.calibrate` as a command."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import bridge
from bridge.calibration.walk.workers.processes import launched
from bridge.cli.arguments import (
    Base,
    Compute,
    Config,
    Data,
    Debug,
    Device,
    Field,
    Kv,
    Memory,
    Model,
    Quiet,
    Samples,
    Scheme,
    Sequence,
    Tokenizer,
    Verbose,
    count_or_auto,
)
from bridge.cli.terminal import session
from bridge.cli.verb import Option, verb


@verb("qbridge calibrate MODEL --quant fp8 --out fp8.safetensors")
def calibrate(
    model: Model,
    quant: Scheme,
    out: Annotated[Path, Option(help="file to write: NAME.safetensors")],
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
    memory: Memory = None,
    overwrite: Annotated[bool, Option("--overwrite", help="replace OUT")] = False,
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
            model, quant, data, kv=kv, device=device, config=config, tokenizer=tokenizer, base=base,
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
