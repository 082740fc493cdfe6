"""The call of models that hear.

They take samples of any length, or spectra as their config describes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import Dim

from bridge.targets.onnx.export.calls.text import BATCH, Axes, Call, Flat
from bridge.targets.onnx.export.family import family_of
from bridge.targets.tasks import Task

LENGTH = 4000  # samples of the example, a quarter of a second: more than any convolution reads at once
LEAST, MOST = {"samples": 800}, 16000 * 600  # convolutions need some samples, and torch an end
FRAMES = 90  # of the example's spectrum
STATE = 1024  # samples of which Moonshine makes one state: 895


def sound_call(model: Any, task: Task, mode: Any, dtype: torch.dtype) -> Call:
    """Return the call of a model of sound; its mask is an input if the model was trained with one."""
    config, name = model.config, model.main_input_name
    for module in model.modules():
        if hasattr(module, "upsample") and hasattr(module, "pool"):
            _fill_up(module)
    shape, axes, word = _extents(config, name)
    with mode:
        inputs = {name: torch.zeros(BATCH, *shape, dtype=dtype)}
        if "attention_mask" in task.inputs and word and _is_masked(config, name):
            inputs["attention_mask"] = torch.ones(BATCH, shape[0], dtype=torch.long)
        out = model(**inputs, return_dict=True)
        probe = {n: out[n] for n in task.outputs if out.get(n) is not None}
    dims = {0: Dim("batch")} | ({1: Dim(word, min=LEAST.get(word), max=MOST)} if word else {})
    feeds: dict[str, Axes] = {n: ("batch", *(axes if n == name else axes[:1])) for n in inputs}
    gives = {n: _axes(t, bool(word)) for n, t in probe.items()}
    return Call(Flat(model, tuple(probe)), (inputs, []), ({n: dims for n in inputs}, []), feeds, gives)


def _fill_up(encoder: Any) -> None:
    """Let SEW put zeros for the frames that its pool drops without asking whether there are any, in place."""
    factor: int = encoder.upsample.squeeze_factor
    frames: list[Any] = []

    def begin(_: Any, args: Any) -> None:
        frames[:] = [args[0].shape[1]]

    def end(_: Any, __: Any, out: Any) -> Any:
        whole = torch.cat([out, out.new_zeros(out.shape[0], factor, out.shape[2])], 1)
        return whole.index_select(1, torch.arange(frames[0]))

    encoder.register_forward_pre_hook(begin)
    encoder.upsample.register_forward_hook(end)


def _axes(output: Any, dynamic: bool) -> Axes:
    """Outputs are [batch, frames, features] or [batch, features]."""
    extents = tuple(map(int, output.shape[1:]))
    return ("batch", "frames", *extents[1:]) if dynamic and len(extents) == 2 else ("batch", *extents)


def _extents(config: Any, name: str) -> tuple[tuple[int, ...], Axes, str]:
    """Extents and axes behind the batch, and the name of the dynamic one ("" if none is)."""
    bins = getattr(config, "num_mel_bins", None)
    width = getattr(config, "feature_projection_input_dim", None)
    width = width or getattr(getattr(config, "encoder_config", None), "num_mel_bins", None)  # Parakeet
    if name == "input_features" and width:
        return (FRAMES, int(width)), ("spectrum_frames", int(width)), "spectrum_frames"
    if bins and getattr(config, "max_source_positions", None):  # Whisper's encoder
        shape = (int(bins), 2 * int(config.max_source_positions))
        return shape, shape, ""
    if bins:  # AST: a picture of the spectrum
        shape = (int(config.max_length), int(bins))
        return shape, shape, ""
    return (LENGTH,), ("samples",), "samples"


def _is_masked(config: Any, name: str) -> bool:
    """Models with group norms were trained without a mask, which transformers' feature extractors then leave out."""
    return name == "input_features" or getattr(config, "feat_extract_norm", "") == "layer"


@dataclass(frozen=True)
class SoundMasks:
    """A family's sounds. `states`: the mask of the encoder's states, of that of its input; `taken`: as it takes it."""

    settle: Callable[[Any], None]  # lets the model take `taken`, in place
    states: Callable[[Any, Any], Any]
    taken: Callable[[Any], Any]


def sound_masks(model: Any) -> SoundMasks | None:
    """How the sounds of `model` are masked; None if they have one length, as Whisper's."""
    return family_of(model.config).sound


def example_sounds(
    model: Any, dtype: torch.dtype
) -> tuple[dict[str, Any], dict[str, Axes], dict[str, tuple[int, int]]]:
    """Example inputs, their axes, and the least and the largest extent of these."""
    if model.main_input_name == "input_values":
        inputs, axis, bounds = torch.zeros(BATCH, LENGTH, dtype=dtype), "samples", (STATE, MOST)
    else:
        width, most = int(model.config.input_feat_per_channel), int(model.config.max_source_positions)
        inputs, axis, bounds = torch.zeros(BATCH, FRAMES, width, dtype=dtype), "spectrum_frames", (5, most)
    axes: dict[str, Axes] = {model.main_input_name: ("batch", axis, *map(int, inputs.shape[2:]))}
    mask = torch.ones(inputs.shape[:2], dtype=torch.long)
    return (
        {model.main_input_name: inputs, "attention_mask": mask},
        axes | {"attention_mask": ("batch", axis)},
        {axis: bounds},
    )
