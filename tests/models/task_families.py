"""Small random models of the tasks beside text, for target `trt`; extents differ pairwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as T

from tests.models.trt_families import randomize

VOCAB = 320
_SMALL: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 1, "num_attention_heads": 4,
}  # fmt: skip
_VIT = {**_SMALL, "image_size": 32, "patch_size": 8}
_TEXT = {**_SMALL, "vocab_size": VOCAB, "max_position_embeddings": 40}
_SPEECH: dict[str, Any] = {
    **_SMALL, "vocab_size": 32, "conv_dim": [24, 24, 24], "conv_kernel": [10, 3, 3], "conv_stride": [5, 4, 4],
    "num_feat_extract_layers": 3, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
_RESNET = {
    "embedding_size": 24, "hidden_sizes": [24, 40, 56, 72], "depths": [1, 1, 1, 1], "layer_type": "basic",
    "out_features": ["stage4"],
}  # fmt: skip
_DETR: dict[str, Any] = {
    "use_timm_backbone": False, "use_pretrained_backbone": False, "backbone": None, "d_model": 128,
    "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 8, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256, "decoder_ffn_dim": 384, "num_queries": 7, "num_labels": 5,
}  # fmt: skip
_TOWERS = {
    "text_config": {**_TEXT, "projection_dim": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    "vision_config": {**_VIT, "projection_dim": 64},
}


def _resnet() -> Any:
    return T.ResNetConfig(**_RESNET)


def _dpt() -> Any:
    fields: dict[str, Any] = {
        "num_hidden_layers": 4,
        "backbone_out_indices": [0, 1, 2, 3],
        "neck_hidden_sizes": [16, 24, 40, 56],
        "fusion_hidden_size": 24,
    }
    return T.DPTForDepthEstimation(T.DPTConfig(**_VIT | fields, is_hybrid=False))


def _depth_anything() -> Any:
    backbone = T.Dinov2Config(
        **{**_VIT, "num_hidden_layers": 2}, out_features=["stage1", "stage2"], reshape_hidden_states=False
    )
    fields = {
        "reassemble_hidden_size": 128,
        "patch_size": 8,
        "neck_hidden_sizes": [16, 24],
        "reassemble_factors": [2, 1],
    }
    return T.DepthAnythingForDepthEstimation(
        T.DepthAnythingConfig(backbone_config=backbone, **fields, fusion_hidden_size=24, head_in_index=-1)
    )


def _maskformer() -> Any:
    config = T.MaskFormerConfig(
        backbone_config=T.SwinConfig(
            embed_dim=24, depths=[1, 1, 1, 1], num_heads=[2, 2, 2, 2], window_size=4, image_size=64, patch_size=2,
            out_features=["stage1", "stage2", "stage3", "stage4"],
        ),
        decoder_config=T.DetrConfig(**_DETR), fpn_feature_size=64, mask_feature_size=64, num_labels=5,
    )  # fmt: skip
    return T.MaskFormerForInstanceSegmentation(config)


def _segformer() -> Any:
    config = T.SegformerConfig(
        hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 3, 4], decoder_hidden_size=40,
        num_labels=5,
    )  # fmt: skip
    return T.SegformerForSemanticSegmentation(config)


def _rt_detr() -> Any:
    fields = {
        "encoder_in_channels": [40, 56, 72], "decoder_in_channels": [128, 128, 128], "encoder_hidden_dim": 128,
        "d_model": 128, "num_queries": 7, "encoder_layers": 1, "decoder_layers": 2, "num_labels": 5,
        "encoder_ffn_dim": 256, "decoder_ffn_dim": 384, "feat_strides": [8, 16, 32],
    }  # fmt: skip
    backbone = T.RTDetrResNetConfig(**{**_RESNET, "out_features": ["stage2", "stage3", "stage4"]})
    return T.RTDetrForObjectDetection(T.RTDetrConfig(backbone_config=backbone, **fields))


def _groupvit() -> Any:
    stages = {"depths": [1, 1], "num_group_tokens": [6, 5], "num_output_groups": [6, 5], "num_hidden_layers": 2}
    return T.GroupViTModel(T.GroupViTConfig(**_TOWERS | {"vision_config": _VIT | stages}, projection_dim=64))


def _owl(model: Any) -> Any:
    with torch.no_grad():
        model.box_head.dense2.weight.mul_(0.01)  # boxes that fill the image, or nothing of it, would hide a mistake
    return model


def _clap(fused: bool) -> Any:
    audio = {
        "hidden_size": 64, "depths": [1, 1], "num_attention_heads": [2, 4], "patch_embeds_hidden_size": 32,
        "spec_size": 32, "num_mel_bins": 16, "window_size": 4, "num_hidden_layers": 2, "enable_fusion": fused,
        "fusion_type": "aff_2d" if fused else None, "aff_block_r": 2,
    }  # fmt: skip
    return T.ClapModel(T.ClapConfig(text_config=_TEXT, audio_config=audio, projection_dim=24))


MODELS: dict[str, Callable[[], Any]] = {
    "detr": lambda: T.DetrForObjectDetection(T.DetrConfig(**_DETR, backbone_config=_resnet())),
    "yolos": lambda: T.YolosForObjectDetection(
        T.YolosConfig(**{**_VIT, "num_hidden_layers": 2, "image_size": [32, 48]}, num_detection_tokens=7, num_labels=5)
    ),
    "rt-detr": _rt_detr,
    "segformer": _segformer,
    "maskformer": _maskformer,
    "dpt": _dpt,
    "depth-anything": _depth_anything,
    "wav2vec2": lambda: T.Wav2Vec2ForCTC(
        T.Wav2Vec2Config(**_SPEECH, feat_extract_norm="layer", do_stable_layer_norm=True)
    ),
    "hubert": lambda: T.HubertForCTC(T.HubertConfig(**_SPEECH)),
    "wav2vec2-classifier": lambda: T.Wav2Vec2ForSequenceClassification(T.Wav2Vec2Config(**_SPEECH, num_labels=5)),
    "ast": lambda: T.ASTForAudioClassification(
        T.ASTConfig(**_SMALL, patch_size=8, max_length=40, num_mel_bins=24, num_labels=5)
    ),
    "clip": lambda: T.CLIPModel(T.CLIPConfig(**_TOWERS, projection_dim=64)),
    "siglip": lambda: T.SiglipModel(T.SiglipConfig(**_TOWERS)),
    "siglip2": lambda: T.Siglip2Model(
        T.Siglip2Config(text_config=_TOWERS["text_config"], vision_config={**_VIT, "num_patches": 25})
    ),
    "blip": lambda: T.BlipModel(T.BlipConfig(**_TOWERS, projection_dim=64)),
    "groupvit": _groupvit,
    "owlvit": lambda: _owl(T.OwlViTForObjectDetection(T.OwlViTConfig(**_TOWERS, projection_dim=128))),
    "owlv2": lambda: _owl(T.Owlv2ForObjectDetection(T.Owlv2Config(**_TOWERS, projection_dim=128))),
    "clipseg": lambda: T.CLIPSegForImageSegmentation(
        T.CLIPSegConfig(
            **_TOWERS, projection_dim=64, reduce_dim=40, extract_layers=[0], decoder_num_attention_heads=5,
            decoder_intermediate_size=72,
        )
    ),
    "clap": lambda: _clap(fused=False),
    "clap-fused": lambda: _clap(fused=True),
    "vit-masked": lambda: T.ViTForMaskedImageModeling(T.ViTConfig(**_VIT, encoder_stride=8)),
    "vit-mae": lambda: T.ViTMAEForPreTraining(
        T.ViTMAEConfig(
            **_VIT, decoder_hidden_size=64, decoder_intermediate_size=192, decoder_num_hidden_layers=2,
            decoder_num_attention_heads=8,
        )
    ),
    "vilt": lambda: T.ViltForQuestionAnswering(T.ViltConfig(**_VIT | _TEXT, num_labels=5)),
    "sew": lambda: T.SEWForCTC(T.SEWConfig(**_SPEECH, squeeze_factor=2)),
    "levit": lambda: T.LevitForImageClassification(
        T.LevitConfig(
            image_size=64, hidden_sizes=[32, 64, 128], num_attention_heads=[2, 4, 4], depths=[1, 1, 1],
            key_dim=[16, 16, 16], num_labels=5,
        )
    ),
    "vitpose": lambda: T.VitPoseForPoseEstimation(
        T.VitPoseConfig(
            backbone_config=T.VitPoseBackboneConfig(**{**_VIT, "image_size": [224, 224], "patch_size": [32, 32]}),
            num_labels=5,
        )
    ),
    "reranker": lambda: T.XLMRobertaForSequenceClassification(T.XLMRobertaConfig(**_TEXT, num_labels=1)),
    "nomic": lambda: T.NomicBertForMaskedLM(T.NomicBertConfig(**_TEXT)),
    "t5-encoder": lambda: T.T5EncoderModel(
        T.T5Config(vocab_size=VOCAB, d_model=128, d_kv=32, d_ff=384, num_layers=1, num_heads=4)
    ),
    "clip-text": lambda: T.CLIPTextModelWithProjection(T.CLIPTextConfig(**_TOWERS["text_config"])),
    "clip-vision": lambda: T.CLIPVisionModelWithProjection(T.CLIPVisionConfig(**_TOWERS["vision_config"])),
}  # fmt: skip
# One of each kind of call. Each layer more is a second of tracing.
KINDS = ("wav2vec2", "ast", "clip", "siglip2", "owlv2", "clipseg", "clap-fused", "vit-masked", "nomic")


def task_model(name: str, seed: int = 0) -> Any:
    """A model of a task, float32, every parameter random."""
    torch.manual_seed(seed)
    return randomize(MODELS[name]().eval(), seed, width=1.0)


def inputs(model: Any, rows: int, seed: int) -> dict[str, torch.Tensor]:
    """Random inputs of a model of this file: images, sounds, texts padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    config, name = model.config, model.main_input_name

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(rows, *shape, generator=generator)

    if name == "input_values":
        if hasattr(config, "num_mel_bins"):
            return {name: noise(config.max_length, config.num_mel_bins)}
        mask = torch.ones(rows, 3000, dtype=torch.long)
        mask[0, 2000:] = 0
        masked = {"attention_mask": mask} if config.feat_extract_norm == "layer" else {}
        return {name: noise(3000), **masked}
    given: dict[str, torch.Tensor] = {}
    if name == "input_ids" or hasattr(config, "text_config"):
        ids = torch.randint(3, VOCAB, (rows, 9), generator=generator)
        mask = torch.ones_like(ids)
        mask[0, 6:] = 0
        given = {"input_ids": ids, "attention_mask": mask}
        if getattr(config, "type_vocab_size", 0):
            given["token_type_ids"] = torch.zeros_like(ids)
    if hasattr(config, "audio_config"):
        parts, longer = (4, torch.arange(rows)[:, None] % 2 == 0) if config.audio_config.enable_fusion else (1, None)
        return given | {"input_features": noise(parts, 50, 16)} | ({} if longer is None else {"is_longer": longer})
    if "Owl" in type(model).__name__:  # three texts are asked of each image, the last of which may be padding
        given = {key: tensor.repeat_interleave(3, 0) for key, tensor in given.items()}
        given["input_ids"][1::3] -= 1
        given["input_ids"][-1] = 0
    if "Vilt" in type(model).__name__:
        mask = torch.ones(rows, 24, 48, dtype=torch.long)
        mask[0, 16:], mask[0, :, 40:] = 0, 0  # a smaller image
        return given | {"pixel_values": noise(3, 24, 48), "pixel_mask": mask}
    if given and not hasattr(config, "vision_config"):
        return given
    if "Siglip2" in type(model).__name__:
        grids = torch.tensor([[4, 6], [3, 2], [7, 3]])[:rows]
        mask = (torch.arange(24) < grids.prod(1)[:, None]).long()
        return given | {"pixel_values": noise(24, 192), "pixel_attention_mask": mask, "spatial_shapes": grids}
    size = getattr(getattr(config, "vision_config", config), "image_size", None) or 224
    height, width = (size, size) if isinstance(size, int) else size
    given["pixel_values"] = noise(3, height, width)
    patches = (height // config.patch_size) * (width // config.patch_size) if hasattr(config, "patch_size") else 0
    if "MAE" in type(model).__name__:
        given["noise"] = torch.rand(rows, patches, generator=generator)
    if type(model).__name__.endswith("MaskedImageModeling"):
        given["bool_masked_pos"] = torch.rand(rows, patches, generator=generator) < 0.4
    return given
