"""Tiny models that see of several families, with their processors, as checkpoints."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as T

from tests.models.seeing_family import stir, tokenizer_with
from tests.oracles import export_oracle as oracle
from tests.sweep.build import FAMILIES

SIDE = {"height": 32, "width": 32}
QUERIES, PATCHES = 4, 16  # tokens of an image
AROUND = ["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]


def save(family: str, directory: Path) -> None:
    """Save model and processor of the family, by the name before `ForConditionalGeneration`."""
    tokenizer, token = tokenizer_with("<IMG_ATOM>" if family == "Ovis2" else "<image>")
    name = f"{family}ForConditionalGeneration"
    cls, fields = getattr(T, name), copy.deepcopy(FAMILIES[name])
    fields |= {"image_token_id" if "image_token_id" in fields else "image_token_index": token}
    processor = PROCESSORS[family](tokenizer)
    size, apart = {"vocab_size": len(tokenizer)}, {"tie_word_embeddings": False}
    for part in ("text_config", "qformer_config"):
        fields |= {part: fields[part] | size | apart} if part in fields else {}
    fields |= apart | (size if "vocab_size" in fields else {})
    if family == "Ovis2":
        fields["visual_indicator_token_ids"] = tokenizer.convert_tokens_to_ids(AROUND)
    torch.manual_seed(0)
    model = cls(cls.config_class(**fields, architectures=[name])).float().eval()
    stir(model)
    oracle.save(model, directory)
    processor.save_pretrained(directory)


def _ovis(tokenizer: Any) -> Any:
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<image>", *AROUND]}, replace_extra_special_tokens=False
    )
    images = T.Ovis2ImageProcessorPil(size=SIDE, crop_to_patches=True, max_patches=4)
    return T.Ovis2Processor(images, tokenizer, image_seq_length=PATCHES)


def _janus(tokenizer: Any) -> Any:
    named = {"image_token": "<image>", "boi_token": "<s>", "eoi_token": "</s>"}
    words = T.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, extra_special_tokens=named)
    return T.JanusProcessor(T.JanusImageProcessorPil(size=SIDE), words, num_image_tokens=PATCHES)


def _blip(tokenizer: Any) -> Any:
    return T.Blip2Processor(T.BlipImageProcessorPil(size=SIDE), tokenizer, QUERIES)


def _instruct(tokenizer: Any) -> Any:
    return T.InstructBlipProcessor(T.BlipImageProcessorPil(size=SIDE), tokenizer, copy.deepcopy(tokenizer), QUERIES)


PROCESSORS: dict[str, Callable[[Any], Any]] = {
    "Blip2": _blip, "InstructBlip": _instruct, "Janus": _janus, "Ovis2": _ovis,
}  # fmt: skip
