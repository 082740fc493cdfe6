"""Sounds of any length that an encoder reads before a decoder.

Rows of a batch are padded; the encoder turns their mask into that of its states, which the decoder reads. transformers
cuts it by lengths that it counts in Python: here it is made before the model runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bridge.targets.onnx.export.calls.sound import FRAMES, LENGTH, MOST
from bridge.targets.onnx.export.calls.text import BATCH, Axes

STRIDE = 64 * 3 * 2  # samples of Moonshine from one state to the next
LEAST = 1024  # samples of which Moonshine makes one state: 895


@dataclass(frozen=True)
class Heard:
    """A family's sounds. `states`: the mask of the encoder's states, of that of its input; `taken`: as it takes it."""

    settle: Callable[[Any], None]  # lets the model take `taken`, in place
    states: Callable[[Any, Any], Any]
    taken: Callable[[Any], Any]


def heard(model: Any) -> Heard | None:
    """How the sounds of `model` are masked; None if they have one length, as Whisper's."""
    return _FAMILIES.get(model.config.model_type)


def sounds(model: Any, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Axes], dict[str, tuple[int, int]]]:
    """Example inputs, their axes, and the least and the largest extent of these."""
    if model.main_input_name == "input_values":
        inputs, axis, bounds = torch.zeros(BATCH, LENGTH, dtype=dtype), "samples", (LEAST, MOST)
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


def _settle_moonshine(model: Any) -> None:
    model.model.encoder._get_feat_extract_output_lengths = lambda samples: samples // STRIDE


def _every_state(model: Any, mask: Any) -> Any:
    samples = mask.shape[-1]
    convolved = ((samples - 127) // 64 - 6) // 3 + 1
    return mask.index_select(-1, torch.arange((convolved - 3) // 2 + 1) * STRIDE)


def _samples(mask: Any) -> Any:
    """A mask of samples, of which transformers takes the first of each stride."""
    return mask[..., None].expand(-1, -1, STRIDE).flatten(1)


def _settle_frames(model: Any) -> None:
    for module in (model.model, model.model.encoder):
        module._get_feature_vector_attention_mask = lambda length, mask: mask


def _by_length(model: Any, mask: Any) -> Any:
    count = model._get_feat_extract_output_lengths
    return (torch.arange(count(mask.shape[-1])) < count(mask.sum(-1))[:, None]).long()


# Model type of transformers -> its masks.
_FAMILIES = {
    "moonshine": Heard(_settle_moonshine, _every_state, _samples),
    "speech_to_text": Heard(_settle_frames, _by_length, lambda mask: mask),
}
