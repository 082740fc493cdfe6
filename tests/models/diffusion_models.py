"""Tiny models and pipelines of diffusers, with random weights and sizes that all differ; needs diffusers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch

STEPS = 3  # of a pipeline's calibration in tests


def dit() -> Any:
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=4, attention_head_dim=24, num_layers=2, sample_size=8, in_channels=4, out_channels=8,
        num_embeds_ada_norm=1000, patch_size=2,
    )  # fmt: skip


def flux() -> Any:
    return diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=2, attention_head_dim=32, num_attention_heads=3,
        joint_attention_dim=80, pooled_projection_dim=48, guidance_embeds=True, axes_dims_rope=(8, 12, 12),
    )  # fmt: skip


def sd3() -> Any:
    return diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=16, num_attention_heads=6,
        joint_attention_dim=80, caption_projection_dim=96, pooled_projection_dim=48, out_channels=4,
        pos_embed_max_size=16,
    )  # fmt: skip


def sdxl() -> Any:
    added = {
        "addition_embed_type": "text_time", "addition_time_embed_dim": 8, "projection_class_embeddings_input_dim": 80,
        "transformer_layers_per_block": (1, 2),
    }  # fmt: skip
    return _unet(**added)


def sd() -> Any:
    return _unet()


def _unet(**more: Any) -> Any:
    return diffusers.UNet2DConditionModel(
        sample_size=8, in_channels=4, out_channels=4, block_out_channels=(32, 64), layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=(2, 4), cross_attention_dim=48, use_linear_projection=True, norm_num_groups=8, **more,
    )  # fmt: skip


def pixart() -> Any:
    return diffusers.PixArtTransformer2DModel(
        num_attention_heads=4, attention_head_dim=24, num_layers=2, sample_size=8, in_channels=4, out_channels=8,
        cross_attention_dim=96, caption_channels=40,
    )  # fmt: skip


def wan() -> Any:
    return diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=4, attention_head_dim=24, in_channels=4, out_channels=4, text_dim=40,
        freq_dim=32, ffn_dim=112, num_layers=5, rope_max_seq_len=64,
    )  # fmt: skip


MODELS: dict[str, Callable[[], Any]] = {
    "dit": dit, "flux": flux, "sd3": sd3, "sdxl": sdxl, "pixart": pixart, "wan": wan,
}  # fmt: skip


def made(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model by its name; what diffusers makes zero is random too, so that every part changes the output."""
    torch.manual_seed(len(name))
    model = {**MODELS, "sd": sd}[name]().eval()
    for parameter in model.parameters():
        if not parameter.any():
            torch.nn.init.normal_(parameter, std=0.02)
    return model.to(dtype)


def save(name: str, directory: Path, dtype: torch.dtype = torch.float32) -> None:
    """Save a model as a user has it: modules that diffusers keeps in float32 are in float32."""
    model = made(name, dtype)
    model.save_pretrained(directory)
    type(model).from_pretrained(directory, torch_dtype=dtype).save_pretrained(directory)


def vae() -> Any:
    torch.manual_seed(1)
    return diffusers.AutoencoderKL(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(16,), norm_num_groups=4, sample_size=8,
        down_block_types=("DownEncoderBlock2D",), up_block_types=("UpDecoderBlock2D",),
    )  # fmt: skip


def dit_pipeline() -> Any:
    return diffusers.DiTPipeline(
        made("dit"), vae(), diffusers.DDIMScheduler(), id2label={str(n): f"class {n}" for n in range(10)}
    )


def sd_pipeline() -> Any:
    """Stable Diffusion with a text encoder of bytes."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    letters = sorted(ByteLevel.alphabet())
    words = [*letters, *(f"{letter}</w>" for letter in letters), "<|startoftext|>", "<|endoftext|>"]
    tokenizer = CLIPTokenizer(vocab={word: at for at, word in enumerate(words)}, merges=[], model_max_length=20)
    torch.manual_seed(2)
    ends = {"bos_token_id": len(words) - 2, "eos_token_id": len(words) - 1, "pad_token_id": len(words) - 1}
    config = CLIPTextConfig(
        vocab_size=len(words), hidden_size=48, intermediate_size=60, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=20, **ends,
    )  # fmt: skip
    return diffusers.StableDiffusionPipeline(
        vae(), CLIPTextModel(config).eval(), tokenizer, made("sd"), diffusers.DDIMScheduler(), None, None,
        requires_safety_checker=False,
    )  # fmt: skip
