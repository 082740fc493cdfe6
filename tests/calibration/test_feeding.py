"""Models that read more than text: fed by a loop, by batches and by text, which is told where it is not enough."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.needs import needs

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
needs("modelopt")

import bridge  # noqa: E402
from bridge.calibration.data import decoder_inputs  # noqa: E402
from bridge.core.errors import CalibrationError  # noqa: E402
from bridge.planning.trace import trace_structure  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402

LLAMA = Path(__file__).parent.parent.parent / "examples" / "models" / "tiny-llama"  # whose tokenizer has 1536 tokens
T5 = {"vocab_size": 1600, "d_model": 64, "d_kv": 16, "d_ff": 112, "num_layers": 2, "num_heads": 4}
BART = {
    "vocab_size": 1600, "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 112,
}  # fmt: skip
SOUND = {"num_mel_bins": 20, "max_source_positions": 40, "pad_token_id": 0, "decoder_start_token_id": 1}
SIZES = {"intermediate_size": 112, "num_hidden_layers": 1, "num_attention_heads": 4}
CLIP = {
    "text_config": SIZES | {"hidden_size": 64, "vocab_size": 1600, "max_position_embeddings": 150, "eos_token_id": 2},
    "vision_config": SIZES | {"hidden_size": 48, "image_size": 32, "patch_size": 8},
    "projection_dim": 24,
}
IDS = torch.randint(3, 1500, (2, 24), generator=torch.Generator().manual_seed(1))
PIXELS, MELS = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32), torch.ones(2, 20, 80)
READ_TEXT = {
    "BartForConditionalGeneration": (BART, {"input_ids": IDS, "decoder_input_ids": IDS[:, :9]}),
    "T5EncoderModel": (T5, {"input_ids": IDS}),
    "T5ForConditionalGeneration": (T5, {"input_ids": IDS, "decoder_input_ids": IDS[:, :9]}),
}
READ_MORE = {
    "CLIPModel": (CLIP, {"input_ids": IDS, "pixel_values": PIXELS}),
    "WhisperForConditionalGeneration": (BART | SOUND, {"input_features": MELS, "decoder_input_ids": IDS[:, :9]}),
}


@cache
def built(name: str) -> Any:
    torch.manual_seed(5)
    cls = getattr(transformers, name)
    return cls(cls.config_class(**(READ_TEXT | READ_MORE)[name][0])).eval()


def loop_of(name: str) -> Any:
    def loop(model: Any) -> None:
        with torch.no_grad():
            model(**(READ_TEXT | READ_MORE)[name][1])

    return loop


@pytest.mark.slow
@pytest.mark.parametrize("name", READ_TEXT)
def test_a_loop_calibrates_and_text_is_held_out(name: str, tmp_path: Path) -> None:
    report = bridge.convert(built(name), "hf", "fp8", tmp_path / "out", calib=loop_of(name), tokenizer=LLAMA)
    assert report.passed
    assert {each.reference for each in report.parity.outputs} == {"source", "modelopt"}


@pytest.mark.slow
@pytest.mark.parametrize("name", READ_MORE)
def test_a_loop_calibrates_what_text_alone_does_not_run(name: str, tmp_path: Path) -> None:
    report = bridge.convert(built(name), "hf", "fp8", tmp_path / "out", calib=loop_of(name), tokenizer=LLAMA)
    assert report.passed
    assert not report.parity.outputs
    (why,) = (note for note in report.parity.not_run if "outputs" in note)
    assert f"outputs were not compared: {name} cannot be run on input_ids" in why
    assert why.endswith("give batches with the inputs it needs")


@pytest.mark.slow
@pytest.mark.parametrize("name", READ_TEXT)
def test_text_calibrates_encoders_and_their_decoders(name: str) -> None:
    made = bridge.calibrate(built(name), "fp8", tokenizer=LLAMA, samples=4, sequence=40)
    assert made.held_out and ("decoder_input_ids" in made.held_out.inputs[0]) == ("Encoder" not in name)


@pytest.mark.parametrize("name", READ_MORE)
def test_text_that_is_not_enough_is_told_with_what_the_model_takes(name: str) -> None:
    with pytest.raises(CalibrationError) as raised:
        bridge.calibrate(built(name), "fp8", tokenizer=LLAMA, samples=4, sequence=40)
    assert f"{name} cannot be run on input_ids" in str(raised.value)
    assert (READ_MORE[name][1].keys() - {"input_ids", "decoder_input_ids"}).pop() in str(raised.value)


def test_batches_that_lack_an_input_are_told() -> None:
    with pytest.raises(CalibrationError, match=r"cannot be run on pixel_values \(ValueError.*forward takes input_ids"):
        bridge.calibrate(built("CLIPModel"), "fp8", [{"pixel_values": PIXELS}] * 2)


def test_a_decoder_is_given_what_it_has_to_write_one_token_late() -> None:
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    config = {"architectures": ["BartForConditionalGeneration"], "is_encoder_decoder": True}
    for more, start in (({}, 0), ({"pad_token_id": 1}, 1), ({"decoder_start_token_id": 2, "bos_token_id": 3}, 2)):
        assert decoder_inputs(ids, config | more)["decoder_input_ids"].tolist() == [[start, 5, 6], [start, 8, 9]]
    assert ids.tolist() == [[5, 6, 7], [8, 9, 10]]
    assert decoder_inputs(ids, config | {"architectures": ["T5EncoderModel"]}) == {}
    assert decoder_inputs(ids, {"architectures": ["LlamaForCausalLM"]}) == {}


def test_an_encoder_alone_is_traced_without_a_decoders_inputs() -> None:
    assert trace_structure(open_source(built("T5EncoderModel"))).ungrouped == ""
