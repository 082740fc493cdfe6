"""Take what a denoiser gets while its pipeline answers prompts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from bridge.calibration.data.checks import checked
from bridge.calibration.data.documents import documents
from bridge.calibration.data.values import AUTO, PROMPTED, Data, Sampling
from bridge.core.errors import CalibrationError, UsageError
from bridge.core.text import number
from bridge.sources.source import Source

if TYPE_CHECKING:
    from bridge.sources.checkpoint import HfSource


def prompted(data: Any, source: Source, sampling: Sampling) -> Data:
    """Run the pipeline of `source` on prompts (None: the embedded ones) and take its denoiser's inputs as batches."""
    from bridge.sources.live_models.prompts import PROMPTS, STEPS, recorded

    if not source.folder:
        why = f"{source.config['architectures'][0]} alone takes no prompts; give the directory of its pipeline, or "
        missing = f"{why}batches of its inputs in Python: data=[{{'hidden_states': ..., 'timestep': ...}}, ...]"
        if data is None:
            return Data(missing=missing)
        raise CalibrationError(missing)
    _check(data, sampling)
    if isinstance(data, str | Path):
        texts = documents(data, source.load_tokenizer, sampling.rows, sampling.field, sampling.characters)
        prompts = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    else:
        prompts = PROMPTS if data is None else list(data)
    if len(prompts) < 2:
        raise CalibrationError("one prompt cannot both calibrate and be held out; give two or more, one a line")
    asked = sampling.samples if isinstance(sampling.samples, int) else PROMPTED
    *chosen, held = prompts[: asked + 1]
    *kept, out = recorded(cast("HfSource", source), [*chosen, held])
    batches = tuple(batch for steps in kept for batch in steps)
    made = checked(batches, (out[len(out) // 2],), source, "the prompts")
    return replace(made, samples=len(chosen), name=f"{number(len(chosen), 'prompt')} of {STEPS} steps each")


def _check(data: Any, sampling: Sampling) -> None:
    """UsageError for what prompts have no use for."""
    if sampling.samples == AUTO:
        raise UsageError('samples="auto" (--samples) chooses rows of text; a pipeline takes a number of prompts')
    if sampling.sequence:
        raise UsageError("sequence= (--sequence) cuts rows of text; leave it out: a pipeline takes whole prompts")
    if sampling.field and not isinstance(data, str | Path):
        raise UsageError(f"field={sampling.field!r} (--field) names a key of JSONL records; give them: data= (--data)")
