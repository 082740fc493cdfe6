"""Keys of GGUF files: each is followed as llama.cpp follows it, or refused by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bridge
from bridge.core.errors import SourceError
from bridge.sources.opening import open_source
from bridge.targets.gguf.runtime import LlamaCpp
from tests import once
from tests.models.gguf_families import save
from tests.oracles.gguf_files import rewritten

PROMPT = [5, 17, 203, 44, 8, 91, 250, 33, 4, 76, 120, 9, 61, 14, 7, 2, 190, 66, 3, 11] * 2


def file_of(family: str) -> Path:
    def make(at: Path) -> None:
        bridge.convert(str(save(family, at / "model")), target="gguf", out=at / "gguf", verify=False)

    return once.directory(f"gguf-file-{family}", make) / "gguf" / "model.gguf"


def changed(family: str, root: Path, **keys: Any) -> Path:
    """The file of a family with other keys, `.` written as `__`; those with no dot are the architecture's."""
    architecture = {"mixtral": "llama"}.get(family, family)
    own = {name.replace("__", "."): value for name, value in keys.items()}
    prefixed = {name if name.startswith("tokenizer") else f"{architecture}.{name}": own[name] for name in own}
    return rewritten(file_of(family), root / "model.gguf", keys=prefixed)


def refusal(file: Path) -> str:
    with pytest.raises(SourceError) as caught:
        open_source(file)
    assert str(caught.value).startswith(str(file.parent))
    return str(caught.value)


FOLLOWED: dict[str, tuple[str, dict[str, Any]]] = {
    "a factor alone is linear": ("qwen3", {"rope__scaling__factor": 8.0}),
    "a factor of no scaling": ("qwen3", {"rope__scaling__type": "none", "rope__scaling__factor": 8.0}),
    "linear without a factor": ("qwen3", {"rope__scaling__type": "linear"}),
    "linear of layers without a window": ("gemma3", {"rope__scaling__factor": 8.0}),
    "no base": ("qwen3", {"rope__freq_base": None}),
    "no base of layers without a window": ("gemma3", {"rope__freq_base": None}),
    "no base of experts": ("mixtral", {"rope__freq_base": None}),
    "no part that turns": ("nemotron", {"rope__dimension_count": None}),
    "the whole head turns": ("nemotron", {"rope__dimension_count": 32}),
    "a quarter turns": ("phi3", {"rope__dimension_count": 8}),
    "a window that no layer has": ("qwen3", {"attention__sliding_window": 4}),
    "a window of zero": ("qwen3", {"attention__sliding_window": 0}),
    "experts that are not normalized": ("glm4moe", {"expert_weights_norm": False}),
    "nothing of normalized experts": ("glm4moe", {"expert_weights_norm": None}),
    "a scale of experts of zero": ("glm4moe", {"expert_weights_scale": 0.0}),
    "no scale of experts": ("deepseek2", {"expert_weights_scale": None}),
    "yarn": (
        "qwen3",
        {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 16},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", list(FOLLOWED))
def test_a_key_means_what_llama_cpp_makes_of_it(what: str, tmp_path: Path) -> None:
    family, keys = FOLLOWED[what]
    file = changed(family, tmp_path, **keys)
    wanted = LlamaCpp(file).log_probabilities(PROMPT, 300)
    with torch.no_grad():
        logits = open_source(file).load_model().eval()(torch.tensor([PROMPT])).logits[0, -1]
    ours = torch.log_softmax(logits.double(), -1).numpy()
    assert np.abs(ours - wanted).max() < 2e-3


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "two scalings": ("llama", {"rope__scaling__factor": 2.0}, "rope_parameters: scaling of the rotary embedding"),
    "a scaling of factors": ("llama", {"rope__scaling__type": "yarn"}, "rope_parameters: scaling of the rotary"),
    "kind of scaling": ("qwen3", {"rope__scaling__type": ["yarn"]}, "rope.scaling.type = ['yarn']: must be a word"),
    "factor": ("qwen3", {"rope__scaling__factor": "8"}, "rope.scaling.factor = '8': must be a number above zero"),
    "no factor": ("qwen3", {"rope__scaling__factor": 0.0}, "rope.scaling.factor = 0.0: must be a number above zero"),
    "base": ("qwen3", {"rope__freq_base": 0.0}, "qwen3.rope.freq_base = 0.0: must be a number above zero"),
    "two bases": ("llama", {"rope__freq_base": [1.0, 2.0]}, "llama.rope.freq_base = [1.0, 2.0]: must be a number"),
    "base that is no number": ("qwen3", {"rope__freq_base": float("nan")}, "rope.freq_base = nan: must be a number"),
    "base that is a truth": ("qwen3", {"rope__freq_base": False}, "rope.freq_base = False: must be a number"),
    "part that turns": ("nemotron", {"rope__dimension_count": 64}, "= 64: must be even, and at most"),
    "odd part": ("nemotron", {"rope__dimension_count": 7}, "= 7: must be even, and at most"),
    "cap": ("gemma2", {"final_logit_softcapping": 0.0}, "final_logit_softcapping = 0.0: must be a number above zero"),
    "epsilon": ("qwen3", {"attention__layer_norm_rms_epsilon": 0.0}, "epsilon = 0.0: must be a number above zero"),
    "heads": ("llama", {"attention__head_count_kv": 0}, "llama.attention.head_count_kv = 0: must be a whole number"),
    "window": ("gemma2", {"attention__sliding_window": [1, 2]}, "sliding_window = [1, 2]: must be a whole number"),
    "no window": ("gemma2", {"attention__sliding_window": 0}, "sliding_window: tokens that sliding attention sees"),
    "shares of experts": (
        "qwen3moe",
        {"expert_weights_norm": False},
        "expert_weights_norm = False, but llama.cpp's qwen3moe divides by the sum in any case",
    ),
    "shares that are a text": ("glm4moe", {"expert_weights_norm": "false"}, "norm = 'false': must be true or false"),
    "layers": ("llama", {"block_count": "3"}, "llama.block_count = '3': must be a whole number"),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_a_key_that_cannot_be_followed_is_refused(what: str, tmp_path: Path) -> None:
    family, keys, message = REFUSED[what]
    assert message in refusal(changed(family, tmp_path, **keys))


def test_llama_cpp_divides_the_shares_of_qwens_experts_in_any_case(tmp_path: Path) -> None:
    """The reason to refuse a key that says otherwise: the file and the model are not the same."""
    plain, asked = file_of("qwen3moe"), changed("qwen3moe", tmp_path, expert_weights_norm=False)
    answers = [LlamaCpp(file).log_probabilities(PROMPT, 300) for file in (plain, asked)]
    assert np.array_equal(*answers)


@pytest.mark.parametrize(
    ("factors", "message"),
    [
        (np.ones(32, np.float16), "rope_freqs.weight is float16 (32,), and should be float32 (32,), a number for each"),
        (np.ones(32, np.int32), "rope_freqs.weight is int32 (32,), and should be float32 (32,)"),
        (np.ones(16, np.float32), "rope_freqs.weight is float32 (16,), and should be float32 (32,)"),
        (np.ones((1, 32), np.float32), "rope_freqs.weight is float32 (1, 32), and should be float32 (32,)"),
        (np.ones(0, np.float32), "rope_freqs.weight is float32 (0,), and should be float32 (32,)"),
        (np.zeros(32, np.float32), "rope_freqs.weight: has numbers that are not finite and above zero"),
        (np.full(32, np.nan, np.float32), "rope_freqs.weight: has numbers that are not finite and above zero"),
        (np.full(32, 4, np.float32), "rope_parameters: scaling of the rotary embedding"),
    ],
    ids=str,
)
def test_factors_of_frequencies_are_one_float_for_each_pair(factors: np.ndarray, message: str, tmp_path: Path) -> None:
    file = rewritten(file_of("llama"), tmp_path / "model.gguf", tensors={"rope_freqs.weight": factors})
    assert message in refusal(file)


def test_a_window_that_llama_cpp_does_not_have_is_told(tmp_path: Path) -> None:
    plan = bridge.plan(changed("llama", tmp_path, attention__sliding_window=8), "hf")
    assert "llama.cpp's llama attends to every token" in plan.dropped["llama.attention.sliding_window"]
