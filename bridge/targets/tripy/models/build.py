"""Build the ready Tripy module of a written directory."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from bridge.core.errors import PlanError, SourceError, UsageError
from bridge.core.text import fold_layers, nearest
from bridge.sources.live_models.loading import model_config
from bridge.tables.architectures.arch import load_arch
from bridge.tables.architectures.meaning import as_read, not_followed
from bridge.targets.tripy.frontend import nvtripy
from bridge.targets.tripy.section import read_section

# Architecture -> file and class of its module; relatives of Llama differ in their config only.
READY = {
    "GPT2LMHeadModel":               ("gpt2", "GPT2LMHeadModel"),
    "GPT2Model":                     ("gpt2", "GPT2Model"),
    "LlamaForCausalLM":              ("llama", "LlamaForCausalLM"),
    "LlamaModel":                    ("llama", "LlamaModel"),
    "MistralForCausalLM":            ("llama", "LlamaForCausalLM"),
    "MistralModel":                  ("llama", "LlamaModel"),
    "Qwen2ForCausalLM":              ("llama", "LlamaForCausalLM"),
    "Qwen2Model":                    ("llama", "LlamaModel"),
    "Qwen3ForCausalLM":              ("llama", "LlamaForCausalLM"),
    "Qwen3Model":                    ("llama", "LlamaModel"),
    "BertModel":                     ("bert", "BertModel"),
    "BertForMaskedLM":               ("bert", "BertForMaskedLM"),
    "BertForPreTraining":            ("bert", "BertForPreTraining"),
    "BertForNextSentencePrediction": ("bert", "BertForNextSentencePrediction"),
    "BertForSequenceClassification": ("bert", "BertForSequenceClassification"),
    "BertForTokenClassification":    ("bert", "BertForTokenClassification"),
    "BertForQuestionAnswering":      ("bert", "BertForQuestionAnswering"),
}  # fmt: skip

# File -> fields of config.json that its modules read, besides those of rows and rotary ones.
FOLLOWED = {
    "llama": ("hidden_act", "layer_types", "max_window_layers", "rms_norm_eps", "sliding_window", "use_sliding_window"),
    "gpt2": ("activation_function", "layer_norm_epsilon", "scale_attn_by_inverse_layer_idx", "scale_attn_weights"),
    "bert": ("hidden_act", "is_causal", "layer_norm_eps"),  # an encoder: every token sees all
}
ROPES = ("default", "linear", "llama3", "yarn")  # frequencies that do not depend on the length of the input
OWN = "write your own and fill it: bridge.targets.tripy.load(directory, module)"


def no_ready_module(config: Mapping[str, Any]) -> str:
    """Why `build` will refuse the output of this model, and what to do; "" if no reason is known.

    >>> no_ready_module({"architectures": ["GPT2LMHeadModel"]})
    ''
    """
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in READY:
        return f"there is no ready Tripy module for {architecture}; {OWN}"
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPES:
        return f"the ready Tripy module of {architecture} has no rope_type {kind!r}; {OWN}"
    if config.get("per_layer_config"):
        return f"the ready Tripy module of {architecture} has equal layers only, not those of per_layer_config; {OWN}"
    table = load_arch(architecture)
    assert table is not None, "every ready module has a table"
    unlike = not_followed(table, architecture, as_read(config, table), FOLLOWED[READY[architecture][0]])
    return next((f"{text}, in the ready Tripy module of {architecture}; {OWN}" for text in unlike), "")


def build(directory: str | Path) -> Any:
    """Return the `tp.Module` for an output of target tripy, with parameters not set yet.

    >>> build("tiny-gpt2-int8").lm_head.weight.shape  # doctest: +SKIP
    (1280, 128)
    """
    section, config = read_section(directory)
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in READY:
        raise UsageError(
            f"{directory}: no ready Tripy module for {architecture}; {nearest(architecture, READY)}.\n"
            "  Write the tp.Module yourself and fill it: bridge.targets.tripy.load(directory, module)"
        )
    if why := no_ready_module(config):
        raise PlanError(f"{directory}: config.json: {why}")
    try:
        settings = model_config(config)
    except Exception as error:  # transformers' config classes raise their own exceptions
        raise SourceError(f"{directory}: config.json: transformers cannot read it: {error}") from error
    nvtripy()
    from bridge.targets.tripy.models.layers import Parts

    file, name = READY[architecture]
    parts = Parts(section)
    module = getattr(import_module(f"bridge.targets.tripy.models.{file}"), name)(settings, parts)
    if parts.unclaimed:
        raise PlanError(
            f"{directory}: config.json lists {', '.join(fold_layers(parts.unclaimed))} as quantized, "
            f"but {architecture} has no such Linear"
        )
    return module
