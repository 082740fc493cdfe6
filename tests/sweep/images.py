"""Tiny configs of models of images and of sound."""

from __future__ import annotations

from tests.sweep.decoders import Fields

VIT: Fields = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32,
    "patch_size": 8, "num_labels": 5,
}  # fmt: skip
_SWIN: Fields = {
    "embed_dim": 128, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "image_size": 32, "patch_size": 4,
    "num_labels": 5,
}  # fmt: skip
_CONV: Fields = {
    "hidden_sizes": [32, 64, 64, 128], "depths": [1, 1, 1, 1], "num_labels": 5, "image_size": 64,
}  # fmt: skip
_RESNET: Fields = {"embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 1], "layer_type": "basic"}
_BACKBONE: Fields = {"model_type": "resnet", **_RESNET, "out_features": ["stage2"]}
_DETR: Fields = {
    "d_model": 128, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 384, "decoder_ffn_dim": 384, "num_queries": 6, "num_labels": 5,
    "use_timm_backbone": False, "backbone": None, "use_pretrained_backbone": False,
}  # fmt: skip

VISION: dict[str, Fields] = {
    "BeitForImageClassification": VIT | {"use_mask_token": False},
    "BitForImageClassification": {
        "embedding_size": 32, "hidden_sizes": [32, 64], "depths": [1, 1], "num_groups": 4, "num_labels": 5,
    },
    "ConvNextForImageClassification": _CONV,
    "ConvNextV2ForImageClassification": _CONV,
    "DPTForDepthEstimation": VIT | {
        "image_size": 32, "backbone_out_indices": [0, 1], "neck_hidden_sizes": [32, 64], "is_hybrid": False,
        "reassemble_factors": [2, 1], "fusion_hidden_size": 32, "num_hidden_layers": 2,
    },
    "DeiTForImageClassification": VIT,
    "DepthAnythingForDepthEstimation": {
        "backbone_config": {
            "model_type": "dinov2", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 28, "patch_size": 7, "out_features": ["stage1", "stage2"], "reshape_hidden_states": False,
        },
        "reassemble_hidden_size": 128, "patch_size": 7, "neck_hidden_sizes": [32, 64], "reassemble_factors": [2, 1],
        "fusion_hidden_size": 32, "head_hidden_size": 16,
    },
    "DetrForObjectDetection": _DETR | {"backbone_config": _BACKBONE},
    "Dinov2ForImageClassification": VIT,
    "Dinov2WithRegistersForImageClassification": VIT | {"num_register_tokens": 2},
    "DINOv3ConvNextModel": _CONV,
    "DINOv3ViTModel": VIT | {"num_register_tokens": 3},
    "EfficientNetForImageClassification": {
        "image_size": 64, "width_coefficient": 0.5, "depth_coefficient": 0.2, "hidden_dim": 640, "num_labels": 5,
    },
    "FocalNetForImageClassification": {
        "image_size": 32, "patch_size": 4, "embed_dim": 128, "hidden_sizes": [128, 256], "depths": [1, 1],
        "focal_levels": [2, 2], "focal_windows": [3, 3], "num_labels": 5,
    },
    "GLPNForDepthEstimation": {
        "hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 4, 4],
        "decoder_hidden_size": 32,
    },
    "HieraForImageClassification": {
        "embed_dim": 32, "image_size": [32, 32], "depths": [1, 1], "num_heads": [1, 2], "query_stride": [2, 2],
        "masked_unit_size": [4, 4], "patch_stride": [4, 4], "num_query_pool": 1, "num_labels": 5,
    },
    "IJepaForImageClassification": VIT,
    "LevitForImageClassification": {
        "image_size": 64, "hidden_sizes": [32, 64, 128], "num_attention_heads": [2, 4, 4], "depths": [1, 1, 1],
        "key_dim": [16, 16, 16], "num_labels": 5,
    },
    "Mask2FormerForUniversalSegmentation": {
        "backbone_config": {
            "model_type": "swin", "embed_dim": 32, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 4, 4], "window_size": 4,
            "image_size": 64, "out_features": ["stage1", "stage2", "stage3", "stage4"],
        },
        "hidden_dim": 128, "feature_size": 128, "mask_feature_size": 128, "encoder_layers": 1, "decoder_layers": 2,
        "num_attention_heads": 4, "dim_feedforward": 384, "encoder_feedforward_dim": 384, "num_queries": 6,
        "num_labels": 5,
    },
    "MobileNetV1ForImageClassification": {"depth_multiplier": 0.25, "image_size": 64, "num_labels": 5},
    "MobileNetV2ForImageClassification": {"depth_multiplier": 0.25, "image_size": 64, "num_labels": 5},
    "MobileViTForImageClassification": {
        "image_size": 64, "hidden_sizes": [48, 64, 96], "neck_hidden_sizes": [16, 16, 24, 32, 48, 64, 128],
        "num_labels": 5,
    },
    "PoolFormerForImageClassification": {
        "hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1], "num_labels": 5,
    },
    "PvtV2ForImageClassification": {
        "image_size": 64, "hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1],
        "num_attention_heads": [1, 2, 4, 4], "num_labels": 5,
    },
    "RTDetrForObjectDetection": {
        "backbone_config": {
            "model_type": "rt_detr_resnet", "embedding_size": 16, "hidden_sizes": [16, 32, 64, 128],
            "depths": [1, 1, 1, 1], "layer_type": "basic", "out_features": ["stage2", "stage3", "stage4"],
        },
        "encoder_hidden_dim": 128, "encoder_in_channels": [32, 64, 128], "encoder_ffn_dim": 256, "d_model": 128,
        "decoder_in_channels": [128, 128, 128], "decoder_ffn_dim": 256, "num_queries": 6, "decoder_layers": 2,
        "encoder_layers": 1, "num_labels": 5, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    },
    "RegNetForImageClassification": {
        "embedding_size": 16, "hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1], "groups_width": 8,
        "num_labels": 5,
    },
    "ResNetForImageClassification": _RESNET | {"num_labels": 5},
    "SegformerForSemanticSegmentation": {
        "hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 4, 4],
        "decoder_hidden_size": 64, "num_labels": 5,
    },
    "Siglip2ForImageClassification": {"vision_config": VIT | {"num_patches": 16}, "num_labels": 5},
    "SiglipForImageClassification": {"vision_config": VIT, "num_labels": 5},
    "SwinForImageClassification": _SWIN,
    "Swinv2ForImageClassification": _SWIN,
    "TableTransformerForObjectDetection": _DETR | {"backbone_config": _BACKBONE},
    "UperNetForSemanticSegmentation": {
        "backbone_config": {
            "model_type": "convnext", "hidden_sizes": [16, 32, 64, 128], "depths": [1, 1, 1, 1],
            "out_features": ["stage1", "stage2", "stage3", "stage4"],
        },
        "hidden_size": 64, "num_labels": 5, "auxiliary_channels": 32, "auxiliary_in_channels": 64,
        "pool_scales": [1, 2],
    },
    "ViTForImageClassification": VIT,
    "ViTMAEForPreTraining": VIT | {
        "decoder_hidden_size": 128, "decoder_intermediate_size": 256, "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": 4,
    },
    "ViTMSNForImageClassification": VIT,
    "VitPoseForPoseEstimation": {
        "backbone_config": {
            "model_type": "vitpose_backbone", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": [32, 32], "patch_size": [8, 8], "out_features": ["stage2"],
        },
        "num_labels": 5,
    },
    "YolosForObjectDetection": VIT | {"image_size": [32, 32], "num_detection_tokens": 6},
    "ZoeDepthForDepthEstimation": {
        "backbone_config": {
            "model_type": "beit", "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
            "image_size": 32, "patch_size": 8, "intermediate_size": 384, "out_features": ["stage1", "stage2"],
            "reshape_hidden_states": False, "use_relative_position_bias": True,
        },
        "neck_hidden_sizes": [32, 64], "reassemble_factors": [2, 1], "fusion_hidden_size": 64,
        "bottleneck_features": 64, "num_relative_features": 16, "patch_transformer_hidden_size": 128,
        "patch_transformer_intermediate_size": 256,
        "patch_transformer_num_attention_heads": 4, "patch_transformer_num_hidden_layers": 1,
        "backbone_hidden_size": 128,
        "bin_configurations": [{"n_bins": 8, "min_depth": 0.1, "max_depth": 10.0, "name": "nyu"}],
    },
}  # fmt: skip
_WAVE: Fields = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4,
    "conv_dim": [32, 32, 128], "conv_kernel": [10, 3, 3], "conv_stride": [5, 4, 4], "num_feat_extract_layers": 3,
    "num_conv_pos_embedding_groups": 4, "num_conv_pos_embeddings": 16, "vocab_size": 40, "pad_token_id": 0,
    "classifier_proj_size": 128, "num_labels": 5,
}  # fmt: skip
_FRAMES: Fields = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2, "num_attention_heads": 4}
SPEECH: dict[str, Fields] = {
    "ASTForAudioClassification": _FRAMES | {"num_mel_bins": 32, "max_length": 64, "patch_size": 16, "num_labels": 5},
    "ClapModel": {
        "text_config": _FRAMES | {"vocab_size": 330, "max_position_embeddings": 96},
        "audio_config": {
            "hidden_size": 128, "depths": [1, 1], "num_attention_heads": [2, 4], "patch_embeds_hidden_size": 64,
            "spec_size": 64, "num_mel_bins": 16, "window_size": 4, "projection_dim": 64, "num_hidden_layers": 2,
        },
        "projection_dim": 64,
    },
    "Data2VecAudioForCTC": _WAVE | {"num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 7},
    "HubertForCTC": _WAVE,
    "MoonshineForConditionalGeneration": {
        "vocab_size": 330, "hidden_size": 128, "intermediate_size": 384, "encoder_num_hidden_layers": 1,
        "decoder_num_hidden_layers": 2, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
        "max_position_embeddings": 96,
    },
    "ParakeetForCTC": {
        "vocab_size": 40, "pad_token_id": 0,
        "encoder_config": _FRAMES | {"num_mel_bins": 16, "subsampling_conv_channels": 16, "conv_kernel_size": 5},
    },
    "SEWForCTC": _WAVE | {"squeeze_factor": 2},
    "Speech2TextForConditionalGeneration": {
        "vocab_size": 330, "d_model": 128, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 384, "decoder_ffn_dim": 256, "input_feat_per_channel": 16,
        "input_channels": 1, "conv_channels": 64, "max_source_positions": 200, "max_target_positions": 96,
    },
    "UniSpeechForCTC": _WAVE,
    "UniSpeechSatForCTC": _WAVE,
    "Wav2Vec2BertForCTC": _FRAMES | {
        "vocab_size": 40, "pad_token_id": 0, "feature_projection_input_dim": 128, "conv_depthwise_kernel_size": 5,
    },
    "Wav2Vec2ConformerForCTC": _WAVE | {"conv_depthwise_kernel_size": 5},
    "Wav2Vec2ForCTC": _WAVE,
    "Wav2Vec2ForSequenceClassification": _WAVE,
    "WavLMForCTC": _WAVE,
    "WhisperForAudioClassification": {
        "vocab_size": 330, "d_model": 128, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 384,
        "num_mel_bins": 16, "max_source_positions": 32, "classifier_proj_size": 128, "num_labels": 5,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3,
    },
    "WhisperForConditionalGeneration": {
        "vocab_size": 330, "d_model": 128, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 384, "decoder_ffn_dim": 256, "num_mel_bins": 16,
        "max_source_positions": 32, "max_target_positions": 96, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2, "decoder_start_token_id": 3,
    },
}  # fmt: skip
