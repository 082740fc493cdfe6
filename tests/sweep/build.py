"""The model of a family, and what to run it on."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import transformers

from tests.sweep.decoders import DECODERS, EXPERTS, Fields
from tests.sweep.encoders import ENCODER_DECODERS, ENCODERS
from tests.sweep.hybrids import HYBRIDS
from tests.sweep.images import SPEECH, VISION
from tests.sweep.joined import MULTIMODAL, TOWERS

KINDS: dict[str, dict[str, Fields]] = {
    "decoders": DECODERS,
    "experts": EXPERTS,
    "hybrids": HYBRIDS,
    "encoders": ENCODERS,
    "encoder-decoders": ENCODER_DECODERS,
    "vision": VISION,
    "speech": SPEECH,
    "dual towers": TOWERS,
    "multimodal": MULTIMODAL,
}
FAMILIES: dict[str, Fields] = {name: fields for kind in KINDS.values() for name, fields in kind.items()}
LENGTH = 24
CALM = 0.5  # wider ones blow the rounding of weights up to more than the gates of outputs allow
# bfloat16 does not run
FLOAT32 = ("DebertaForSequenceClassification", "NystromformerForMaskedLM", "XLNetLMHeadModel", "xLSTMForCausalLM")


def build(name: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A random model of the family; norms and biases are random, too: ones and zeros would hide a mix-up."""
    cls = getattr(transformers, name)
    torch.manual_seed(0)
    model = cls(cls.config_class(**FAMILIES[name])).to(torch.float32 if name in FLOAT32 else dtype).eval()
    model.config.architectures = [name]
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, tensor in model.named_parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            if tensor.ndim > 1:
                tensor.copy_(noise * (1 if "embed" in key else CALM) / tensor.shape[-1] ** 0.5)
            else:
                tensor.copy_(tensor.float() + 0.1 * noise)
    return model


def feeds(model: Any, seed: int = 0, rows: int = 2) -> dict[str, torch.Tensor]:
    """Inputs of one run by their names in the model's `forward`, as far as it takes them."""
    generator = torch.Generator().manual_seed(seed)
    takes, config = inspect.signature(model.forward).parameters, model.config
    given: dict[str, torch.Tensor] = {}

    def ids(length: int = LENGTH, each: int = 1) -> torch.Tensor:
        return torch.randint(5, 300, (rows * each, length), generator=generator)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn((rows, *shape), generator=generator).to(model.dtype)

    main, name = model.main_input_name, type(model).__name__
    towers = "input_ids" in takes and "pixel_values" in takes and name in DUAL
    if (
        main == "input_ids"
        or towers
        or ("input_ids" in takes and "input_features" in takes and main != "input_features")
    ):
        given["input_ids"] = ids(each=3 if name.startswith("Owl") else 1)  # texts that are asked of each image
        if name.startswith("Blip2"):
            given["input_ids"][:, : config.num_query_tokens] = config.image_token_index
        if "attention_mask" in takes:
            given["attention_mask"] = torch.ones_like(given["input_ids"])
    if "flattened_patches" in takes:
        grid = torch.stack([torch.arange(1, 17) // 4, torch.arange(1, 17) % 4], -1).expand(rows, -1, -1).float()
        patches = model.config.vision_config.patch_embed_hidden_size if hasattr(config, "vision_config") else 192
        mask = torch.ones(rows, 16, dtype=torch.long)
        mask[1:, 12:] = 0  # smaller images are filled up with zeros
        flattened = torch.cat([grid.to(model.dtype), noise(16, patches)], -1) * mask[..., None].to(model.dtype)
        return {"flattened_patches": flattened, "attention_mask": mask, "decoder_input_ids": ids()}
    if main == "pixel_values" or towers:
        vision = getattr(config, "vision_config", None) or getattr(config, "encoder", None) or config
        side = getattr(vision, "image_size", None) or getattr(
            getattr(config, "backbone_config", None), "image_size", 64
        )
        height, width = (side, side) if isinstance(side, int) else side
        if name.startswith("Siglip2"):
            grids = torch.tensor([[4, 4], [2, 5]] * rows)[:rows]
            given["pixel_values"] = noise(16, 3 * vision.patch_size**2)
            given["pixel_attention_mask"] = (torch.arange(16) < grids.prod(1)[:, None]).long()
            given["spatial_shapes"] = grids
        elif name.startswith("Vilt"):
            given["pixel_values"] = noise(3, 3 * config.patch_size, 6 * config.patch_size)
            given["pixel_mask"] = torch.ones(rows, 3 * config.patch_size, 6 * config.patch_size, dtype=torch.long)
            given["pixel_mask"][1:, 2 * config.patch_size :] = 0
            given["pixel_mask"][1:, :, 5 * config.patch_size :] = 0
        else:
            given["pixel_values"] = noise(
                *([vision.num_frames] if hasattr(vision, "num_frames") else []), 3, height, width
            )
    if "noise" in takes:  # by which ViT-MAE chooses the patches that it hides
        given["noise"] = noise((side // config.patch_size) ** 2)
    if main == "input_features" or ("input_features" in takes and "input_ids" in given and name in DUAL):
        given["input_features"] = _features(model, noise)
    if main == "input_values":
        audio = name.startswith("AST")
        given["input_values"] = noise(config.max_length, config.num_mel_bins) if audio else noise(4000)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
        given["decoder_input_ids"] = ids(12)
    if "langs" in takes and "lang_ids" not in takes:
        given.pop("attention_mask", None)
    return given


# Models that answer with the likeness of two inputs, or that need both for another reason.
DUAL = (
    "AltCLIPModel", "Blip2ForConditionalGeneration", "BlipModel", "CLIPModel", "CLIPSegForImageSegmentation",
    "ChineseCLIPModel", "ClapModel", "GroupViTModel", "MetaClip2Model", "OwlViTForObjectDetection",
    "Owlv2ForObjectDetection", "Siglip2Model", "SiglipModel", "ViltForQuestionAnswering",
)  # fmt: skip


def _features(model: Any, noise: Any) -> torch.Tensor:
    config, name = model.config, type(model).__name__
    if name == "ClapModel":
        return noise(1, 250, 16)
    if name == "ParakeetForCTC":
        return noise(64, config.encoder_config.num_mel_bins)
    if name == "Wav2Vec2BertForCTC":
        return noise(40, config.feature_projection_input_dim)
    if name == "Speech2TextForConditionalGeneration":
        return noise(64, config.input_feat_per_channel)
    return noise(config.num_mel_bins, 2 * config.max_source_positions)
