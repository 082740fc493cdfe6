"""A config with one entry changed, by target: the output computes what transformers does, or the entry is refused.

A window that llama.cpp does not have is told: the output computes the same for prompts as long as the window.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import bridge
from bridge.tables.architectures.meaning import PARTIAL
from bridge.tables.dialects.dialect import load_dialect
from bridge.targets.onnx.run.runtime import Runtime
from bridge.targets.tasks import listed
from bridge.targets.tripy.models.build import READY
from tests import once
from tests.covering import grid, usual
from tests.models.changed_configs import changed, changes, rewrite, switches, table_of
from tests.models.gguf_families import FAMILIES, OTHERS, save
from tests.oracles.llama_cpp import log_probabilities

FLOAT, GELU = 1e-4, 0.004  # nats; see tests/targets/gguf/test_llama_cpp.py
WINDOW = 8  # what tests.models.changed_configs gives for none
LENGTHS = (WINDOW, 17, 60)
NAMES = {family: name for family, (name, _) in (FAMILIES | OTHERS).items()}
EVERY = sorted({change for name in NAMES.values() for change in changes(name)})


def has(family: str, change: str) -> bool:
    return change in changes(NAMES[family])


def layers(family: str, change: str) -> int:
    return int((FAMILIES | OTHERS)[family][1].get("num_hidden_layers", 3))


def base(family: str) -> Path:
    """The family's model as it is; nothing may change it."""
    return once.directory(f"meaning-{family}", functools.partial(save, family))


def make(family: str, change: str, directory: Path) -> None:
    """Save the family's model with the changed config."""
    name = NAMES[family]
    entries = changed(name, json.loads((base(family) / "config.json").read_text()), change)
    save(family, directory, **{field: value for field, value in entries.items() if field in switches(table_of(name))})
    rewrite(directory, entries)


def prompts() -> list[list[int]]:
    """Which begin differently: of an equal beginning llama.cpp keeps what it computed without the rest."""
    rng = np.random.default_rng(0)
    return [rng.integers(3, 300, length).tolist() for length in LENGTHS]


def theirs(directory: Path, family: str) -> list[np.ndarray]:
    """Log probabilities after each prompt; eager attention alone caps scores."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager" if family == "gemma2" else "sdpa"
    ).eval()
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0, -1].double() for prompt in prompts()]
    return [torch.log_softmax(row, -1).numpy() for row in logits]


def convert(directory: Path, target: str, out: Path, change: str) -> bridge.Report | None:
    """The report, or None if the change is refused by its name and nothing is written."""
    try:
        return bridge.convert(directory, target, out=out, verify=False)
    except bridge.BridgeError as error:
        assert ("rope_type" if change.startswith("rope:") else change) in str(error), error
        assert not out.exists()
        return None


@grid({"family": list(FAMILIES), "change": EVERY}, valid=has, cost=layers)
def test_llama_cpp_computes_a_changed_config_or_it_is_refused(family: str, change: str, tmp_path: Path) -> None:
    make(family, change, tmp_path / "source")
    try:
        expected = theirs(tmp_path / "source", family)
    except Exception as error:  # its own class refuses the config, so nobody says what it should be
        assert "validat" in repr(error).lower(), error
        return
    report = convert(tmp_path / "source", "gguf", tmp_path / "out", change)
    if not report:
        return
    ours = log_probabilities(tmp_path / "out" / "model.gguf", prompts(), 300)
    told = any(f"a window of {WINDOW};" in note for note in report.notes)
    close = GELU if family.startswith(("gemma", "gpt2", "starcoder")) else FLOAT
    for mine, wanted in list(zip(ours, expected, strict=True))[: 1 if told else None]:
        np.testing.assert_allclose(mine, wanted, atol=close, rtol=0)


FUSED = [family for family, name in NAMES.items() if name in listed("ort", "classes")]
KEPT = [("llama", "is_causal"), ("llama", "rope:both"), ("llama", "rope:partial")]
# Gemma's classes see later tokens only where no mask is given: with one, as graphs have, they are causal.
TWO_ANSWERS = ("use_bidirectional_attention",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "change"),
    usual(KEPT, [(f, change) for f in FUSED for change in changes(NAMES[f]) if change not in TWO_ANSWERS]),
)
def test_onnx_runtime_computes_a_changed_config_or_it_is_refused(family: str, change: str, tmp_path: Path) -> None:
    """The graphs of target trt come from the model's class, or from a template; those of ort have fused attention."""
    make(family, change, tmp_path / "source")
    try:
        expected = theirs(tmp_path / "source", family)
    except Exception as error:  # its own class refuses the config
        assert "validat" in repr(error).lower(), error
        return
    for target in ("trt", "ort"):
        try:
            bridge.convert(tmp_path / "source", target, out=tmp_path / target, verify=False)
        except bridge.BridgeError as error:
            assert (target, change) == ("ort", "is_causal"), error
            assert change in str(error)
            continue
        runtime = Runtime(tmp_path / target)
        for prompt, wanted in zip(prompts(), expected, strict=True):
            logits = torch.tensor(runtime.run({"input_ids": np.array([prompt])})["logits"][0, -1]).double()
            np.testing.assert_allclose(torch.log_softmax(logits, -1).numpy(), wanted, atol=FLOAT, rtol=0)


# Change -> the entry of TensorRT-LLM's config.json that says it. No program here reads it: what its classes read is in
# tensorrt_llm/models/*/config.py; transformers is asked what rotary entries mean.
SAYS = {
    "activation_function": "hidden_act", "attention_bias": "attn_bias", "attention_multiplier": "attention_multiplier",
    "embedding_multiplier": "embedding_multiplier", "hidden_act": "hidden_act", "layer_norm_epsilon": "norm_epsilon",
    "logits_scaling": "output_multiplier_scale", "mlp_bias": "mlp_bias", "norm_eps": "norm_epsilon",
    "norm_epsilon": "norm_epsilon", "num_experts_per_tok": "moe",
    "residual_multiplier": "residual_multiplier", "rms_norm_eps": "norm_epsilon", "use_bias": "bias",
}  # fmt: skip
AS_IT_IS = ("hidden_act", "norm_epsilon", "embedding_multiplier", "residual_multiplier")
ELSEWHERE = ("sliding_window", "tie_word_embeddings")  # a note has the window, the tensors the head
GPT = ("gpt2", "starcoder2", "nemotron")  # their class has one `bias`
WRITTEN = [family for family, name in NAMES.items() if name in load_dialect("trtllm").architectures]


@grid({"family": WRITTEN, "change": EVERY}, valid=has, cost=layers)
def test_the_config_of_tensorrt_llm_says_a_changed_one_or_it_is_refused(
    family: str, change: str, tmp_path: Path
) -> None:
    make(family, change, tmp_path / "source")
    report = convert(tmp_path / "source", "trtllm", tmp_path / "out", change)
    if not report:
        return
    plain = once.directory(f"meaning-{family}-trtllm", functools.partial(_converted, family))
    before, after = (json.loads((path / "config.json").read_text()) for path in (plain / "out", tmp_path / "out"))
    differ = {key for key in {*before, *after} if before.get(key) != after.get(key)} - {"bias"}
    given = transformers.AutoConfig.from_pretrained(tmp_path / "source")
    if change.startswith("rope:") or change == PARTIAL:  # beside rope_parameters the field alone is not read
        rope = given.rope_parameters
        share = rope.get(PARTIAL, 1.0) if PARTIAL in table_of(NAMES[family]).computes else 1.0
        assert (after["rotary_base"], after["rotary_pct"]) == (rope["rope_theta"], share)
        scaling = after.get("rotary_scaling") or {}
        assert scaling.get("rope_type", scaling.get("type", "default")) == rope["rope_type"]
        assert scaling.get("factor") == rope.get("factor")
        assert differ or change == PARTIAL
    elif change in ELSEWHERE:
        assert not differ - {"share_embedding_table"}
        told = any(f"a window of {WINDOW}:" in note for note in report.notes)
        assert told or change != "sliding_window" or not getattr(given, "sliding_window", None)
    elif change in ("attention_bias", "use_bias") and family in GPT:
        assert before["bias"] != after["bias"] and not differ
    else:
        assert differ == {SAYS[change]}
        if SAYS[change] in AS_IT_IS:
            assert after[SAYS[change]] == getattr(given, change)


# What must be planned: entries that the class ignores, for every target, and those that a target expresses.
TABLED = ("gguf", "megatron", "ort", "torchtitan", "tripy", "trtllm")
IGNORED: dict[str, Any] = {
    "attention_dropout": 0.5, "initializer_range": 9.0, "max_window_layers": 1, "partial_rotary_factor": 0.5,
    "pretraining_tp": 2, "sliding_window": 8, "training_run": {"steps": 7}, "unsloth_version": "1", "use_cache": False,
}  # fmt: skip
EXPRESSED: list[tuple[str, str, str, Any]] = [
    ("gguf", "mistral", "is_causal", False),
    ("gguf", "gemma", "use_bidirectional_attention", True),
    ("megatron", "mistral", "hidden_act", "gelu"),
    ("megatron", "mistral", "hidden_act", "relu"),
    ("megatron", "mistral", "sliding_window", 8),
    ("megatron", "mixtral", "num_experts_per_tok", 3),
    ("torchtitan", "qwen3", "rms_norm_eps", 0.1),
    ("torchtitan", "qwen3moe", "norm_topk_prob", False),
    ("tripy", "mistral", "sliding_window", 8),
    ("tripy", "qwen3", "hidden_act", "relu"),
    ("tripy", "gpt2", "scale_attn_by_inverse_layer_idx", True),
    ("trtllm", "granitemoe", "residual_multiplier", 0.3),
    ("trtllm", "mistral", "sliding_window", 8),
    *((target, "qwen3", "rope_theta", 77.0) for target in TABLED),
    *((target, "qwen3", field, value) for target in TABLED for field, value in IGNORED.items()),
]


@pytest.mark.parametrize(("target", "family", "field", "value"), EXPRESSED)
def test_what_has_no_effect_or_can_be_expressed_is_not_refused(
    target: str, family: str, field: str, value: Any
) -> None:
    given = {field: value} | ({"rope_parameters": None} if field == "rope_theta" else {})
    whole = json.loads((base(family) / "config.json").read_text()) | given
    plan = bridge.plan(base(family), target, config=whole)
    assert not any("no ready Tripy module" in note or "ready Tripy module of" in note for note in plan.notes)


@pytest.mark.parametrize("target", TABLED)
def test_a_class_with_configs_of_parts_is_refused_by_its_name(target: str) -> None:
    """So no entry of text_config can be lost; a class with parts needs a list of their fields first."""
    own = set(READY) if target == "tripy" else set(listed("ort", "classes")) if target == "ort" else None
    classes = own or set(load_dialect(target).architectures)
    assert not [name for name in classes if getattr(transformers, name).config_class.sub_configs]


@pytest.mark.parametrize("target", TABLED)
def test_a_model_that_sees_is_refused_by_the_name_of_its_class(target: str, tmp_path: Path) -> None:
    text = {"vocab_size": 320, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 1, "head_dim": 12,
            "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_activation": "silu"}  # fmt: skip
    sight = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2,
             "image_size": 28, "patch_size": 14}  # fmt: skip
    config = transformers.Gemma3Config(text_config=text, vision_config=sight, mm_tokens_per_image=4)
    transformers.Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    if target == "tripy":
        (note,) = [note for note in bridge.plan(tmp_path, target).notes if "Gemma3ForConditionalGeneration" in note]
        assert note.startswith("there is no ready Tripy module for")
        return
    with pytest.raises(bridge.BridgeError, match=r"(?s)Gemma3ForConditionalGeneration.*target.*(hf|trt)"):
        bridge.plan(tmp_path, target)


def _converted(family: str, directory: Path) -> None:
    bridge.convert(base(family), "trtllm", out=directory / "out", verify=False)
