"""More graphs of models that see against transformers: LFM2-VL, BLIP-2, InstructBLIP, Janus, Ovis 2."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

import bridge
from bridge.targets.generation import Settings
from bridge.targets.onnx.files import GENAI
from bridge.targets.onnx.run.multimodal import MultiModal, MultiModalGenerator
from tests import once
from tests.models.processed_families import PROCESSORS, save
from tests.models.seeing_family import picture
from tests.sweep import seeing
from tests.sweep.build import build

pytest.importorskip("PIL")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("graphs_once")]
TOLERANCE = 2e-6  # float32 sums in another order
FAMILIES = ("Lfm2Vl", "InstructBlip", "Blip2", "Ovis2", "Janus")
EACH = [pytest.param(name, marks=() if name == "Lfm2Vl" else pytest.mark.product) for name in FAMILIES]


def converted(family: str) -> Path:
    def make(directory: Path) -> None:
        seer = build(f"{family}ForConditionalGeneration", torch.float32)
        bridge.convert(seer, "trt", None, directory / "out", verify=False, progress=False)

    return once.directory(f"{family}-trt", make) / "out"


@pytest.mark.parametrize("family", EACH)
def test_prompts_steps_padding_and_texts_alone_equal_transformers(family: str) -> None:
    far = seeing.distances(build(f"{family}ForConditionalGeneration", torch.float32), converted(family))
    assert far.keys() == {"logits", "steps", "padded", "text"}
    assert all(error < TOLERANCE for error in far.values()), far


def test_lfm2_continues_a_text_with_images_of_two_sizes_as_transformers_does() -> None:
    seer = build("Lfm2VlForConditionalGeneration", torch.float32)
    looked = seeing.seen(seer, torch.Generator().manual_seed(5))
    ids = torch.full((1, 20), 7)
    ids[0, 3:9], ids[0, 12:14] = seer.config.image_token_id, seer.config.image_token_id
    wanted = seer.generate(ids, **looked, max_new_tokens=8, do_sample=False, eos_token_id=None, pad_token_id=0)
    generator = MultiModalGenerator(MultiModal(converted("Lfm2Vl")))
    generator.look({name: tensor.numpy() for name, tensor in looked.items()})
    assert list(generator.generate(ids[0].tolist(), Settings(tokens=8))) == wanted[0, 20:].tolist()


def test_the_manifest_says_which_layers_of_lfm2_are_convolutions() -> None:
    decoder = json.loads((converted("Lfm2Vl") / GENAI).read_text())["model"]["decoder"]
    assert (decoder["num_hidden_layers"], decoder["layer_types"]) == (2, ["conv", "full_attention"])


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name == "InstructBlip" else pytest.mark.product) for name in PROCESSORS]
)
def test_run_answers_a_text_with_an_image_as_transformers_does(family: str, tmp_path: Path) -> None:
    source = once.directory(f"{family}-processed", lambda directory: save(family, directory))
    bridge.convert(source, "trt", None, tmp_path / "out", verify=False, progress=False)
    text = "The value of" if "Blip" in family else "The value <image> of"  # the processor of BLIP puts it before
    processor = transformers.AutoProcessor.from_pretrained(source)
    model = getattr(transformers, f"{family}ForConditionalGeneration").from_pretrained(source, dtype=torch.float32)
    found = []
    for seed in (3, 4):
        given = processor(text=text, images=[picture(tmp_path / "image.png", seed)], return_tensors="pt")
        wanted = model.generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=None)
        answer = bridge.run(tmp_path / "out", text, image=tmp_path / "image.png", tokens=8)
        assert answer.prompt_tokens == given["input_ids"].shape[1] > 6
        assert list(answer.ids) == wanted[0, -8:].tolist()
        found.append(answer.ids)
    assert found[0] != found[1], "the image decides"
