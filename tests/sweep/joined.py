"""Tiny configs of models of several kinds of input: dual towers, and decoders that read images or sound."""

from __future__ import annotations

from tests.sweep.decoders import GROUPED, LOCAL, MOE, PLAIN, SQUARE, TEXT, Fields
from tests.sweep.images import VIT

_VIT = {key: value for key, value in VIT.items() if key != "num_labels"}
_WORDS = PLAIN | {"projection_dim": 64, "eos_token_id": 2}
_DUAL: Fields = {"text_config": _WORDS, "vision_config": _VIT | {"projection_dim": 64}, "projection_dim": 64}
_IMAGE = 320  # the id of an image token
_LLAMA = TEXT | {"model_type": "llama"}
_QWEN2 = SQUARE | {"model_type": "qwen2"}
_CLIP = _VIT | {"model_type": "clip_vision_model"}
_MROPE: Fields = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
_PATCHES: Fields = {
    "depth": 2, "embed_dim": 128, "hidden_size": 128, "num_heads": 4, "patch_size": 8, "spatial_merge_size": 2,
    "temporal_patch_size": 2, "in_channels": 3, "intermediate_size": 384,
}  # fmt: skip
_TOKENS: Fields = {"image_token_id": _IMAGE, "video_token_id": 321, "vision_start_token_id": 322,
                   "vision_end_token_id": 323}  # fmt: skip
_DEEP = _PATCHES | {"out_hidden_size": 128, "num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
_AUDIO: Fields = {
    "d_model": 128, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 384, "num_mel_bins": 16,
    "max_source_positions": 32,
}  # fmt: skip

TOWERS: dict[str, Fields] = {
    "AltCLIPModel": {
        "text_config": _WORDS | {"project_dim": 128, "pad_token_id": 1, "type_vocab_size": 1},
        "vision_config": _VIT | {"projection_dim": 64}, "projection_dim": 64,
    },
    "BlipModel": _DUAL,
    "CLIPModel": _DUAL,
    "CLIPTextModelWithProjection": _WORDS,
    "CLIPVisionModelWithProjection": _VIT | {"projection_dim": 64},
    "CLIPSegForImageSegmentation": _DUAL | {
        "reduce_dim": 32, "extract_layers": [0, 1], "decoder_num_attention_heads": 4,
    },
    "ChineseCLIPModel": _DUAL,
    "GroupViTModel": _DUAL | {
        "vision_config": _VIT | {
            "depths": [1, 1], "num_group_tokens": [8, 0], "num_output_groups": [8, 4], "num_hidden_layers": 2,
        },
    },
    "MetaClip2Model": _DUAL,
    "OwlViTForObjectDetection": _DUAL | {"projection_dim": 128},
    "Owlv2ForObjectDetection": _DUAL | {"projection_dim": 128},
    "Siglip2Model": {"text_config": _WORDS, "vision_config": _VIT | {"num_patches": 16}},
    "SiglipModel": {"text_config": _WORDS, "vision_config": _VIT},
}  # fmt: skip
MULTIMODAL: dict[str, Fields] = {
    "AyaVisionForConditionalGeneration": {
        "text_config": SQUARE | {"model_type": "cohere2"}, "image_token_index": _IMAGE,
        "vision_config": _VIT | {"model_type": "siglip_vision_model"},
    },
    "Blip2ForConditionalGeneration": {
        "text_config": {
            "model_type": "opt", "vocab_size": 330, "hidden_size": 128, "ffn_dim": 384, "num_hidden_layers": 2,
            "num_attention_heads": 4, "max_position_embeddings": 96, "word_embed_proj_dim": 128,
        },
        "vision_config": _VIT, "qformer_config": PLAIN | {"encoder_hidden_size": 128}, "num_query_tokens": 4,
        "image_token_index": _IMAGE,
    },
    "FuyuForCausalLM": PLAIN | {"image_size": 32, "patch_size": 8, "text_config": PLAIN | {"model_type": "persimmon"}},
    "Gemma3ForConditionalGeneration": {
        "text_config": TEXT, "vision_config": _VIT, "mm_tokens_per_image": 4, "image_token_id": _IMAGE,
    },
    "Glm4vForConditionalGeneration": {
        "text_config": SQUARE | {"rope_parameters": _MROPE | {"mrope_section": [4, 6, 6]}},
        "vision_config": _DEEP | {"image_size": 32}, **_TOKENS,
    },
    "Glm4vMoeForConditionalGeneration": {
        "text_config": TEXT | GROUPED | {
            "rope_parameters": _MROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 3, 3]},
        },
        "vision_config": _DEEP | {"image_size": 32}, **_TOKENS,
    },
    "GotOcr2ForConditionalGeneration": {
        "text_config": _QWEN2, "image_token_index": _IMAGE,
        "vision_config": {
            "hidden_size": 128, "output_channels": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 64, "patch_size": 8, "mlp_dim": 384, "window_size": 4, "global_attn_indexes": [1],
        },
    },
    "Idefics3ForConditionalGeneration": {
        "text_config": _LLAMA, "vision_config": _VIT, "scale_factor": 2, "image_token_id": _IMAGE,
    },
    "InstructBlipForConditionalGeneration": {
        "text_config": _LLAMA, "vision_config": _VIT, "qformer_config": PLAIN | {"encoder_hidden_size": 128},
        "num_query_tokens": 4, "image_token_index": _IMAGE,
    },
    "InternVLForConditionalGeneration": {
        "text_config": _QWEN2, "image_token_id": _IMAGE, "image_seq_length": 4,
        "vision_config": _VIT | {"image_size": [32, 32], "patch_size": [8, 8]},
    },
    "JanusForConditionalGeneration": {
        "text_config": _LLAMA, "vision_config": _VIT | {"projection_dim": 128}, "image_token_id": _IMAGE,
        "vq_config": {
            "embed_dim": 8, "num_embeddings": 16, "base_channels": 32, "channel_multiplier": [1, 1],
            "num_res_blocks": 1, "latent_channels": 32, "num_patches": 16, "projection_dim": 128,
            "image_token_embed_dim": 128, "num_hidden_layers": 1,
        },
    },
    "Lfm2VlForConditionalGeneration": {
        "text_config": SQUARE | {
            "model_type": "lfm2", "layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False,
        },
        "vision_config": _VIT | {"model_type": "siglip2_vision_model", "num_patches": 16}, "image_token_id": _IMAGE,
    },
    "Llama4ForConditionalGeneration": {
        "text_config": TEXT | LOCAL | {"intermediate_size_mlp": 256, "interleave_moe_layer_step": 2},
        "vision_config": _VIT | {
            "intermediate_size": 512, "vision_output_dim": 128, "projector_input_dim": 128, "projector_output_dim": 128,
        },
        "image_token_index": _IMAGE,
    },
    "LlavaForConditionalGeneration": {"text_config": _LLAMA, "vision_config": _CLIP, "image_token_index": _IMAGE},
    "LlavaNextForConditionalGeneration": {
        "text_config": _LLAMA, "vision_config": _CLIP, "image_token_index": _IMAGE,
        "image_grid_pinpoints": [[32, 64], [64, 32]],
    },
    "LlavaOnevisionForConditionalGeneration": {
        "text_config": _QWEN2, "vision_config": _VIT | {"model_type": "siglip_vision_model"},
        "image_token_index": _IMAGE, "image_grid_pinpoints": [[32, 64], [64, 32]],
        "vision_aspect_ratio": "anyres_max_1",  # resamples the features of two tiles
    },
    "Mistral3ForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "mistral"}, "image_token_index": _IMAGE,
        "vision_config": _VIT | {"model_type": "pixtral", "head_dim": 32},
    },
    "MllamaForConditionalGeneration": {
        "text_config": SQUARE | {"cross_attention_layers": [1]}, "image_token_index": 329,
        "vision_config": {
            "hidden_size": 128, "attention_heads": 4, "intermediate_size": 384, "num_hidden_layers": 2,
            "num_global_layers": 1, "image_size": 32, "patch_size": 8, "max_num_tiles": 2, "vision_output_dim": 256,
            "intermediate_layers_indices": [1], "supported_aspect_ratios": [[1, 1], [1, 2]],
        },
    },
    "Ovis2ForConditionalGeneration": {
        "text_config": _QWEN2, "image_token_id": _IMAGE, "hidden_size": 128, "vocab_size": 330,
        "visual_indicator_token_ids": [311, 312, 313, 314, 315],
        "vision_config": _VIT | {"vocab_size": 64, "hidden_stride": 1, "num_visual_indicator_tokens": 5},
    },
    "PaliGemmaForConditionalGeneration": {
        "text_config": TEXT | {"model_type": "gemma"}, "image_token_index": _IMAGE, "projection_dim": 128,
        "vision_config": _VIT | {"model_type": "siglip_vision_model", "projection_dim": 128},
    },
    "Pix2StructForConditionalGeneration": {
        "text_config": {
            "vocab_size": 330, "hidden_size": 128, "d_kv": 32, "d_ff": 384, "num_layers": 2, "num_heads": 4,
        },
        "vision_config": {
            "hidden_size": 128, "patch_embed_hidden_size": 192, "d_ff": 384, "d_kv": 32, "num_hidden_layers": 2,
            "num_attention_heads": 4, "seq_len": 64,
        },
    },
    "Qwen2AudioForConditionalGeneration": {
        "text_config": _QWEN2, "audio_config": _AUDIO | {"model_type": "qwen2_audio_encoder"}, "audio_token_index": 324,
    },
    "Qwen2VLForConditionalGeneration": {
        "text_config": SQUARE | {"rope_parameters": _MROPE}, "vision_config": _PATCHES, **_TOKENS,
    },
    "Qwen2_5_VLForConditionalGeneration": {
        "text_config": SQUARE | {"rope_parameters": _MROPE},
        "vision_config": _PATCHES | {"out_hidden_size": 128, "fullatt_block_indexes": [1], "window_size": 32},
        **_TOKENS,
    },
    "Qwen3VLForConditionalGeneration": {
        "text_config": TEXT | {"rope_parameters": _MROPE}, "vision_config": _DEEP, **_TOKENS,
    },
    "Qwen3VLMoeForConditionalGeneration": {
        "text_config": TEXT | MOE | {"rope_parameters": _MROPE}, "vision_config": _DEEP, **_TOKENS,
    },
    "SmolVLMForConditionalGeneration": {
        "text_config": _LLAMA, "vision_config": _VIT, "scale_factor": 2, "image_token_id": _IMAGE,
    },
    "TrOCRForCausalLM": {
        "vocab_size": 330, "d_model": 128, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 384,
        "max_position_embeddings": 96,
    },
    "ViltForQuestionAnswering": VIT | {"vocab_size": 330, "max_position_embeddings": 96},
    "VisionEncoderDecoderModel": {
        "encoder": _VIT | {"model_type": "vit"}, "decoder": {
            "model_type": "trocr", "vocab_size": 330, "d_model": 128, "decoder_layers": 2,
            "decoder_attention_heads": 4, "decoder_ffn_dim": 384, "max_position_embeddings": 96,
        },
    },
    "VoxtralForConditionalGeneration": {
        "text_config": _LLAMA, "audio_token_id": 324,
        "audio_config": {
            "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_mel_bins": 16, "max_source_positions": 32,
        },
    },
}  # fmt: skip
