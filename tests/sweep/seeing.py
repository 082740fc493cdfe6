"""Hold the graphs of a model that sees to transformers: a prompt with images, steps, left padding, a text alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from bridge.targets.trt.multimodal import MultiModal
from bridge.verification.outputs import relative_l2

STEPS, ROWS, PAD = 8, 2, 3
BEFORE, AFTER = 4, 6  # tokens of text around an image


def pixels(model: Any, generator: torch.Generator) -> torch.Tensor:
    """An image a row."""
    side = model.config.vision_config.image_size
    height, width = (side, side) if isinstance(side, int) else side
    return torch.randn(ROWS, 3, height, width, generator=generator)


def distances(model: Any, out: Path) -> dict[str, float]:
    """What was compared -> how far the logits are from those of transformers."""
    generator = torch.Generator().manual_seed(7)
    graphs, seen = MultiModal(out), {"pixel_values": pixels(model, generator)}
    rows = len(graphs.features(_arrays(seen))) // ROWS
    text = torch.randint(5, 300, (ROWS, BEFORE + rows + AFTER), generator=generator)
    ids = text.clone()
    ids[:, BEFORE : BEFORE + rows] = model.config.image_token_id
    more = torch.randint(5, 300, (ROWS, STEPS), generator=generator)
    far = {}
    for what, tokens, given in (("logits", ids, seen), ("text", text, {})):
        wanted = _theirs(model, {"input_ids": tokens, **given}, more)
        got = _ours(graphs, {"input_ids": tokens, **given}, more)
        far[what] = relative_l2(got[:, :-STEPS], wanted[:, :-STEPS])
        if given:
            far["steps"] = relative_l2(got[:, -STEPS:], wanted[:, -STEPS:])
            padded = torch.cat([torch.full((ROWS, PAD), 3), ids], 1)
            mask = torch.cat([torch.zeros(ROWS, PAD, dtype=torch.long), torch.ones_like(ids)], 1)
            got = _ours(graphs, {"input_ids": padded, "attention_mask": mask, **given}, more)[:, PAD:]
            far["padded"] = relative_l2(got, wanted)
    return far


def _arrays(given: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in given.items()}


def _theirs(model: Any, given: dict[str, Any], more: torch.Tensor) -> np.ndarray:
    places = (given["input_ids"] == model.config.image_token_id).long()
    kinds = {"gemma3": places, "paligemma": torch.zeros_like(places)}
    typed = {"token_type_ids": kinds[kind]} if (kind := model.config.model_type) in kinds else {}
    with torch.no_grad():
        out = model(**given, **typed, use_cache=True)
        logits = [out.logits]
        for at in range(STEPS):
            out = model(input_ids=more[:, at : at + 1], past_key_values=out.past_key_values, use_cache=True)
            logits.append(out.logits)
    return torch.cat(logits, 1).float().numpy()


def _ours(graphs: MultiModal, given: dict[str, Any], more: torch.Tensor) -> np.ndarray:
    mask = given.get("attention_mask", torch.ones_like(given["input_ids"]))
    out = graphs.run(_arrays({**given, "attention_mask": mask}))
    logits = [out["logits"]]
    for at in range(STEPS):
        past = {name.replace("present.", "past_key_values."): out[name] for name in out if name != "logits"}
        mask = torch.cat([mask, torch.ones(ROWS, 1, dtype=torch.long)], 1)
        given = {"input_ids": more[:, at : at + 1], "attention_mask": mask}
        out = graphs.run({**_arrays(given), **past})
        logits.append(out["logits"])
    return np.concatenate(logits, 1)
