"""The structure of EAGLE-3's drafts, which are checkpoints of their own.

transformers has no class of them. They read hidden states of the model that they draft for. `d2t` and `t2d` are the
tokens of its vocabulary that the draft's has; without an embedding of its own, a draft uses the model's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from bridge.core.arrays import np
from bridge.core.errors import PlanError
from bridge.core.text import fold_layers
from bridge.core.values import InputGroup, Site, Structure, TensorSpec
from bridge.planning.drafts import DRAFT, UNMEASURED, module_of
from bridge.tables.architectures.match import architecture_of

Read = Callable[[str], Any]  # name -> the array
LAYER = re.compile(r"((?:model\.)?(?:midlayer|layers\.\d+))\.(.+)\.(?:weight|weight_packed|qweight)")
# Matrix of a layer -> its role; those of a row read one input.
ROLES = (
    {"self_attn.q_proj": "attn.q.weight", "self_attn.k_proj": "attn.k.weight", "self_attn.v_proj": "attn.v.weight"},
    {"self_attn.o_proj": "attn.o.weight"},
    {"mlp.gate_proj": "mlp.gate.weight", "mlp.up_proj": "mlp.up.weight"},
    {"mlp.down_proj": "mlp.down.weight"},
)
NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


def is_eagle(config: Mapping[str, Any]) -> bool:
    """Whether the architecture is a Llama-like EAGLE-3 draft: `LlamaForCausalLMEagle3` and its other names."""
    return "Eagle3" in (name := architecture_of(config)) and "Llama" in name


def eagle_structure(config: Mapping[str, Any], specs: Mapping[str, TensorSpec], read: Read) -> Structure:
    """Return the structure of an EAGLE-3 draft; PlanError lists all that is missing, unknown or does not fit.

    read: reads a tensor; `d2t` and `t2d` are, which have a number for each token.
    """
    architecture = architecture_of(config)
    if problems := eagle_problems(config, specs, read):
        raise PlanError("\n  ".join([f"{architecture} is not a whole EAGLE-3 draft:", *problems]))
    sites, groups = [], []
    for at, layer in enumerate(_layers(specs)):
        for row in ROLES:
            for name, role in row.items():
                # vLLM's names; it numbers them on from the other model's layers, and asks for its lists before
                asked = tuple({f"model.layers.{at}.{name}"} - {f"{layer}.{name}"})
                module = f"{layer}.{name}"
                sites.append(Site(module, f"{module}.weight", "out_in", (role,), unreached=UNMEASURED, asked=asked))
            groups += [InputGroup(tuple(f"{layer}.{name}" for name in row))] if len(row) > 1 else []
    for name in specs:
        module = name.removesuffix(".weight")
        if module in ("fc", "model.fc"):  # nn.Linear in SGLang
            sites.append(Site(module, name, "out_in", keep=DRAFT, asked=tuple({"model.fc"} - {module})))
        elif module.endswith("lm_head"):
            sites.append(Site(module, name, "out_in", keep="output head"))
    embeddings = tuple(name.removesuffix(".weight") for name in specs if name.endswith("embed_tokens.weight"))
    return Structure(architecture, tuple(sites), groups=tuple(groups), order=tuple(specs), embeddings=embeddings)


def _layers(specs: Mapping[str, TensorSpec]) -> list[str]:
    return list(dict.fromkeys(match[1] for name in specs if (match := LAYER.fullmatch(name))))


def eagle_problems(config: Mapping[str, Any], specs: Mapping[str, TensorSpec], read: Read) -> list[str]:
    """What a draft lacks, and what of it does not fit; the tables of tokens are read if their shapes do."""
    problems = fold_layers(_problems(config, specs))
    return problems or list(_token_problems(config, specs, read))


def _token_problems(config: Mapping[str, Any], specs: Mapping[str, TensorSpec], read: Read) -> Iterator[str]:
    """Tables of tokens that are not of one model: vLLM and SGLang add the number of a draft's token to its `d2t`."""
    if "d2t" not in specs:
        return
    offsets, vocabulary = read("d2t").astype(np.int64), config.get("vocab_size")
    tokens = offsets + np.arange(len(offsets))
    outside = tokens[(tokens < 0) | (tokens >= vocabulary)] if isinstance(vocabulary, int) else tokens[:0]
    if outside.size:
        yield (
            f"d2t maps {outside.size} of {tokens.size} tokens outside of the model's vocabulary of {vocabulary} "
            f"(token {outside[0]}); d2t holds what is added to a token's number: get the whole checkpoint"
        )
    elif "t2d" in specs and not np.array_equal(np.flatnonzero(read("t2d")), np.unique(tokens)):
        yield "t2d marks other tokens than those that d2t maps to: the files are of two drafts"


def _problems(config: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> Iterator[str]:
    have = {f"{module_of(name)}.weight".removeprefix("model.") for name in specs}
    layers = [layer.removeprefix("model.") for layer in _layers(specs)]
    matrices = [name for row in ROLES for name in row]
    wanted = ["fc.weight", "norm.weight", "lm_head.weight"]
    wanted += [f"{layer}.{name}.weight" for layer in layers or ["midlayer"] for name in (*matrices, *NORMS)]
    for name in wanted:
        later = name.startswith("layers.") and not name.startswith("layers.0.") and name.endswith("hidden_norm.weight")
        if name not in have and not later:  # of later layers, which read no embedding
            yield f"{name} is missing; get the whole checkpoint"
    heads = [spec.shape[0] for name, spec in specs.items() if name.endswith("lm_head.weight")]
    tokens, vocabulary = heads[0] if heads else 0, config.get("vocab_size")
    d2t, t2d = specs.get("d2t"), specs.get("t2d")
    if heads and tokens != vocabulary and d2t is None:
        yield (
            f"lm_head has {tokens} tokens and the model's vocabulary {vocabulary}, but d2t, which says which they are, "
            "is missing; get the whole checkpoint"
        )
    if heads and isinstance(said := config.get("draft_vocab_size"), int) and said != tokens:
        yield f"config.json says draft_vocab_size {said}, and lm_head has {tokens} tokens: the files are of two drafts"
    if heads and d2t is not None and d2t.shape != (tokens,):
        yield f"d2t has shape {d2t.shape}, and lm_head {tokens} tokens: the files are of two drafts"
    if t2d is not None and t2d.shape != (vocabulary,):
        yield f"t2d has shape {t2d.shape}, and config.json says vocab_size {vocabulary}: the files are of two models"
