"""A tiny LLaVA-NeXT, which reads an image whole and as tiles, with its processor, as a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from tests.models.seeing_family import PATCH, SIDE, TEMPLATE, stir, tokenizer_with
from tests.oracles import export_oracle as oracle

SIZES = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 3 * SIDE]]


def save_llava_next(directory: Path) -> None:
    """Save model and processor; four layers, so that two are stamped."""
    tokenizer, token = tokenizer_with("<image>")
    config = transformers.LlavaNextConfig(
        text_config={
            "model_type": "llama", "vocab_size": token + 3, "hidden_size": 48, "intermediate_size": 80,
            "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256,
            "bos_token_id": 1, "eos_token_id": 2,
        },
        vision_config={
            "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "image_size": SIDE, "patch_size": PATCH, "projection_dim": 16,
        },
        image_token_index=token, image_grid_pinpoints=SIZES, architectures=["LlavaNextForConditionalGeneration"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlavaNextForConditionalGeneration(config).float().eval()
    stir(model)
    oracle.save(model, directory)
    images = transformers.LlavaNextImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}, image_grid_pinpoints=SIZES
    )
    processor = transformers.LlavaNextProcessor(
        images, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default", chat_template=TEMPLATE,
        image_token="<image>", num_additional_image_tokens=1,
    )  # fmt: skip
    processor.save_pretrained(directory)
