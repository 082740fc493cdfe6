"""A tiny LLaVA with a processor of texts and images, as a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.oracles import export_oracle as oracle

LLAMA = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"
SIDE, PATCH = 24, 8  # nine patches
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


def tokenizer_with(image: str) -> tuple[Any, int]:
    """The tokenizer of the tiny Llama, which also knows the token of an image, and the id of that."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(LLAMA / "tokenizer.json"), bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [image]})
    return tokenizer, tokenizer.convert_tokens_to_ids(image)


def stir(model: Any) -> None:
    """Weights with which images decide the tokens: as wide as their inputs are many, and open gates."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "gate" in name.rpartition(".")[2]:
                parameter.fill_(0.7)
            else:
                spread = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 and "embed" not in name else 0.3
                parameter.add_(spread * torch.randn_like(parameter))
        model.get_output_embeddings().weight.mul_(20)  # tokens apart from each other


def save_llava(directory: Path) -> None:
    """Save model and processor; four layers, so that two are stamped."""
    tokenizer, token = tokenizer_with("<image>")
    config = transformers.LlavaConfig(
        text_config={
            "model_type": "llama", "vocab_size": token + 3, "hidden_size": 48, "intermediate_size": 80,
            "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 96,
            "bos_token_id": 1, "eos_token_id": 2,
        },
        vision_config={
            "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "image_size": SIDE, "patch_size": PATCH, "projection_dim": 16,
        },
        image_token_index=token, architectures=["LlavaForConditionalGeneration"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
        model.lm_head.weight.mul_(20)  # tokens apart from each other
    oracle.save(model, directory)
    images = transformers.CLIPImageProcessor(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}, do_center_crop=True
    )
    processor = transformers.LlavaProcessor(
        images, tokenizer, patch_size=PATCH, vision_feature_select_strategy="default", chat_template=TEMPLATE,
        image_token="<image>", num_additional_image_tokens=1,
    )  # fmt: skip
    processor.save_pretrained(directory)


def picture(file: Path, seed: int = 3) -> Any:
    """Write a PNG, and return it."""
    from PIL import Image

    image = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (30, 40, 3), np.uint8))
    image.save(file)
    return image
