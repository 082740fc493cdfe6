"""The verb run on a model that reads an image alone, against transformers' own generation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import bridge
from bridge.core.errors import UsageError
from bridge.targets.onnx.files import GENAI
from tests import once
from tests.models.seeing_family import LLAMA, picture
from tests.models.seq2seq_families import seq2seq

pytest.importorskip("PIL")
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("graphs_once")]
START, TOKENS = 2, 8


def reader() -> Path:
    """A tiny TrOCR with its processors, as a checkpoint."""

    def make(directory: Path) -> None:
        model = seq2seq("trocr")
        head = torch.randn(model.decoder.output_projection.weight.shape)  # tokens apart from each other
        model.decoder.output_projection.weight = torch.nn.Parameter(head)
        model.config.decoder.tie_word_embeddings = False
        for layer in model.decoder.model.decoder.layers:
            layer.encoder_attn.v_proj.weight.data.mul_(20)  # and the image decides
        model.generation_config = transformers.GenerationConfig(decoder_start_token_id=START, pad_token_id=1)
        model.save_pretrained(directory)
        transformers.PreTrainedTokenizerFast(tokenizer_file=str(LLAMA / "tokenizer.json")).save_pretrained(directory)
        processor = {"image_processor_type": "ViTImageProcessor", "size": {"height": 32, "width": 32}}
        (directory / "preprocessor_config.json").write_text(json.dumps(processor))

    return once.directory("tiny-trocr", make)


def converted(target: str) -> Path:
    def make(directory: Path) -> None:
        report = bridge.convert(reader(), target, "none", directory / "out", verify=False, progress=False)
        (directory / "notes").write_text("\n".join(report.notes))

    return once.directory(f"trocr-{target}", make) / "out"


def theirs(image: Any, prompt: list[int]) -> tuple[int, ...]:
    model = transformers.VisionEncoderDecoderModel.from_pretrained(reader(), dtype=torch.float32).eval()
    pixels = transformers.AutoImageProcessor.from_pretrained(reader())(images=image, return_tensors="pt").pixel_values
    tokens = [START, *prompt]
    with torch.no_grad():
        for _ in range(TOKENS):
            logits = model(pixels, decoder_input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tuple(tokens[1 + len(prompt) :])


@pytest.mark.parametrize("target", ["trt", "hf"])
def test_an_image_is_read_with_a_prompt_and_without_one_as_transformers_reads_it(target: str, tmp_path: Path) -> None:
    image = picture(tmp_path / "image.png")
    alone = bridge.run(converted(target), "", image=tmp_path / "image.png", tokens=TOKENS)
    assert alone.ids == theirs(image, []) and alone.prompt_tokens == 0
    text = "x1"
    ids = transformers.PreTrainedTokenizerFast.from_pretrained(reader()).encode(text, add_special_tokens=False)
    answer = bridge.run(converted(target), text, image=tmp_path / "image.png", tokens=TOKENS)
    assert answer.ids == theirs(image, ids) != alone.ids
    other = bridge.run(converted(target), "", image=_other(tmp_path), tokens=TOKENS)
    assert other.ids != alone.ids, "the image decides"


def _other(directory: Path) -> Path:
    picture(directory / "other.png", seed=9)
    return directory / "other.png"


def test_what_reads_an_image_alone_takes_one_and_no_chat(tmp_path: Path) -> None:
    picture(tmp_path / "image.png")
    with pytest.raises(UsageError, match=r"reads an image, and no chat; leave out chat=True \(--chat\)"):
        bridge.run(converted("trt"), "The value", image=tmp_path / "image.png", chat=True)
    with pytest.raises(UsageError, match="the model reads one image, and 2 were given"):
        bridge.run(converted("trt"), "", image=[tmp_path / "image.png"] * 2)
    with pytest.raises(UsageError, match="the model reads one image, and 0 were given"):
        bridge.run(converted("trt"), "The value")
    with pytest.raises(UsageError, match="text is empty"):
        bridge.run(converted("trt"), "")


def test_pix2struct_reads_an_image_of_any_size_as_transformers_reads_it(tmp_path: Path) -> None:
    """The text is a prompt of the decoder, where the processor asks for no question."""
    model = seq2seq("pix2struct")
    model.generation_config = transformers.GenerationConfig(decoder_start_token_id=START, pad_token_id=1)
    model.save_pretrained(tmp_path / "model")
    words = transformers.PreTrainedTokenizerFast(tokenizer_file=str(LLAMA / "tokenizer.json"))
    words.save_pretrained(tmp_path / "model")
    processor = {"image_processor_type": "Pix2StructImageProcessor", "patch_size": {"height": 8, "width": 8}}
    file = tmp_path / "model" / "preprocessor_config.json"
    file.write_text(json.dumps(processor | {"max_patches": 15, "is_vqa": False}))
    bridge.convert(tmp_path / "model", "trt", "none", tmp_path / "out", verify=False, progress=False)
    image = picture(tmp_path / "image.png")
    given = transformers.AutoImageProcessor.from_pretrained(tmp_path / "model")(images=image, return_tensors="pt")
    assert 0 in given["attention_mask"], "some patches fill up"
    for text in ("", "x1"):
        prompt = words.encode(text, add_special_tokens=False) if text else []
        tokens = [START, *prompt]
        with torch.no_grad():
            for _ in range(TOKENS):
                logits = model(**given, decoder_input_ids=torch.tensor([tokens]), use_cache=False).logits
                tokens.append(int(logits[0, -1].argmax()))
        answer = bridge.run(tmp_path / "out", text, image=tmp_path / "image.png", tokens=TOKENS)
        assert list(answer.ids) == tokens[1 + len(prompt) :]


def test_the_manifest_says_with_which_token_the_decoder_starts() -> None:
    model = json.loads((converted("trt") / GENAI).read_text())["model"]
    assert (model["type"], model["decoder_start_token_id"]) == ("encoder-decoder", START)
    assert model["encoder"]["inputs"] == {"pixel_values": "pixel_values"}
    notes = (converted("trt").parent / "notes").read_text()
    assert "onnxruntime-genai runs no vision-encoder-decoder of these graphs: `qbridge run` reads the file" in notes
