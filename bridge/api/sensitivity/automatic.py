"""Choose the recipe of `quant="auto:4.8bits"`, and keep it beside the output.

A second run with the same inputs reads the file and measures nothing, so a conversion that was killed resumes with the
recipe that it began with. The first line holds digests of the inputs and of the rest: an edited file is never replaced.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

from bridge.api.request import Request, unwarned_data_of, warn_of
from bridge.api.sensitivity.budget import parse_automatic
from bridge.api.sensitivity.candidates import Destination
from bridge.api.sensitivity.job import Job, automatic_job, check_by_blocks, room_for
from bridge.api.sensitivity.run import measured
from bridge.calibration.data import Data
from bridge.core.errors import UsageError, WriteError, reason
from bridge.core.output.replace import check_free, recover
from bridge.core.output.temporary import write_whole
from bridge.core.text import size
from bridge.core.version import __version__, installed
from bridge.planning.structure import structure_of
from bridge.quant.calibration import Calibration
from bridge.quant.schemes.load import load_scheme
from bridge.sources.source import Source

SUFFIX = ".recipe.toml"  # after the name of the output
_FIRST = re.compile(r"# qbridge (\S+): choice ([0-9a-f]{64}), text ([0-9a-f]{64})")


def choose_recipe(source: Source, request: Request) -> tuple[Request, str]:
    """The request with the chosen scheme in place of `auto:`, and the text of its recipe."""
    automatic = parse_automatic(request.quant)
    if isinstance(request.calib, Calibration) or str(request.calib).endswith(".safetensors"):
        raise UsageError(
            f"calib= (--calib) has the statistics of one scheme, but quant={request.quant!r} runs the model in "
            "several; pass data= (--data), or nothing"
        )
    structure = structure_of(source)
    where = Destination(request.target, dict(request.options), request.runtime)
    job = automatic_job(source, structure, automatic.schemes, automatic.budget, request.kv, where)
    name = f"{source.name}-{automatic.label}-{job.candidates.menus[0].target}"
    out = Path(name if request.out is None else request.out)
    recover(out)
    check_free(out, request.overwrite)
    path = out.with_name(out.name + SUFFIX)
    data = unwarned_data_of(source, request.calib if request.data is None else request.data, request.sampling)
    job = _within(request, job, data)
    key = _digest(request, job, data)
    text = _kept(path, key) if request.resume else None
    warn_of(data)
    if text is None:
        text = measured(job, data, request.device, request.progress, request.memory, compute=request.compute).recipe
        _write(path, f"# qbridge {request.quant}: choice {key}, text {_sha(text)}\n{text}")
    scheme = replace(load_scheme(path), name=automatic.label)
    return replace(request, quant=scheme, kv=None, out=out), path.read_text(encoding="utf-8")


def _within(request: Request, job: Job, data: Data) -> Job:
    """The job, by block errors if the whole model does not fit into the caller's memory.

    What is free now decides nothing, so that a run that was killed chooses as before.
    """
    if data.forward_loop is not None:
        return job
    room = room_for(replace(job, method="block"), data, request.memory, request.device)
    if room.whole:
        return job
    assert job.budget
    whole = f"quant={request.quant!r} runs the whole model, which takes {size(room.needed)}"
    if job.budget.kind == "kl":
        raise UsageError(f"{whole}, to measure divergences; give a budget of bits or bytes, as in auto:4.8bits")
    if request.memory is None:
        raise UsageError(f"{whole}, more than is free; give memory= (--memory): layers are then ranked block by block")
    by_blocks = replace(job, method="block")
    check_by_blocks(by_blocks)
    return by_blocks


def _digest(request: Request, job: Job, data: Data) -> str:
    """Of everything that decides the choice."""
    parts = [
        __version__, job.source.fingerprint, job.title, job.method, request.quant, request.kv, request.target,
        request.runtime, dict(request.options), data.digest, request.device,
        [installed(package) for package in ("nvidia-modelopt", "torch", "transformers", "scipy")],
    ]  # fmt: skip
    return _sha(json.dumps(parts, sort_keys=True, default=str))


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _kept(path: Path, key: str) -> str | None:
    """The text of an earlier choice from the same inputs; UsageError if the file is not a choice as it was written."""
    try:
        first, _, rest = path.read_text(encoding="utf-8").partition("\n")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read ({error}); remove it, or choose another out") from error
    match = _FIRST.fullmatch(first)
    if not match or match[3] != _sha(rest):
        raise UsageError(
            f"{path} exists and is not a choice as qbridge wrote it; pass it as quant (--quant {path}) to use it, or "
            "remove it to choose again"
        )
    return rest if match[2] == key else None


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text.encode(), f".{path.name}.partial")
    except OSError as error:
        raise WriteError(f"{path}: the recipe cannot be written: {reason(error)}") from error
