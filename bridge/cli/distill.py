"""`qbridge distill`: `bridge.distill` as a command."""

from __future__ import annotations

from typing import Annotated, Any

from bridge.calibration.walk.workers.processes import launched
from bridge.cli.arguments import (
    Data,
    Debug,
    Device,
    Field,
    Json,
    Memory,
    Model,
    Planned,
    Quiet,
    Verbose,
    complete_target,
    target_verb,
)
from bridge.cli.terminal import session
from bridge.cli.verb import Argument, Option
from bridge.core.errors import UsageError


@target_verb("qbridge distill small MODEL --data corpus.txt --out trained")
def distill(
    model: Model,
    teacher: Annotated[str, Argument(metavar="TEACHER", help="a model with the same vocabulary")],
    options: dict[str, Any],
    data: Data = None,
    out: Annotated[str | None, Option(help="directory to write; default: MODEL-distilled")] = None,
    target: Annotated[str, Option(help="what to write; default: hf", complete=complete_target)] = "hf",
    quant: Planned = None,
    steps: Annotated[int, Option(min=1, help="steps of training; default: 1000")] = 1000,
    batch: Annotated[int, Option(min=1, help="rows in a step; default: 8")] = 8,
    sequence: Annotated[int, Option(min=2, help="tokens in a row; default: 512")] = 512,
    lr: Annotated[float, Option(help="the largest learning rate; default: 1e-4")] = 1e-4,
    temperature: Annotated[float, Option(help="softens the probabilities of both; default: 1")] = 1.0,
    pairs: Annotated[str, Option(metavar="S:T,S:T", help="hidden states: norm, none, or pairs of layers")] = "norm",
    top_k: Annotated[int | None, Option(min=1, help="the teacher's likeliest ids; default: all")] = None,
    teacher_cache: Annotated[str | None, Option(help="directory of the teacher's answers: it runs once")] = None,
    calib: Annotated[str | None, Option(help="saved calibration of the student, for --quant")] = None,
    field: Field = None,
    seed: Annotated[int, Option(min=0, help="of the order of rows; default: 0")] = 0,
    save_every: Annotated[int, Option(min=1, help="steps between saved states; default: 100")] = 100,
    eval_every: Annotated[int, Option(min=1, help="steps between evaluations; default: 100")] = 100,
    device: Device = None,
    memory: Memory = None,
    workers: Annotated[int | None, Option(min=1, help="processes that share a batch, as torchrun starts them")] = None,
    overwrite: Annotated[bool, Option("--overwrite", help="replace OUT, if bridge wrote it")] = False,
    no_resume: Annotated[bool, Option("--no-resume", help="discard what an unfinished run left")] = False,
    no_verify: Annotated[bool, Option("--no-verify", help="do not re-read and run the output")] = False,
    verbose: Verbose = False,
    as_json: Json = False,
    quiet: Quiet = False,
    debug: Debug = False,
) -> None:
    """Train a model to answer as another one does.

    With --quant it is trained with the codes that are written.
    """
    with session(debug=debug, quiet=quiet, silent=launched()[0] > 0) as terminal:
        import bridge
        from bridge.reporting.report import report_table

        report = bridge.distill(
            model, teacher, data, out, target=target, quant=quant, steps=steps, batch=batch, sequence=sequence, lr=lr,
            temperature=temperature, pairs=layers_of(pairs), top_k=top_k, teacher_cache=teacher_cache, calib=calib,
            field=field, seed=seed, save_every=save_every, eval_every=eval_every, device=device, memory=memory,
            workers=workers, overwrite=overwrite, resume=not no_resume, verify=not no_verify,
            progress=terminal.progress, **options,
        )  # fmt: skip
        terminal.finish(report, report_table(report, verbose), as_json, quiet)


def layers_of(text: str) -> str | list[tuple[int, int]] | None:
    """The pairs of `--pairs`."""
    if text in ("norm", "none"):
        return None if text == "none" else text
    try:
        return [(int(student), int(teacher)) for student, teacher in (part.split(":") for part in text.split(","))]
    except ValueError:
        raise UsageError(f"--pairs {text}: give norm, none, or pairs of layers, as in 1:2,3:5") from None
