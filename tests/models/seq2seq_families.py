"""Small random encoder-decoders for target `trt`: extents differ pairwise, every `in` is a multiple of 64."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.models.trt_families import randomize

VOCAB = 320
FRAMES, BINS = 3000, 16  # onnxruntime-genai takes no other length
_T5: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 128, "d_kv": 64, "d_ff": 384, "num_layers": 1, "num_decoder_layers": 2,
    "num_heads": 4, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
_BART: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 128, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 8,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 384, "decoder_ffn_dim": 256, "max_position_embeddings": 40,
    "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
_WHISPER = {key: value for key, value in _BART.items() if key != "max_position_embeddings"} | {
    "max_source_positions": FRAMES // 2, "max_target_positions": 40, "num_mel_bins": BINS, "suppress_tokens": None,
    "begin_suppress_tokens": None, "encoder_attention_heads": 2,
}  # fmt: skip
_TROCR: dict[str, Any] = {
    "model_type": "trocr", "vocab_size": VOCAB, "d_model": 128, "decoder_layers": 2, "decoder_attention_heads": 4,
    "decoder_ffn_dim": 256, "max_position_embeddings": 40,
}  # fmt: skip
_VIT: dict[str, Any] = {
    "model_type": "vit", "hidden_size": 64, "intermediate_size": 384, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip
_SWIN: dict[str, Any] = {
    "model_type": "donut-swin", "embed_dim": 64, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2,
    "image_size": [16, 32], "patch_size": 4,
}  # fmt: skip
_PIX2STRUCT: dict[str, Any] = {
    "text_config": {
        "vocab_size": VOCAB, "hidden_size": 128, "d_kv": 32, "d_ff": 384, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 2,
    },
    "vision_config": {
        "hidden_size": 128, "patch_embed_hidden_size": 192, "d_ff": 320, "d_kv": 16, "num_hidden_layers": 1,
        "num_attention_heads": 8, "seq_len": 24,
    },
}  # fmt: skip
_MBART: dict[str, Any] = {**_BART, "model_type": "mbart", "is_decoder": True, "add_cross_attention": True}
_MOONSHINE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 384, "encoder_num_hidden_layers": 1,
    "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 8, "decoder_num_attention_heads": 4,
    "max_position_embeddings": 40, "pad_token_id": 0,
}  # fmt: skip
_S2T: dict[str, Any] = {
    **{key: value for key, value in _BART.items() if key != "max_position_embeddings"}, "input_feat_per_channel": BINS,
    "input_channels": 1, "conv_channels": 64, "max_source_positions": 200, "max_target_positions": 40,
}  # fmt: skip


def _read(encoder: dict[str, Any], decoder: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """A reader of images."""
    fields = {"encoder": encoder, "decoder": decoder, "decoder_start_token_id": 2, "pad_token_id": 1}
    return "VisionEncoderDecoderConfig", "VisionEncoderDecoderModel", fields


FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5Config", "T5ForConditionalGeneration", _T5),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", _WHISPER),
    "flan-t5": (
        "T5Config", "T5ForConditionalGeneration",
        {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "longt5": ("LongT5Config", "LongT5ForConditionalGeneration", {**_T5, "local_radius": 4}),
    "longt5-global": (
        "LongT5Config", "LongT5ForConditionalGeneration",
        {**_T5, "local_radius": 4, "encoder_attention_type": "transient-global", "global_block_size": 3},
    ),
    "bart": ("BartConfig", "BartForConditionalGeneration", _BART),
    "mbart": ("MBartConfig", "MBartForConditionalGeneration", _BART),
    "marian": ("MarianConfig", "MarianMTModel", _BART),
    "m2m100": ("M2M100Config", "M2M100ForConditionalGeneration", _BART),
    "trocr": _read(_VIT, _TROCR),
    "trocr-sines": _read(_VIT, _TROCR | {"use_learned_position_embeddings": False, "layernorm_embedding": False}),
    "donut": _read(_SWIN, _MBART),
    "pix2struct": ("Pix2StructConfig", "Pix2StructForConditionalGeneration", _PIX2STRUCT),
    "moonshine": ("MoonshineConfig", "MoonshineForConditionalGeneration", _MOONSHINE),
    "speech2text": ("Speech2TextConfig", "Speech2TextForConditionalGeneration", _S2T),
    "pegasus": ("PegasusConfig", "PegasusForConditionalGeneration", _BART),
}  # fmt: skip
KINDS = ("t5", "whisper", "trocr", "moonshine")  # text, sound of one length, images, sound of any length


def seq2seq(family: str, seed: int = 0) -> Any:
    """The family's model, float32, every parameter random."""
    config, architecture, fields = FAMILIES[family]
    torch.manual_seed(seed)
    model = getattr(transformers, architecture)(getattr(transformers, config)(**fields)).eval()
    model.generation_config.forced_eos_token_id = None
    return randomize(model, seed)


def sources(family: str, rows: int, seed: int) -> dict[str, torch.Tensor]:
    """What the encoder reads: rows of 11 tokens, padded on the left, the right, or not at all; of sound; or images."""
    generator = torch.Generator().manual_seed(seed)
    if family.startswith(("trocr", "donut")):
        size = (16, 32) if family == "donut" else (32, 32)
        return {"pixel_values": torch.randn(rows, 3, *size, generator=generator)}
    if family == "pix2struct":  # rows and columns from 1 on, before the pixels; zeros fill up
        patch = torch.arange(12)
        grid = torch.stack([patch // 4 + 1, patch % 4 + 1], -1).expand(rows, -1, -1)
        mask = (patch < torch.tensor([8, *[12] * (rows - 1)])[:, None]).long()
        patches = torch.cat([grid, torch.randn(rows, 12, 192, generator=generator)], -1) * mask[..., None]
        return {"flattened_patches": patches, "attention_mask": mask}
    if family in ("moonshine", "speech2text"):
        name, extents = ("input_values", [3500]) if family == "moonshine" else ("input_features", [61, BINS])
        sound = torch.randn(rows, *extents, generator=generator)
        mask = torch.arange(extents[0]) < torch.tensor([extents[0] * 2 // 3, *[extents[0]] * (rows - 1)])[:, None]
        return {name: sound, "attention_mask": mask.long()}
    if family == "whisper":
        return {"input_features": torch.randn(rows, BINS, FRAMES, generator=generator)}
    ids = torch.randint(3, VOCAB, (rows, 11), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    mask[1, 7:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def targets(rows: int, seed: int) -> torch.Tensor:
    """Tokens that the decoder reads."""
    return torch.randint(3, VOCAB, (rows, 9), generator=torch.Generator().manual_seed(seed))
