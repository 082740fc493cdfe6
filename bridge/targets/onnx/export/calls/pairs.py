"""The calls of two towers: texts beside images or sounds.

Each has an axis of its own.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from bridge.targets.onnx.export.calls.images import Size, images_of, size_of
from bridge.targets.onnx.export.calls.text import BATCH, SEQUENCE, Axes, Call, Flat, dynamic_axes
from bridge.targets.tasks import Task

TEXTS = 10  # rows of text in the example: unlike the number of images, and a multiple of it


def pair_call(model: Any, task: Task, mode: Any, dtype: torch.dtype, image: Size | None) -> Call:
    """Return the call of `task`, whose `pairs` name the axes of texts, and of images or sounds."""
    texts, others = task.pairs
    accepted = inspect.signature(model.forward).parameters
    names = [n for n in task.inputs if n in accepted and n in ("input_ids", "attention_mask")]
    bounds: dict[str, tuple[int | None, int | None]] = {
        "sequence": (None, getattr(model.config.text_config, "max_position_embeddings", None))
    }
    with mode:
        if "input_features" in task.inputs:
            inputs, feeds = _sounds(model.config.audio_config, dtype, others)
            bounds["spectrum_frames"] = (2, _frames(model.config.audio_config) - 1)
        else:
            vision = model.config.vision_config
            # CLIPSeg resizes its table of positions to the images of its processor
            size = image if image and texts == others else size_of(vision, image)
            inputs, feeds = images_of(model, vision, size, dtype, others)
        rows = BATCH if texts == others else TEXTS
        inputs = {n: torch.ones(rows, SEQUENCE, dtype=torch.long) for n in names} | inputs
        out = model(**inputs, return_dict=True)
        probe = {n: out[n] for n in task.outputs if out.get(n) is not None}
    feeds = dict.fromkeys(names, (texts, "sequence")) | feeds
    gives = {n: _axes(n, tuple(map(int, t.shape)), texts, others) for n, t in probe.items()}
    return Call(Flat(model, tuple(probe)), (inputs, []), (dynamic_axes(feeds, bounds), []), feeds, gives)


def _axes(name: str, shape: tuple[int, ...], texts: str, others: str) -> Axes:
    if name.startswith("logits_per_"):
        return others, texts
    if name == "logits" and texts != others:  # of the texts that are asked of an image, for each of its patches
        return others, shape[1], "queries"
    return texts if name == "text_embeds" else others, *shape[1:]


def _frames(config: Any) -> int:
    """Frames of the square that CLAP folds a spectrum into; it stretches shorter ones, as its processor makes them."""
    return int(config.spec_size * (config.spec_size // config.num_mel_bins))


def _sounds(config: Any, dtype: torch.dtype, rows: str) -> tuple[dict[str, Any], dict[str, Axes]]:
    """Spectra, several of a sound if the model fuses parts of a long one with the whole."""
    parts, bins = 4 if config.enable_fusion else 1, int(config.num_mel_bins)
    inputs = {"input_features": torch.zeros(BATCH, parts, _frames(config) - 3, bins, dtype=dtype)}
    feeds: dict[str, Axes] = {"input_features": (rows, parts, "spectrum_frames", bins)}
    if config.enable_fusion:
        inputs["is_longer"], feeds["is_longer"] = torch.ones(BATCH, 1, dtype=torch.bool), (rows, 1)
    return inputs, feeds
