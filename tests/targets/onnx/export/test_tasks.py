"""Graphs of tasks beside text generation against transformers: every output, batches of any size, quantized ones."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers import CLIPTextConfig, PreTrainedConfig, T5Config

import bridge
from bridge.core.errors import BridgeError, UsageError
from bridge.targets.onnx.export.tasks import choose_task, model_class
from bridge.targets.onnx.run.runtime import Runtime
from bridge.targets.onnx.write.side_files import read_image_size, read_pooling
from bridge.verification.outputs import relative_l2
from tests.models.task_families import KINDS, MODELS, inputs, task_model
from tests.sweep.build import FAMILIES

TOLERANCE = 2e-5  # see test_export.py
LEAST = np.finfo(np.float32).min  # the logits of texts that are padding
once = pytest.mark.usefixtures("graphs_once")
EACH = [pytest.param(name, marks=() if name in KINDS else pytest.mark.product) for name in MODELS]
QUANTIZED = (
    "yolos", "segformer", "depth-anything", "wav2vec2", "ast", "clip", "vit-masked", "reranker", "nomic", "owlvit",
    "clipseg", "clap",
)  # fmt: skip
CODED = [
    pytest.param(name, scheme, marks=() if (name, scheme) == ("ast", "fp8") else pytest.mark.product)
    for name in QUANTIZED
    for scheme in ("fp8", "int8")
] + [pytest.param("siglip2", "fp8", marks=pytest.mark.product)]  # int8 is too coarse for it, as ModelOpt's is


def arrays(given: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in given.items()}


def convert(name: str, scheme: str, out: Path) -> Any:
    model = task_model(name)
    data = [inputs(model, 3, seed) for seed in (1, 2)]
    report = bridge.convert(model, "trt", scheme, out, data=data, progress=False)
    assert report.passed, report
    return model


@once
@pytest.mark.slow
@pytest.mark.parametrize("name", EACH)
def test_every_output_equals_transformers_in_batches_of_any_size(name: str, tmp_path: Path) -> None:
    model = convert(name, "none", tmp_path / "out")
    runtime = Runtime(tmp_path / "out")
    for rows in (1, 3):
        given = inputs(model, rows, 5)
        with torch.no_grad():
            want = model(**given)
        got = runtime.run(arrays(given))
        assert got
        for output, array in got.items():
            there = want[output].numpy()
            assert array.shape == there.shape
            real = there > LEAST
            assert ((array > LEAST) == real).all()
            assert np.abs(array - there)[real].max() < TOLERANCE * np.abs(there[real]).max(), (output, rows)
    if name == "owlv2":  # 8 texts of 3 images: transformers raises, and so does the graph
        fed = arrays(given)
        with pytest.raises(BridgeError, match="invalid index"):
            runtime.run({key: one[:8] if key in ("input_ids", "attention_mask") else one for key, one in fed.items()})


@once
@pytest.mark.slow
@pytest.mark.parametrize(("name", "scheme"), CODED)
def test_quantized_graphs_pass_their_own_comparison(name: str, scheme: str, tmp_path: Path) -> None:
    model = convert(name, scheme, tmp_path / "out")
    given = inputs(model, 3, 5)
    with torch.no_grad():
        want = model(**given)
    got = Runtime(tmp_path / "out").run(arrays(given))
    errors = [relative_l2(array, want[output].numpy()) for output, array in got.items()]
    # A vision tower beside text stays as it is unless a recipe names it: `image_embeds` of CLIP do not change.
    assert all(error < 0.5 for error in errors)
    assert errors[0] > 1e-5


def pooling_config(words: dict[str, Any], kinds: tuple[str, ...] = ("Transformer", "Pooling", "Normalize")) -> Any:
    modules = [
        {"idx": i, "path": f"{i}_{k}" if i else "", "type": f"sentence_transformers.models.{k}"}
        for i, k in enumerate(kinds)
    ]
    return {"modules.json": json.dumps(modules).encode(), "1_Pooling/config.json": json.dumps(words).encode()}


@pytest.mark.parametrize(
    ("files", "pooling", "says"),
    [
        ({}, "", ""),
        (pooling_config({"pooling_mode": "mean"}), "mean normalized", ""),
        (pooling_config({"pooling_mode_cls_token": True}, ("Transformer", "Pooling")), "cls", ""),
        (pooling_config({"pooling_mode_lasttoken": True}), "lasttoken normalized", ""),
        (pooling_config({"pooling_mode": ["cls", "mean"]}), "", "its pooling is cls, mean"),
        (pooling_config({"pooling_mode_weightedmean_tokens": True}), "", "pooling_mode_weightedmean_tokens"),
        (pooling_config({}, ("Transformer", "Pooling", "Dense")), "", "modules.json lists Pooling, Dense"),
        ({"modules.json": pooling_config({})["modules.json"]}, "", "1_Pooling/config.json is missing"),
    ],
)
def test_a_checkpoints_files_say_how_its_graph_pools(files: Any, pooling: str, says: str) -> None:
    got, why = read_pooling(files)
    assert got == pooling and (says in why if says else not why)


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        (None, None),
        ({"size": 384}, (384, 384)),
        ({"size": {"height": 512, "width": 640}}, (512, 640)),
        (
            {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 192}, "do_center_crop": True},
            (224, 192),
        ),
        ({"size": {"shortest_edge": 800, "longest_edge": 1333}}, None),
    ],
)
def test_an_image_processor_gives_the_size_of_images(settings: Any, size: Any) -> None:
    files = {} if settings is None else {"preprocessor_config.json": json.dumps(settings).encode()}
    assert read_image_size(files) == size


@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        ("HubertForSequenceClassification", "audio-classification"),
        ("BertForSequenceClassification", "sequence-classification"),
        ("MarianMTModel", "seq2seq-lm"),
        ("LlavaForConditionalGeneration", "image-text-to-text"),
        ("VoxtralForConditionalGeneration", "audio-text-to-text"),
        ("SiglipModel", "zero-shot-image-classification"),
        ("Owlv2ForObjectDetection", "zero-shot-object-detection"),
        ("DetrForObjectDetection", "object-detection"),
        ("CLIPSegForImageSegmentation", "zero-shot-image-segmentation"),
        ("ClapModel", "zero-shot-audio-classification"),
        ("VisionEncoderDecoderModel", "image-to-text"),
        ("MoonshineForConditionalGeneration", "speech-seq2seq"),
        ("BertModel", "feature-extraction"),
        ("ViltForQuestionAnswering", "visual-question-answering"),
        ("ViTMAEForPreTraining", "masked-autoencoding"),
        ("Pix2StructForConditionalGeneration", "image-to-text"),
    ],
)
def test_the_longest_ending_of_an_architecture_decides_its_task(architecture: str, task: str) -> None:
    assert choose_task(None, architecture) == task


def test_models_of_several_towers_are_refused_with_what_graphs_exist_for() -> None:
    with pytest.raises(UsageError, match=r"BlipForConditionalGeneration is of no task .*use target hf"):
        choose_task(None, "BlipForConditionalGeneration")
    with pytest.raises(UsageError, match=r"NllbMoeForConditionalGeneration has no graphs: .*experts.*target hf"):
        choose_task(None, "NllbMoeForConditionalGeneration")


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("Blip2ForConditionalGeneration", {"image_token_index": None}, "set image_token_index to the id of <image>"),
        ("Blip2ForConditionalGeneration", {"text_config": {"model_type": "t5"}}, "has an encoder of its own"),
        ("InstructBlipForConditionalGeneration", {"text_config": {"model_type": "t5"}}, "OPT or Vicuna"),
        ("Ovis2ForConditionalGeneration", {"tokenize_function": "gumbel_argmax"}, "draws random numbers"),
        ("ViltForQuestionAnswering", {"max_image_length": 7}, "set that to -1"),
        ("FunnelForMaskedLM", {}, "Python lists of one text's length"),
    ],
)
def test_a_checkpoint_whose_config_has_no_graph_is_refused_before_work(family: str, changes: Any, says: str) -> None:
    fields = copy.deepcopy(FAMILIES[family])
    if "tokenize_function" in changes:
        fields["vision_config"] |= changes
    else:
        fields |= changes
    cls = getattr(transformers, family)
    with torch.device("meta"):
        model = cls(cls.config_class(**fields))
    with pytest.raises(BridgeError, match=f"{family} has no graphs: .*{says}"):
        bridge.plan(model, "trt", "none")


@once
@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "kinds"),
    [
        ({"pooling_mode": "mean"}, ("Transformer", "Pooling", "Normalize")),
        pytest.param({"pooling_mode": "cls"}, ("Transformer", "Pooling"), marks=pytest.mark.product),
        pytest.param({"pooling_mode": "lasttoken"}, ("Transformer", "Pooling"), marks=pytest.mark.product),
        pytest.param({"pooling_mode": "max"}, ("Transformer", "Pooling"), marks=pytest.mark.product),
    ],
)
def test_the_graph_of_an_embedding_model_gives_its_vectors(words: Any, kinds: Any, tmp_path: Path) -> None:
    """Against sentence-transformers' own layers, padded on both sides."""
    pooling = pytest.importorskip("sentence_transformers.sentence_transformer.modules").Pooling
    from tests.models.trt_families import encoder

    encoder("bert").save_pretrained(tmp_path / "model")
    for name, content in pooling_config(words, kinds).items():
        (tmp_path / "model" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "model" / name).write_bytes(content)
    bridge.convert(tmp_path / "model", "trt", "none", tmp_path / "out", verify=False, progress=False)
    ids = np.random.default_rng(1).integers(3, 300, (3, 9))
    mask = np.ones_like(ids)
    mask[0, 6:], mask[1, :4] = 0, 0
    got = Runtime(tmp_path / "out").run({"input_ids": ids, "attention_mask": mask})
    features = {"token_embeddings": torch.tensor(got["last_hidden_state"]), "attention_mask": torch.tensor(mask)}
    vector = pooling(128, words["pooling_mode"])(features)["sentence_embedding"]
    want = torch.nn.functional.normalize(vector, dim=-1) if "Normalize" in kinds else vector
    np.testing.assert_allclose(got["sentence_embedding"], want.numpy(), atol=1e-5)


def test_an_encoder_decoder_without_a_head_is_refused(tmp_path: Path) -> None:
    import transformers

    config = transformers.T5Config(vocab_size=40, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    with pytest.raises(
        BridgeError, match="T5Model has an encoder and a decoder, and a graph of feature-extraction is of one"
    ):
        bridge.plan(transformers.T5Model(config), "trt", "none")


@pytest.mark.parametrize(
    ("config", "name", "task"),
    [
        (T5Config(), "T5EncoderModel", "feature-extraction"),
        (CLIPTextConfig(), "CLIPTextModelWithProjection", "feature-extraction"),
        (T5Config(), "T5ForConditionalGeneration", "seq2seq-lm"),
    ],
)
def test_the_class_that_is_built_is_that_of_the_weights(config: PreTrainedConfig, name: str, task: str) -> None:
    config.architectures = [name]
    assert choose_task(None, name) == task and model_class(config, task).__name__ == name


def test_another_models_class_is_not_built() -> None:
    config = CLIPTextConfig()
    config.architectures = ["T5EncoderModel"]
    assert model_class(config, "feature-extraction").__name__ == "CLIPTextModel"
