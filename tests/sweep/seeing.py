"""Hold graphs of a model that sees or hears to transformers: prompts, steps, left padding, a text alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches

from bridge.targets.onnx.files import DECODER
from bridge.targets.onnx.files import TILE_ROWS as FEATURES
from bridge.targets.onnx.run.multimodal import MASK, MultiModal, load_multimodal
from bridge.verification.outputs import relative_l2

STEPS, ROWS, PAD = 8, 2, 3
TILED = ("idefics3", "smolvlm")  # families with an axis of images a row
HEIGHT, WIDTH = 4, 6  # patches of an image of any size
BEFORE, AFTER = 4, 6  # tokens of text around an image


def seen(model: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """An image or a sound a row, with transformers' names."""
    if hasattr(model.config, "audio_config"):
        config = model.config.audio_config
        sound = torch.randn(ROWS, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
        mask = torch.ones(ROWS, sound.shape[-1], dtype=torch.long)
        return {"input_features": sound} | ({"feature_attention_mask": mask} if "qwen2" in config.model_type else {})
    vision = model.config.vision_config
    if hasattr(vision, "num_patches"):
        grids = torch.tensor([[HEIGHT, WIDTH], [2, HEIGHT]])  # the second is filled up
        patches = torch.randn(ROWS, HEIGHT * WIDTH, 3 * vision.patch_size**2, generator=generator)
        mask = (torch.arange(HEIGHT * WIDTH) < grids.prod(1)[:, None]).long()
        return {"pixel_values": patches, "spatial_shapes": grids, "pixel_attention_mask": mask}
    if hasattr(vision, "temporal_patch_size"):
        width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        patches = torch.randn(ROWS * HEIGHT * WIDTH, width, generator=generator)
        return {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, HEIGHT, WIDTH]] * ROWS)}
    if hasattr(vision, "max_num_tiles"):
        return _tiled(vision, generator)
    side = vision.image_size
    height, width = (side, side) if isinstance(side, int) else side
    if hasattr(model.config, "image_grid_pinpoints"):
        sizes = torch.tensor([[side + 5, 2 * side], [3 * side, side]])
        tiles = max(image_size_to_num_patches(size, model.config.image_grid_pinpoints, side) for size in sizes)
        pixels = torch.randn(ROWS, tiles, 3, side, side, generator=generator)
        return {"pixel_values": pixels, "image_sizes": sizes}
    pixels = torch.randn(ROWS, 3, height, width, generator=generator)
    if model.config.model_type == "mistral3":
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width - 16]] * ROWS)}
    if model.config.model_type == "instructblip":
        asked = torch.randint(5, 300, (ROWS, AFTER), generator=generator)
        mask = torch.ones_like(asked)
        mask[1, :2] = 0  # the shorter question is filled up
        return {"pixel_values": pixels, "qformer_input_ids": asked, "qformer_attention_mask": mask}
    return {"pixel_values": pixels[:, None] if model.config.model_type in TILED else pixels}


def _tiled(vision: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """An image a row, the first of one tile, the others of all."""
    tiles, side = vision.max_num_tiles, vision.image_size
    count = torch.tensor([[1], *[[tiles]] * (ROWS - 1)])
    return {
        "pixel_values": torch.randn(ROWS, 1, tiles, 3, side, side, generator=generator),
        "aspect_ratio_ids": count,
        "aspect_ratio_mask": (torch.arange(tiles) < count[..., None]).long(),
    }


def reading(looked: dict[str, torch.Tensor], length: int) -> dict[str, torch.Tensor]:
    """Of a text of `length` tokens whose image stands behind BEFORE: which token reads which tile, if it says so."""
    if "aspect_ratio_mask" not in looked:
        return {}
    tiles = looked["aspect_ratio_mask"][:, None].repeat(1, length, 1, 1)
    tiles[:, :BEFORE] = 0
    return {MASK: tiles}


def distances(model: Any, out: Path) -> dict[str, float]:
    """What was compared -> how far the logits are from those of transformers."""
    generator = torch.Generator().manual_seed(7)
    graphs, looked = load_multimodal(out), seen(model, generator)
    crosses = "aspect_ratio_mask" in looked
    rows = [1] * ROWS if crosses else _rows(graphs, _arrays(looked))
    text = torch.randint(5, 300, (ROWS, BEFORE + max(rows) + AFTER), generator=generator)
    for at, token in enumerate(getattr(model.config, "visual_indicator_token_ids", [])):
        text[:, at if at < BEFORE else -1] = token  # Ovis 2 embeds them in another way beside an image
    ids = text.clone()
    for row, count in zip(ids, rows, strict=True):
        row[BEFORE : BEFORE + count] = graphs.token
    looked |= reading(looked, ids.shape[1])
    more = torch.randint(5, 300, (ROWS, STEPS), generator=generator)
    far = {}
    for what, tokens, given in (("logits", ids, looked), ("text", text, {})):
        wanted = _theirs(model, {"input_ids": tokens, **given}, more)
        got = _ours(graphs, {"input_ids": tokens, **given}, more)
        far[what] = relative_l2(got[:, :-STEPS], wanted[:, :-STEPS])
        if given:
            far["steps"] = relative_l2(got[:, -STEPS:], wanted[:, -STEPS:])
            padded = torch.cat([torch.full((ROWS, PAD), 3), ids], 1)
            mask = torch.cat([torch.zeros(ROWS, PAD, dtype=torch.long), torch.ones_like(ids)], 1)
            if crosses:
                given = {**given, MASK: torch.nn.functional.pad(given[MASK], (0, 0, 0, 0, PAD, 0))}
            got = _ours(graphs, {"input_ids": padded, "attention_mask": mask, **given}, more)[:, PAD:]
            far["padded"] = relative_l2(got, wanted)
    return far


def _rows(graphs: MultiModal, looked: dict[str, np.ndarray]) -> list[int]:
    """Features of each row's image or sound."""
    if graphs.tiling is not None:
        return [len(image[FEATURES]) for image in graphs.tiling.images(looked)]
    if "spatial_shapes" in looked:
        return (looked["spatial_shapes"].prod(1) // 4).tolist()  # two by two patches are a row
    return [len(graphs.features(graphs.read(looked))[f"{graphs.kind}_features"]) // ROWS] * ROWS


def _arrays(given: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in given.items()}


def _theirs(model: Any, given: dict[str, Any], more: torch.Tensor) -> np.ndarray:
    places = (given["input_ids"] == getattr(model.config, "image_token_id", -1)).long()
    kinds = {"gemma3": places, "paligemma": torch.zeros_like(places)}
    typed = {"token_type_ids": kinds[kind]} if (kind := model.config.model_type) in kinds else {}
    typed |= {"mm_token_type_ids": places} if "image_grid_thw" in given else {}
    writer = model.language_model if hasattr(model.config, "qformer_config") else model
    with torch.no_grad():
        out = (model if "pixel_values" in given else writer)(**given, **typed, use_cache=True)
        logits = [out.logits]
        kept = {MASK: given[MASK][:, -1:]} if MASK in given else {}
        for at in range(STEPS):
            past = getattr(out, "language_model_outputs", out).past_key_values
            out = writer(input_ids=more[:, at : at + 1], past_key_values=past, use_cache=True, **kept)
            logits.append(out.logits)
    return torch.cat(logits, 1).float().numpy()


def _ours(graphs: MultiModal, given: dict[str, Any], more: torch.Tensor) -> np.ndarray:
    mask = given.get("attention_mask", torch.ones_like(given["input_ids"]))
    given = {**given, "attention_mask": mask}
    places, feeds = graphs.places(_arrays(given)), graphs.feeds(_arrays(given))[DECODER]
    out = graphs.decoder.run(feeds)
    logits = [out["logits"]]
    for at in range(STEPS):
        past = graphs.kept(feeds, out)
        mask = torch.cat([mask, torch.ones(ROWS, 1, dtype=torch.long)], 1)
        given = {"input_ids": more[:, at : at + 1], "attention_mask": mask}
        if places is not None:
            places = np.broadcast_to(places.max(axis=(0, 2))[None, :, None] + 1, (3, ROWS, 1))
        three = {} if places is None else {"position_ids": places}
        feeds = graphs.feeds({**_arrays(given), **past, **three})[DECODER]
        out = graphs.decoder.run(feeds)
        logits.append(out["logits"])
    return np.concatenate(logits, 1)
