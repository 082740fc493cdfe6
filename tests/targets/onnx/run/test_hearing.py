"""The verb run on models that hear, against transformers' own generation: WAV files in, the same tokens out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner

import bridge
from bridge.cli.main import app
from bridge.core.errors import UsageError
from bridge.targets.onnx.run.encoder_decoder import opening
from tests import once
from tests.models.hearing_family import (
    FORBIDDEN,
    LANGUAGES,
    RATE,
    SILENT,
    START,
    TASKS,
    save_qwen2_audio,
    save_whisper,
    sound,
)
from tests.models.seeing_family import LLAMA

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("graphs_once")]
TOKENS = 8
SAVE = {"whisper": save_whisper, "qwen2-audio": save_qwen2_audio}
TEXT = "The value <|AUDIO|> of the function"


def source(family: str) -> Path:
    return once.directory(f"tiny-{family}", SAVE[family])


def converted(family: str, target: str = "trt") -> Path:
    def make(directory: Path) -> None:
        bridge.convert(source(family), target, "none", directory / "out", verify=False, progress=False)

    return once.directory(f"{family}-{target}", make) / "out"


def whisper() -> Any:
    return transformers.WhisperForConditionalGeneration.from_pretrained(source("whisper"), dtype=torch.float32).eval()


def features(samples: np.ndarray) -> torch.Tensor:
    extractor = transformers.AutoFeatureExtractor.from_pretrained(source("whisper"))
    return extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features


def transcript(samples: np.ndarray, **given: Any) -> list[int]:
    """The tokens that transformers' own `generate` writes, without those that it begins with."""
    tokens = whisper().generate(features(samples), max_new_tokens=TOKENS, **given)[0].tolist()
    return tokens[tokens.index(SILENT) + 1 :] if SILENT in tokens else tokens


def test_whisper_writes_what_it_hears_as_transformers_does(tmp_path: Path) -> None:
    found = []
    for seed in (3, 4, 5):
        samples = sound(tmp_path / "sound.wav", seed)
        answer = bridge.run(converted("whisper"), "", audio=tmp_path / "sound.wav", tokens=TOKENS)
        assert list(answer.ids) == transcript(samples)
        assert not set(FORBIDDEN) & set(answer.ids)
        found.append(answer.ids)
    assert len(set(found)) == 3, "the sound decides"


def test_a_transcript_goes_on_from_a_text_that_is_given(tmp_path: Path) -> None:
    samples, text = sound(tmp_path / "sound.wav"), "x1"
    ids = transformers.PreTrainedTokenizerFast.from_pretrained(source("whisper")).encode(text, add_special_tokens=False)
    tokens = [START, *ids]
    with torch.no_grad():
        for _ in range(TOKENS):
            logits = whisper()(features(samples), decoder_input_ids=torch.tensor([tokens]), use_cache=False).logits
            logits[..., FORBIDDEN] = -torch.inf
            tokens.append(int(logits[0, -1].argmax()))
    answer = bridge.run(converted("whisper"), text, audio=tmp_path / "sound.wav", tokens=TOKENS)
    assert list(answer.ids) == tokens[1 + len(ids) :][: len(answer.ids)] and answer.prompt_tokens == len(ids)


def test_the_command_prints_the_transcript(tmp_path: Path) -> None:
    sound(tmp_path / "sound.wav")
    command = ["run", str(converted("whisper")), "--audio", str(tmp_path / "sound.wav"), "--tokens", "4", "--json"]
    said = CliRunner().invoke(app, command)
    assert said.exit_code == 0, said.output
    assert json.loads(said.stdout)["ids"] == list(
        bridge.run(converted("whisper"), "", audio=tmp_path / "sound.wav", tokens=4).ids
    )


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({}, [START, LANGUAGES["<|de|>"], TASKS["transcribe"], SILENT]),
        ({"language": "en"}, [START, LANGUAGES["<|en|>"], TASKS["transcribe"], SILENT]),
        ({"language": "<|fr|>", "task": "translate"}, [START, LANGUAGES["<|fr|>"], TASKS["translate"], SILENT]),
        ({"task": "translate"}, [START, LANGUAGES["<|de|>"], TASKS["translate"], SILENT]),
        ({"lang_to_id": None, "task_to_id": None, "forced_decoder_ids": None}, [START, SILENT]),
        ({"forced_decoder_ids": [[1, LANGUAGES["<|en|>"]], [2, 21]]}, [START, LANGUAGES["<|en|>"], 21, SILENT]),
    ],
)
def test_a_transcript_begins_with_the_tokens_that_transformers_puts_there(settings: Any, tokens: list[int]) -> None:
    """transformers' own choice, for a model whose logits name German."""
    told = json.loads((source("whisper") / "generation_config.json").read_text()) | settings
    told = {name: value for name, value in told.items() if value is not None}
    logits = np.zeros(300, np.float32)
    logits[LANGUAGES["<|de|>"]] = 1
    assert opening(told, START, lambda: logits) == tokens
    model = whisper()
    config = transformers.GenerationConfig(**told)
    model.detect_language = lambda **_: torch.tensor([LANGUAGES["<|de|>"]])
    theirs = model._retrieve_init_tokens(
        torch.zeros(1, 16, 100), batch_size=1, generation_config=config, config=model.config, num_segment_frames=100,
        kwargs={},
    )  # fmt: skip
    assert theirs[0].tolist() == tokens


def test_qwen2_audio_answers_a_text_with_a_sound_as_transformers_does(tmp_path: Path) -> None:
    model = transformers.Qwen2AudioForConditionalGeneration.from_pretrained(source("qwen2-audio"), dtype=torch.float32)
    processor = transformers.AutoProcessor.from_pretrained(source("qwen2-audio"))
    found = []
    for seed, seconds in ((3, 0.6), (4, 1.0)):
        samples = sound(tmp_path / "sound.wav", seed, seconds)
        given = processor(text=TEXT, audio=[samples], sampling_rate=RATE, return_tensors="pt")
        wanted = model.generate(**given, max_new_tokens=TOKENS, do_sample=False, eos_token_id=None)
        answer = bridge.run(converted("qwen2-audio"), TEXT, audio=tmp_path / "sound.wav", tokens=TOKENS)
        assert answer.prompt_tokens == given["input_ids"].shape[1] > 12
        assert list(answer.ids) == wanted[0, answer.prompt_tokens :].tolist()
        found.append(answer.ids)
    assert found[0] != found[1], "the sound decides"
    chat = bridge.run(converted("qwen2-audio"), "The value", audio=tmp_path / "sound.wav", chat=True, tokens=2)
    assert chat.prompt_tokens > 20


@pytest.mark.parametrize("family", ["whisper", "qwen2-audio"])
def test_a_checkpoint_for_transformers_hears_the_same(family: str, tmp_path: Path) -> None:
    sound(tmp_path / "sound.wav")
    text = "" if family == "whisper" else TEXT
    answers = [
        bridge.run(converted(family, target), text, audio=tmp_path / "sound.wav", tokens=TOKENS)
        for target in ("trt", "hf")
    ]
    assert answers[0].ids == answers[1].ids


def test_what_cannot_be_heard_is_refused(tmp_path: Path) -> None:
    sound(tmp_path / "sound.wav")
    sound(tmp_path / "long.wav", seconds=1.5)
    with pytest.raises(UsageError, match=r"long\.wav: 1\.5 seconds, and the model hears 1 at once; cut the file"):
        bridge.run(converted("whisper"), "", audio=tmp_path / "long.wav")
    with pytest.raises(UsageError, match="the model hears one sound, and 0 were given"):
        bridge.run(converted("whisper"), "The value")
    with pytest.raises(UsageError, match=r"hears a sound, and no chat; leave out chat=True \(--chat\)"):
        bridge.run(converted("whisper"), "", audio=tmp_path / "sound.wav", chat=True)
    with pytest.raises(UsageError, match=r"Found total 0 <\|AUDIO\|> tokens(.|\n)*write <\|AUDIO\|> into the text"):
        bridge.run(converted("qwen2-audio"), "The value", audio=tmp_path / "sound.wav")
    with pytest.raises(UsageError, match="Qwen2AudioForConditionalGeneration reads no images"):
        bridge.run(converted("qwen2-audio"), "The value", image=tmp_path / "sound.wav")
    bridge.convert(LLAMA, "trt", None, tmp_path / "llama", verify=False, progress=False)
    with pytest.raises(UsageError, match=r"LlamaForCausalLM hears no sound; leave out audio \(--audio\)"):
        bridge.run(tmp_path / "llama", "The value", audio=tmp_path / "sound.wav")
