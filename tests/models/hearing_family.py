"""A tiny Whisper and a tiny Qwen2-Audio with what makes their inputs, as checkpoints, and a sound."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import torch
import transformers

from tests.models.seeing_family import LLAMA, stir, tokenizer_with
from tests.oracles import export_oracle as oracle

RATE, BINS, POSITIONS = 16000, 16, 50  # a second, in 100 frames
START, END = 3, 2
LANGUAGES, TASKS, SILENT = (
    {"<|en|>": 10, "<|de|>": 11, "<|fr|>": 12},
    {"transcribe": 20, "translate": 21},
    299,
)  # times follow it
FORBIDDEN, AT_FIRST = [30, 31, 32], [40, END]
AUDIO = "<|AUDIO|>"
TEMPLATE = (
    "{% for message in messages %}{% for part in message['content'] %}"
    "{% if part['type'] == 'audio' %}<|AUDIO|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}"
)


def sound(file: Path, seed: int = 3, seconds: float = 0.6) -> np.ndarray:
    """Write a WAV of two tones, and return its samples from -1 to 1."""
    pitches, at = np.random.default_rng(seed).uniform(200, 3000, 2), np.arange(int(RATE * seconds)) / RATE
    whole = np.round(sum(np.sin(2 * np.pi * pitch * at) for pitch in pitches) * 8000).astype("<i2")
    with wave.open(str(file), "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(RATE)
        writer.writeframes(whole.tobytes())
    return (whole / 2**15).astype(np.float32)


def save_whisper(directory: Path) -> None:
    """Save model, tokenizer and feature extractor; the model detects one of three languages."""
    config = transformers.WhisperConfig(
        vocab_size=300, d_model=48, encoder_layers=2, decoder_layers=2, encoder_attention_heads=6,
        decoder_attention_heads=4, encoder_ffn_dim=80, decoder_ffn_dim=72, num_mel_bins=BINS,
        max_source_positions=POSITIONS, max_target_positions=40, pad_token_id=END, bos_token_id=1, eos_token_id=END,
        decoder_start_token_id=START, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # the sound decides, and no bias
            if parameter.ndim > 1:
                spread = 1 if "embed" in name else parameter.shape[-1] ** -0.5
                parameter.copy_(spread * torch.randn_like(parameter))
            elif "norm" not in name:
                parameter.copy_(0.1 * torch.randn_like(parameter))
    model.generation_config = transformers.GenerationConfig(
        decoder_start_token_id=START, eos_token_id=END, pad_token_id=END, lang_to_id=LANGUAGES, task_to_id=TASKS,
        no_timestamps_token_id=SILENT, suppress_tokens=FORBIDDEN, begin_suppress_tokens=AT_FIRST, is_multilingual=True,
        forced_decoder_ids=[[1, None], [2, TASKS["transcribe"]]], return_timestamps=False,
    )  # fmt: skip
    model.save_pretrained(directory)
    transformers.PreTrainedTokenizerFast(tokenizer_file=str(LLAMA / "tokenizer.json")).save_pretrained(directory)
    _extractor().save_pretrained(directory)


def save_qwen2_audio(directory: Path) -> None:
    """Save model and processor; its tower reads rows of several lengths."""
    tokenizer, token = tokenizer_with(AUDIO)
    config = transformers.Qwen2AudioConfig(
        text_config={
            "model_type": "qwen2", "vocab_size": token + 3, "hidden_size": 48, "intermediate_size": 80,
            "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128,
            "bos_token_id": 1, "eos_token_id": 2,
        },
        audio_config={
            "model_type": "qwen2_audio_encoder", "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4,
            "encoder_ffn_dim": 64, "num_mel_bins": BINS, "max_source_positions": POSITIONS,
        },
        audio_token_index=token, architectures=["Qwen2AudioForConditionalGeneration"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen2AudioForConditionalGeneration(config).float().eval()
    stir(model)
    oracle.save(model, directory)
    transformers.Qwen2AudioProcessor(
        _extractor(), tokenizer, chat_template=TEMPLATE, audio_token=AUDIO
    ).save_pretrained(directory)


def _extractor() -> transformers.WhisperFeatureExtractor:
    return transformers.WhisperFeatureExtractor(feature_size=BINS, chunk_length=1, hop_length=160, n_fft=400)
