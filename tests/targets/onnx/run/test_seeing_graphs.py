"""Qwen3-VL and GLM-4V: features of several layers, tokens with places in three dimensions, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

import bridge
from bridge.core.errors import VerifyError
from bridge.targets.generation import Settings
from bridge.targets.onnx.files import DECODER, GENAI, VISION
from bridge.targets.onnx.run.multimodal import MultiModal, MultiModalGenerator
from tests import once
from tests.oracles import export_oracle as oracle
from tests.sweep import seeing
from tests.sweep.build import build

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("graphs_once")]
LAYERS, ROWS, TOKENS = 2, 2, 140


def converted() -> Path:
    def make(directory: Path) -> None:
        seer = build("Qwen3VLForConditionalGeneration", torch.float32)
        bridge.convert(seer, "trt", None, directory / "out", verify=False, progress=False)

    return once.directory("qwen3-vl-trt", make) / "out"


def given(tokens: int = TOKENS) -> dict[str, np.ndarray]:
    """A row an image, of transformers' names; 6 tokens an image."""
    seer = build("Qwen3VLForConditionalGeneration", torch.float32)
    looked = seeing.seen(seer, torch.Generator().manual_seed(3))
    ids = np.full((ROWS, tokens), 7)
    ids[:, 4:10] = seer.config.image_token_id
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), **{n: t.numpy() for n, t in looked.items()}}


def test_the_first_row_has_all_layers_of_features_and_few_tokens() -> None:
    model, inputs = MultiModal(converted()), given()
    feeds = model.first_row(inputs, 128)
    assert {name: array.shape for name, array in feeds[DECODER].items()} == {
        "inputs_embeds": (1, 128, 128),
        "attention_mask": (1, 128),
        "position_ids": (3, 1, 128),
        "deepstack_embeds": (LAYERS, 1, 128, 128),
    }
    assert feeds[VISION]["pixel_values"].shape == (24, 384) and feeds[VISION]["image_grid_thw"].shape == (1, 3)
    whole = model.run(inputs)["logits"]
    np.testing.assert_allclose(model.decoder.run(feeds[DECODER])["logits"], whole[:1, :128], atol=1e-5)


@pytest.mark.parametrize(
    ("tokens", "images", "said"),
    [
        ([7, 320, 7], 0, "1 image token (id 320), and what vision.onnx reads makes 0 rows"),
        ([7, *[320] * 5, 7], 1, "5 image tokens (id 320), and what vision.onnx reads makes 6 rows"),
        ([7, 320, 320, 7, *[320] * 4], 1, "fewer than 6 image tokens (id 320) from token 1 on"),
        ([7, *[320] * 6], 2, "6 image tokens (id 320), and what vision.onnx reads makes 12 rows"),
    ],
)
def test_image_tokens_that_fit_no_image_are_refused_before_anything_runs(
    tokens: list[int], images: int, said: str
) -> None:
    generator, inputs = MultiModalGenerator(MultiModal(converted())), given()
    if images:
        generator.look(
            {"pixel_values": inputs["pixel_values"][: 24 * images], "image_grid_thw": inputs["image_grid_thw"][:images]}
        )
    with pytest.raises(VerifyError, match=re.escape(said)):
        list(generator.generate(tokens, Settings(tokens=1)))


def test_the_manifest_names_all_inputs_and_outputs_of_each_graph() -> None:
    joined = json.loads((converted() / GENAI).read_text())["model"]
    for part in ("vision", "embedding", "decoder"):
        graph = onnx.load(converted() / joined[part]["filename"], load_external_data=False).graph
        named = {*joined[part]["inputs"].values(), *joined[part]["outputs"].values()}
        assert {value.name for value in (*graph.input, *graph.output) if "." not in value.name} <= named
    assert (
        "deepstack_features" in joined["embedding"]["inputs"] and "deepstack_embeds" in joined["embedding"]["outputs"]
    )


@pytest.mark.parametrize(("token", "file"), [("image_token_id", "vision.onnx"), ("audio_token_id", "speech.onnx")])
def test_the_tower_that_is_missing_is_named(token: str, file: str, tmp_path: Path) -> None:
    (tmp_path / GENAI).write_text(json.dumps({"model": {token: 3}}))
    with pytest.raises(VerifyError, match=rf"{file}: not a readable ONNX file"):
        MultiModal(tmp_path)


@pytest.mark.product
def test_glm_continues_a_text_with_images_of_two_sizes_as_transformers_does(tmp_path: Path) -> None:
    """Its table has 4 x 4 places, between which those of larger images lie."""
    seer = build("Glm4vForConditionalGeneration", torch.float32)
    bridge.convert(seer, "trt", None, tmp_path / "out", verify=False, progress=False)
    grids = torch.tensor([[1, 6, 8], [1, 2, 4]])
    patches = torch.randn(int(grids.prod(1).sum()), 384, generator=torch.Generator().manual_seed(5))
    ids = torch.full((1, 24), 7)
    ids[0, 3:15], ids[0, 17:19] = seer.config.image_token_id, seer.config.image_token_id
    looked = {"pixel_values": patches, "image_grid_thw": grids}
    kinds = (ids == seer.config.image_token_id).int()
    wanted = seer.generate(
        ids, **looked, mm_token_type_ids=kinds, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    generator = MultiModalGenerator(MultiModal(tmp_path / "out"))
    generator.look({name: tensor.numpy() for name, tensor in looked.items()})
    assert list(generator.generate(ids[0].tolist(), Settings(tokens=8))) == wanted[0, 24:].tolist()


@pytest.mark.parametrize("scheme", [pytest.param("int8_wo", marks=pytest.mark.product), "fp8"])
def test_a_quantized_qwen_passes_the_verb_verify(scheme: str, tmp_path: Path) -> None:
    """Against the checkpoint, and the model that ModelOpt quantizes with a calibration with images.

    ModelOpt's model has a scale a matrix: `own_scales`, or the codes of q, k, v and gate, up have other roundings.
    """
    seer = build("Qwen3VLForConditionalGeneration", torch.float32)
    oracle.save(seer, tmp_path / "model")

    def batch(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(5, 300, (ROWS, 24), generator=generator)
        ids[:, 4:10] = seer.config.image_token_id
        kinds = (ids == seer.config.image_token_id).int()
        tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "mm_token_type_ids": kinds}
        return tokens | seeing.seen(seer, generator)

    data = [batch(seed) for seed in (1, 2, 3)]
    calibrated = {"data": data} if scheme == "fp8" else {}
    bridge.convert(
        tmp_path / "model", "trt", scheme, tmp_path / "out", **calibrated, own_scales=True, verify=False, progress=False
    )
    report = bridge.verify(tmp_path / "out", tmp_path / "model", data=None if calibrated else data, progress=False)
    assert report.passed, report
    far = {row.reference: row.relative_l2 for row in report.parity.outputs}
    assert far.keys() == ({"source", "modelopt"} if calibrated else {"source"})
    assert 1e-3 < far["source"] < 0.1 and far.get("modelopt", 0) < far["source"] / 4, far
