"""Llama 3.2 Vision, whose decoder reads images by cross-attention: its graphs against transformers; the verb run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
import transformers

import bridge
from bridge.core.errors import VerifyError
from bridge.targets.onnx.files import DECODER, GENAI, VISION
from bridge.targets.onnx.run.multimodal import MASK, load_multimodal
from bridge.verification.outputs import relative_l2
from tests import once
from tests.models.crossing_family import CROSSED, IMAGE, LAYERS, TILES, save_mllama
from tests.models.seeing_family import picture
from tests.sweep import seeing

pytest.importorskip("PIL")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("graphs_once")]
TOLERANCE = 5e-6  # float32 sums in another order
TEXT = f"The value {IMAGE} of the function"
POSITIONS = TILES * 10  # nine patches and one of the class a tile


def source() -> Path:
    return once.directory("tiny-mllama", save_mllama)


def model() -> Any:
    return transformers.MllamaForConditionalGeneration.from_pretrained(source(), dtype=torch.float32)


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, 300, (2, 24), generator=generator)
    looked = seeing.seen(model(), generator)
    return {"input_ids": ids, **looked, **seeing.reading(looked, ids.shape[1])}


def converted(scheme: str | None) -> Path:
    """An output, made once a run; it must pass its own verification."""

    def make(directory: Path) -> None:
        data = [batch(seed) for seed in (1, 2)]
        report = bridge.convert(source(), "trt", scheme, directory / "out", data=data, progress=False)
        assert report.passed, report
        assert not [note for note in report.notes if "decoder.onnx" in note], "its layers are stamped"

    return once.directory(f"mllama-{scheme}", make) / "out"


def test_prompts_steps_padding_and_texts_alone_equal_transformers() -> None:
    far = seeing.distances(model(), converted(None))
    assert far.keys() == {"logits", "steps", "padded", "text"}
    assert all(error < TOLERANCE for error in far.values()), far


def test_two_images_of_a_row_and_a_row_without_one_equal_transformers() -> None:
    """The processor fills up the second row with an image of zeros, which no token reads."""
    given = batch(3)
    looked = {name: torch.cat([given[name][:1], given[name][1:]], 1) for name in ("pixel_values", "aspect_ratio_ids")}
    looked["aspect_ratio_mask"] = torch.cat([given["aspect_ratio_mask"][:1], given["aspect_ratio_mask"][1:]], 1)
    looked = {name: torch.cat([tensor, torch.zeros_like(tensor)]) for name, tensor in looked.items()}
    tokens = torch.zeros(2, 24, 2, TILES, dtype=torch.long)
    tokens[0, 3:9, 0, 0], tokens[0, 9:, 1] = 1, 1
    inputs = {"input_ids": given["input_ids"], **looked, MASK: tokens}
    with torch.no_grad():
        want = model()(**inputs).logits.numpy()
    got = load_multimodal(converted(None)).run({name: tensor.numpy() for name, tensor in inputs.items()})["logits"]
    assert relative_l2(got, want) < TOLERANCE


def test_images_without_the_mask_of_the_processor_are_refused() -> None:
    """transformers reads them as if image and text were one: position by position."""
    inputs = {name: tensor.numpy() for name, tensor in batch(4).items() if name != MASK}
    with pytest.raises(VerifyError, match="inputs cross_attention_mask are missing"):
        load_multimodal(converted(None)).run(inputs)


def test_keys_and_values_of_images_are_made_by_the_tower_alone() -> None:
    graphs = load_multimodal(converted(None))
    crossed = [f"{layer}.encoder.{kind}" for layer in CROSSED for kind in ("key", "value")]
    assert graphs.tower.outputs == [f"present.{slot}" for slot in crossed]
    given = {name for name in graphs.decoder.inputs if ".encoder." in name}
    assert given == {f"past_key_values.{slot}" for slot in crossed}
    own = [f"present.{layer}.{kind}" for layer in range(LAYERS) if layer not in CROSSED for kind in ("key", "value")]
    assert graphs.decoder.outputs == ["logits", *own]
    made = graphs.tower.run({name: tensor.numpy() for name, tensor in batch(1).items()})
    assert {array.shape for array in made.values()} == {(2, 2, POSITIONS, 8)}


def test_the_manifest_names_files_inputs_outputs_and_the_layers() -> None:
    joined = json.loads((converted(None) / GENAI).read_text())["model"]
    assert joined["decoder"]["cross_attention_layers"] == CROSSED
    for part in ("vision", "embedding", "decoder"):
        graph = onnx.load(converted(None) / joined[part]["filename"], load_external_data=False).graph
        known = {value.name for value in (*graph.input, *graph.output)}
        named = {*joined[part]["inputs"].values(), *joined[part]["outputs"].values()}
        own = {name.replace("%d", str(CROSSED[0] if ".encoder." in name else 0)) for name in named}
        assert own <= known
        assert {name for name in known if "." not in name} <= named


def test_an_engine_has_ranges_of_images_and_of_their_positions() -> None:
    lines = (converted(None) / "trtexec.txt").read_text()
    assert f"past_key_values.1.encoder.key:8x2x{4 * POSITIONS}x8" in lines
    assert f"{MASK}:1x128x1x{TILES}" not in lines and f"{MASK}:1x48x1x{TILES}" in lines


@pytest.mark.parametrize(
    ("scheme", "matrices"), [("int8_wo", ("k_proj", "v_proj")), pytest.param("fp8", (), marks=pytest.mark.product)]
)
def test_quantized_keys_of_images_are_made_in_the_graph_of_the_tower(scheme: str, matrices: tuple[str, ...]) -> None:
    """Schemes that measure inputs keep cross-attention: texts alone, with which models are traced, do not reach it."""
    read = {
        file: {
            n for node in onnx.load(converted(scheme) / file, load_external_data=False).graph.node for n in node.input
        }
        for file in (VISION, DECODER)
    }
    scales = {file: {name for name in names if name.endswith("weight_scale")} for file, names in read.items()}
    assert {name.rsplit(".", 3)[-2] for name in scales[VISION]} == set(matrices)
    assert len(scales[VISION]) == len(CROSSED) * len(matrices)
    assert all("cross_attn" in name for name in scales[VISION]) and not scales[VISION] & scales[DECODER]
    far = seeing.distances(model(), converted(scheme))
    assert 1e-4 < far["logits"] < 0.2, far


def test_run_answers_a_text_with_an_image_as_transformers_does(tmp_path: Path) -> None:
    image = picture(tmp_path / "image.png")
    processor = transformers.AutoProcessor.from_pretrained(source())
    given = processor(text=TEXT, images=[image], return_tensors="pt")
    wanted = model().generate(**given, max_new_tokens=8, do_sample=False, eos_token_id=None)
    answer = bridge.run(converted(None), TEXT, image=tmp_path / "image.png", tokens=8)
    assert list(answer.ids) == wanted[0, answer.prompt_tokens :].tolist()
    bridge.convert(source(), "hf", "none", tmp_path / "hf", verify=False, progress=False)
    assert bridge.run(tmp_path / "hf", TEXT, image=tmp_path / "image.png", tokens=8).ids == answer.ids
    other_image = picture(tmp_path / "other.png", seed=4)
    other = bridge.run(converted(None), TEXT, image=tmp_path / "other.png", tokens=8)
    assert other.ids != answer.ids, "the image makes a difference"
    two = {"text": f"{IMAGE} The {TEXT}", "images": [other_image, image]}
    wanted = model().generate(**processor(**two, return_tensors="pt"), max_new_tokens=8, eos_token_id=None)
    files = [tmp_path / "other.png", tmp_path / "image.png"]
    both = bridge.run(converted(None), two["text"], image=files, tokens=8)
    assert list(both.ids) == wanted[0, both.prompt_tokens :].tolist()
    text = processor.tokenizer("The value of the", return_tensors="pt")
    alone = bridge.run(converted(None), "The value of the", tokens=8)
    wanted = model().generate(text["input_ids"], max_new_tokens=8, do_sample=False, eos_token_id=None)
    assert list(alone.ids) == wanted[0, alone.prompt_tokens :].tolist()
