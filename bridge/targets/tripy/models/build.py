"""Builds the ready Tripy module of a written directory from its config.json alone; reads no weight."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from bridge.errors import PlanError, SourceError, UsageError, fold_layers, nearest
from bridge.sources.loading import model_config
from bridge.tripy.frontend import nvtripy
from bridge.tripy.section import read_section

# Architecture -> file and class of its module here; relatives of Llama differ by what their config says.
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


def build(directory: str | Path) -> Any:
    """Return the `tp.Module` for what target tripy wrote into `directory`, its parameters not set yet.

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
    if config.get("per_layer_config"):
        raise PlanError(f"{directory}: config.json: per_layer_config: the layers of a ready Tripy module are alike")
    try:
        settings = model_config(config)
    except Exception as error:  # transformers checks configs with classes of its own
        raise SourceError(f"{directory}: config.json: transformers cannot read it: {error}") from error
    nvtripy()
    from bridge.tripy.layers import Parts

    file, name = READY[architecture]
    parts = Parts(section)
    module = getattr(import_module(f"bridge.tripy.{file}"), name)(settings, parts)
    if parts.unclaimed:
        raise PlanError(
            f"{directory}: config.json calls {', '.join(fold_layers(parts.unclaimed))} quantized, "
            f"but {architecture} has no such Linear"
        )
    return module
