"""Tiny models with a text model inside: the configs of their sub-models, and checkpoints in the forms of the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.draft_families import write
from tests.tables.tiny import CASES

_PATCHES = {
    "depth": 2, "hidden_size": 32, "intermediate_size": 44, "num_heads": 2, "out_hidden_size": 48, "in_channels": 3,
    "num_position_embeddings": 16, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2,
}  # fmt: skip
_SIGLIP = {
    "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 12,
    "patch_size": 4, "vision_use_head": False,
}  # fmt: skip
# in no text of a test
_TOKENS = {
    "image_token_id": 0,
    "video_token_id": 0,
    "vision_start_token_id": 0,
    "vision_end_token_id": 0,
}  # not in texts
_PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip
_MOONVIT = {
    "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4,
    "pos_emb_height": 6, "pos_emb_width": 7, "merge_kernel_size": [2, 3],
}  # fmt: skip

# name -> class, the case of tiny.py that is the text model, the other entries of the config
COMPOSITES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_5_vl": ("Qwen3_5ForConditionalGeneration", "qwen3_5", {"vision_config": _PATCHES, **_TOKENS}),
    "qwen3_5_vl-tied": (
        "Qwen3_5ForConditionalGeneration",
        "qwen3_5",
        {"vision_config": _PATCHES, **_TOKENS, "tie_word_embeddings": True},
    ),
    "qwen3_5_moe_vl": ("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe", {"vision_config": _PATCHES, **_TOKENS}),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        "mistral",
        {"vision_config": _PIXTRAL, "spatial_merge_size": 3, "tie_word_embeddings": False},
    ),
    "mistral3-tied": ("Mistral3ForConditionalGeneration", "mistral", {"vision_config": _PIXTRAL}),
    "mistral3-mistral4": (
        "Mistral3ForConditionalGeneration",
        "mistral4",
        {"vision_config": _PIXTRAL, "tie_word_embeddings": False},
    ),
    "gemma3_vl": ("Gemma3ForConditionalGeneration", "gemma3", {"vision_config": _SIGLIP, "mm_tokens_per_image": 4}),
    "kimi_k25": (
        "Kimi_K25ForConditionalGeneration",
        "deepseek",
        {"vision_config": _MOONVIT, "projection_hidden_size": 32, "tie_word_embeddings": False, **_TOKENS},
    ),
}
# Classes whose tensors the hub names otherwise than transformers saves them -> the hub's name of the class.
HUB = {
    "Kimi_K25ForConditionalGeneration": "KimiK25ForConditionalGeneration",
    "Gemma3ForConditionalGeneration": "Gemma3ForConditionalGeneration",
}


def fields_of(case: str) -> dict[str, Any]:
    """The entries of the config of a case."""
    _, text, others = COMPOSITES[case]
    own = getattr(transformers, CASES[text][0]).config_class(**CASES[text][1]).to_dict()
    return {"text_config": own, **others}


def model_of(case: str) -> Any:
    """The model of a case, with weights as its class makes them."""
    cls = getattr(transformers, COMPOSITES[case][0])
    return cls._from_config(cls.config_class(**fields_of(case)), attn_implementation="eager").eval()


def as_on_the_hub(directory: Path) -> None:
    """Give a saved checkpoint the class and names of the hub's, which transformers loads and does not save."""
    tensors, config = load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())
    tower = {"vision_tower.": "vision_tower.vision_model."} if "mm_tokens_per_image" in config else {}
    wrong = tower | {
        "model.mm_projector.": "mm_projector.",
        ".model.blocks.": ".model.layers.",
        ".encoder.patch_": ".patch_",
    }
    names = {name: name for name in tensors}
    for old, new in wrong.items():
        names = {name: here.replace(old, new) for name, here in names.items()}
    config["architectures"] = [HUB[config["architectures"][0]]]
    write(directory, {names[name]: tensor for name, tensor in tensors.items()}, config)


def with_stacks(source: Path, directory: Path) -> None:
    """Copy a checkpoint with all experts of a layer in one tensor, as the hub's hold them."""
    tensors, config = load_file(source / "model.safetensors"), json.loads((source / "config.json").read_text())
    for begin in sorted({name.partition(".experts.")[0] for name in tensors if ".experts." in name}):
        each: dict[str, list[torch.Tensor]] = {}
        for kind in ("gate_proj", "up_proj", "down_proj"):
            names = (f"{begin}.experts.{at}.{kind}.weight" for at in range(config["text_config"]["num_experts"]))
            each[kind] = [tensors.pop(name) for name in names]
        pairs = zip(each["gate_proj"], each["up_proj"], strict=True)
        tensors[f"{begin}.experts.gate_up_proj"] = torch.stack([torch.cat(pair) for pair in pairs])
        tensors[f"{begin}.experts.down_proj"] = torch.stack(each["down_proj"])
    write(directory, tensors, config)


def with_draft_layer(directory: Path) -> None:
    """Add a draft layer, a copy of the last layer with full attention, in the names of the hub's."""
    tensors, config = load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())
    at, width = config["text_config"]["layer_types"].index("full_attention"), config["text_config"]["hidden_size"]
    begin = f"model.language_model.layers.{at}."
    drafts = {"mtp.layers.0." + n.removeprefix(begin): t.clone() for n, t in tensors.items() if n.startswith(begin)}
    drafts["mtp.fc.weight"] = torch.ones(width, 2 * width, dtype=torch.bfloat16)
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        drafts[f"mtp.{name}.weight"] = torch.ones(width, dtype=torch.bfloat16)
    config["text_config"]["mtp_num_hidden_layers"] = 1
    save_file(tensors | drafts, directory / "model.safetensors", {"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
