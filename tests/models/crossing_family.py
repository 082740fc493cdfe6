"""A tiny Llama 3.2 Vision with a processor of texts and images, as a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from tests.models.seeing_family import TEMPLATE, stir, tokenizer_with
from tests.oracles import export_oracle as oracle

SIDE, TILES = 24, 3
LAYERS, CROSSED = 7, [1, 4, 6]
IMAGE = "<|image|>"


def save_mllama(directory: Path) -> None:
    """Save model and processor; of each kind of layer one more than two, which are stamped. Gates are open."""
    tokenizer, token = tokenizer_with(IMAGE)
    images = transformers.MllamaImageProcessorPil(size={"height": SIDE, "width": SIDE}, max_image_tiles=TILES)
    config = transformers.MllamaConfig(
        text_config={
            "vocab_size": token, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": LAYERS,
            "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 96,
            "cross_attention_layers": CROSSED, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        vision_config={
            "hidden_size": 32, "attention_heads": 4, "intermediate_size": 56, "num_hidden_layers": 3,
            "num_global_layers": 1, "image_size": SIDE, "patch_size": 8, "max_num_tiles": TILES,
            "vision_output_dim": 96, "intermediate_layers_indices": [0, 2],
            "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [2, 1], [3, 1]],
        },
        image_token_index=token, architectures=["MllamaForConditionalGeneration"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MllamaForConditionalGeneration(config).float().eval()
    stir(model)
    oracle.save(model, directory)
    template = TEMPLATE.replace("<image>", IMAGE)
    transformers.MllamaProcessor(images, tokenizer, chat_template=template).save_pretrained(directory)
