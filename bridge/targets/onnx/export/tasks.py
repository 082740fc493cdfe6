"""Exported heads of architectures; task and class of a config.

`trust_remote_code` is never on: only architectures inside transformers are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bridge.core.errors import UsageError
from bridge.core.text import nearest
from bridge.targets.generation import ANSWERING, HEARING, READING, SEEING, TRANSCRIBING


@dataclass(frozen=True)
class Task:
    """One exported head: the auto-mapping in transformers that lists its classes, its inputs and its outputs."""

    suffix: str | tuple[str, ...]  # of the class names of architectures that have this head
    mapping: str
    inputs: tuple[str, ...]  # inputs that the model's `forward` lacks are left out
    outputs: tuple[str, ...] = ("logits",)  # outputs that the model does not return are left out
    cached: bool = False
    pairs: tuple[str, ...] = ()  # of two towers: the axes of texts, and of images or sounds
    parts: tuple[str, ...] = ()  # graphs of one task, each in a file of its own; () for one graph


_DECODER = ("input_ids", "attention_mask", "position_ids")
_TEXT = ("input_ids", "attention_mask", "token_type_ids")
_WINDOWS = "global_attention_mask"  # of Longformer and LED; classifiers and answers have their own default
_IMAGE = ("pixel_values",)
_SOUND = ("input_values", "input_features", "attention_mask")
# Before sequence-classification: some heads over sound have its ending.
_SOUND_CLASSES = (
    "ForAudioClassification", "Wav2Vec2ForSequenceClassification", "HubertForSequenceClassification",
    "WavLMForSequenceClassification", "UniSpeechSatForSequenceClassification", "SEWForSequenceClassification",
    "Wav2Vec2BertForSequenceClassification", "Data2VecAudioForSequenceClassification",
)  # fmt: skip
_TOWERS = (
    "AlignModel", "BlipModel", "CLIPModel", "CLIPSegModel", "GroupViTModel", "MetaClip2Model", "SiglipModel",
    "Siglip2Model",
)  # fmt: skip
_ANSWER = ("start_logits", "end_logits")
_DENOISERS = ("Transformer2DModel", "Transformer3DModel", "UNet2DConditionModel")  # of diffusers
_TWO = ("encoder", "decoder")
# The first task with a suffix of the architecture is its own.
TASKS: dict[str, Task] = {
    "causal-lm": Task(("ForCausalLM", "LMHeadModel"), "MODEL_FOR_CAUSAL_LM_MAPPING", _DECODER, cached=True),
    "seq2seq-lm": Task(ANSWERING, "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", (*_DECODER, _WINDOWS), parts=_TWO),
    "speech-seq2seq": Task(TRANSCRIBING, "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", ("input_features",), parts=_TWO),
    "image-to-text": Task(READING, "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", _IMAGE, parts=_TWO),
    "image-text-to-text": Task(
        SEEING, "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", (*_DECODER, *_IMAGE), parts=("vision", "embedding", "decoder")
    ),
    "audio-text-to-text": Task(
        HEARING,
        "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING",
        (*_DECODER, "input_features", "feature_attention_mask"),
        parts=("speech", "embedding", "decoder"),
    ),
    "ctc": Task("ForCTC", "MODEL_FOR_CTC_MAPPING", _SOUND),
    "audio-classification": Task(_SOUND_CLASSES, "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING", _SOUND),
    "zero-shot-object-detection": Task(
        ("OwlViTForObjectDetection", "Owlv2ForObjectDetection"),
        "MODEL_FOR_ZERO_SHOT_OBJECT_DETECTION_MAPPING",
        (*_TEXT, *_IMAGE),
        ("logits", "pred_boxes", "objectness_logits"),
        pairs=("text_batch", "image_batch"),
    ),
    "object-detection": Task(
        "ForObjectDetection", "MODEL_FOR_OBJECT_DETECTION_MAPPING", _IMAGE, ("logits", "pred_boxes")
    ),
    "semantic-segmentation": Task("ForSemanticSegmentation", "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING", _IMAGE),
    "universal-segmentation": Task(
        ("ForInstanceSegmentation", "ForUniversalSegmentation"),
        "MODEL_FOR_UNIVERSAL_SEGMENTATION_MAPPING",
        _IMAGE,
        ("class_queries_logits", "masks_queries_logits"),
    ),
    "depth-estimation": Task("ForDepthEstimation", "MODEL_FOR_DEPTH_ESTIMATION_MAPPING", _IMAGE, ("predicted_depth",)),
    "pose-estimation": Task("ForPoseEstimation", "MODEL_FOR_POSE_ESTIMATION_MAPPING", _IMAGE, ("heatmaps",)),
    "masked-image-modeling": Task(
        "ForMaskedImageModeling",
        "MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING",
        (*_IMAGE, "bool_masked_pos"),
        ("reconstruction", "logits"),
    ),
    "zero-shot-image-classification": Task(
        _TOWERS,
        "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING",
        (*_TEXT, *_IMAGE),
        ("logits_per_image", "text_embeds", "image_embeds"),
        pairs=("text_batch", "image_batch"),
    ),
    "zero-shot-audio-classification": Task(
        "ClapModel",
        "",
        (*_TEXT, "input_features", "is_longer"),
        ("logits_per_audio", "text_embeds", "audio_embeds"),
        pairs=("text_batch", "audio_batch"),
    ),
    "zero-shot-image-segmentation": Task(
        "CLIPSegForImageSegmentation", "", (*_TEXT, *_IMAGE), pairs=("batch", "batch")
    ),
    "visual-question-answering": Task(
        "ViltForQuestionAnswering", "MODEL_FOR_VISUAL_QUESTION_ANSWERING_MAPPING", (*_TEXT, *_IMAGE, "pixel_mask")
    ),
    "masked-autoencoding": Task(
        "ViTMAEForPreTraining", "MODEL_FOR_PRETRAINING_MAPPING", (*_IMAGE, "noise"), ("logits", "mask", "ids_restore")
    ),
    "sequence-classification": Task("ForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING", _TEXT),
    "token-classification": Task(
        "ForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING", (*_TEXT, _WINDOWS)
    ),
    "question-answering": Task("ForQuestionAnswering", "MODEL_FOR_QUESTION_ANSWERING_MAPPING", _TEXT, _ANSWER),
    "masked-lm": Task("ForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING", (*_TEXT, _WINDOWS)),
    "image-classification": Task("ForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING", _IMAGE),
    "denoising": Task(_DENOISERS, "", (), ("out_sample",)),
    "feature-extraction": Task(
        ("Model", "ModelWithProjection"),
        "MODEL_MAPPING",
        (*_TEXT, _WINDOWS, *_IMAGE),
        ("text_embeds", "image_embeds", "last_hidden_state", "pooler_output"),  # transformers' order
    ),
}


# Why there are no graphs of a class that writes.
_WITHOUT = {
    "NllbMoeForConditionalGeneration": "transformers 5 runs its first two experts, whatever its router chooses",
}


def why_without(config: Mapping[str, Any]) -> str:
    """Why a checkpoint with this config.json has no graphs, though others of its class have; "" if it has."""
    kind = config.get("model_type")
    if kind == "funnel":
        return "its positions are Python lists of one text's length, and it pools no text of two tokens; use target hf"
    if kind in ("blip-2", "instructblip"):
        text = (config.get("text_config") or {}).get("model_type")
        if text in ("t5", "flan-t5"):
            return "its text model has an encoder of its own (T5); use a checkpoint with OPT or Vicuna, or target hf"
        if not isinstance(config.get("image_token_index"), int):
            return (
                "config.json does not say which token stands for an image; set image_token_index to the id of <image> "
                "in its tokenizer, as newer revisions of the checkpoint do"
            )
    if kind == "ovis2" and (config.get("vision_config") or {}).get("tokenize_function") == "gumbel_argmax":
        return "its tower draws random numbers (tokenize_function gumbel_argmax); use target hf"
    if kind == "vilt" and config.get("max_image_length", -1) > 0:
        return "it draws max_image_length of an image's patches; set that to -1 to read all of them, or use target hf"
    return ""


def choose_task(requested: str | None, architecture: str) -> str:
    """The task to export; UsageError if the checkpoint has no head for it."""
    own = next((name for name, task in TASKS.items() if architecture.endswith(task.suffix)), None)
    if requested is not None and requested not in TASKS:
        raise UsageError(f"task {requested!r} is unknown; {nearest(requested, TASKS)}")
    if requested is not None and own == "denoising" and requested != own:
        raise UsageError(f"task {requested!r}: {architecture} is a model of diffusers; leave task= (--task) out")
    if own is None and architecture in _WITHOUT:
        raise UsageError(f"{architecture} has no graphs: {_WITHOUT[architecture]}; use target hf")
    if requested is None and own is None:
        raise UsageError(
            f"{architecture} is of no task that bridge writes graphs for ({', '.join(sorted(TASKS))}); use target hf, "
            "or give task= (--task) if the checkpoint has the weights of one"
        )
    if requested is not None and own is not None and requested not in (own, "feature-extraction"):
        raise UsageError(f"task {requested!r}: a checkpoint of {architecture} has no such head; use {own}")
    return requested or own or "feature-extraction"


def model_class(config: Any, task: str) -> Any:
    """Return the transformers class to build: the named architecture if it has the task's head, else the task's own."""
    listed, name = _classes(config, TASKS[task]), (getattr(config, "architectures", None) or [""])[0]
    if named := listed.get(name) or _named(config, name, task):
        return named
    if not listed:
        have = [known for known, entry in TASKS.items() if _classes(config, entry)]
        raise UsageError(
            f"{config.model_type!r} has no {task} head in transformers; use one of: {', '.join(have) or 'none'}"
        )
    return next(iter(listed.values()))


def _named(config: Any, name: str, task: str) -> Any:
    """The class of the checkpoint's weights if transformers lists it for no task: T5EncoderModel, CLIPSeg's head."""
    import transformers

    cls = getattr(transformers, name, None) if name.endswith(TASKS[task].suffix) else None
    return cls if getattr(cls, "config_class", None) is type(config) else None


def _classes(config: Any, task: Task) -> dict[str, Any]:
    from transformers.models.auto import modeling_auto

    classes = getattr(modeling_auto, task.mapping).get(type(config), ()) if task.mapping else ()
    return {c.__name__: c for c in (classes if isinstance(classes, tuple) else (classes,))}
