"""The verb `engine`: TensorRT engines of a written directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.core.errors import UsageError, VerifyError, reason, warn
from bridge.core.output.replace import check_free
from bridge.core.parsing.limited import parse_json
from bridge.core.progress import Progress
from bridge.core.progress_bar import callback_of, shows_progress
from bridge.core.text import byte_count
from bridge.targets.manifest import load_manifest

if TYPE_CHECKING:
    from bridge.targets.trt.record import Engines


@shows_progress
def engine(
    model: str | Path,
    gpu: str | Sequence[str] | None = None,
    out: str | Path | None = None,
    *,
    profile: str | Mapping[str, Sequence[int]] | None = None,
    memory: int | str | None = None,
    progress: Progress | bool | None = None,
) -> Engines:
    """Build TensorRT engines of a directory that `convert` wrote for target trt. It needs no GPU.

    Args:
        gpu: names of GPUs or architectures, "rtx4090,rtx5090" or "sm89"; one engine is for all of them. None builds
            model.engine with the full TensorRT, for this machine's GPU.
        out: a new directory for the engines and `engine.json`; None puts them beside the graphs.
        profile: the least, the usual and the largest extent of axes, "batch=1:4:16,past_sequence=0:512:4095"; others
            keep their defaults.
        memory: bytes that the build for named GPUs may take, or "24GB"; None takes what is free.

    Raises:
        UsageError: an unknown GPU; formats that the oldest of them lacks; an axis that no graph has, or more tokens
            than positions; too little memory.
        EngineUnavailable: TensorRT for RTX is not installed.
        WriteError: the parser or the builder refuses a graph.

    >>> tiny = "examples/models/tiny-llama"
    >>> report = bridge.convert(tiny, "trt", "int8_wo", "for-engines", dtype="fp16", verify=False)
    >>> bridge.engine("for-engines", "rtx4090,rtx5090").engines[0].summary
    '35 of 35 matrices run in weight-only INT8'
    """
    from bridge.targets.trt.engine import build_engines
    from bridge.targets.trt.gpus import parse_gpus, why_no_engine
    from bridge.targets.trt.profile import parse_ranges

    directory, callback = Path(model), callback_of(progress)
    plan = load_manifest(directory).plan
    if plan.target != "trt":
        raise UsageError(
            f"{directory}: engines are built of what target trt wrote, and this is of target {plan.target}"
        )
    if gpu is None and memory is not None:
        raise UsageError("memory is for engines of named GPUs: give gpu (--gpu), for example rtx4090")
    architectures = () if gpu is None else parse_gpus(gpu)
    if gpu is not None and (problems := why_no_engine(plan.steps, plan.options["dtype"], architectures)):
        raise UsageError("\n  ".join([f"{directory}:", *problems]))
    new = None if out is None else Path(out).absolute()
    if new:
        check_free(new, overwrite=False, replacing="remove it")
        if not new.parent.is_dir():
            raise UsageError(f"{new}: {new.parent} is not a directory; make it first")
    return build_engines(
        directory, _config(directory), architectures, out=new, progress=callback,
        memory=None if memory is None else byte_count(memory, "memory="),
        ranges={} if profile is None else parse_ranges(profile), name_them=partial(_name_on_card, directory),
    )  # fmt: skip


def _name_on_card(directory: Path, engines: Engines) -> None:
    """Name the engines in a section of the model card; a card that cannot be written is a warning."""
    from bridge.reporting.model_card import add_engines

    try:
        add_engines(directory, engines)
    except OSError as error:
        warn(f"{directory}: the engines are built, but the model card was not changed: {reason(error)}")


def _config(directory: Path) -> Mapping[str, Any]:
    """The config.json of a written directory, whose positions limit the profiles; {} without one."""
    path = directory / "config.json"
    try:
        config = parse_json(path.read_bytes()) if path.is_file() else {}
        if not isinstance(config, dict):
            raise ValueError("it is not a JSON object")
        return config
    except ValueError as error:
        raise VerifyError(f"{path}: cannot be read ({error}); convert again") from error
