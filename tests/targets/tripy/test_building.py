"""`build` makes the module of a directory from config.json alone, and refuses in words what it has no form for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bridge.core.errors import BridgeError, PlanError, SourceError, UsageError
from bridge.targets.tripy.models.build import build
from tests.targets.tripy.models import MODELS, config

ENTRY = {
    "quant_dtype": "int8", "weight_quant_dim": 0, "layout": "out_in", "block": None, "input_scale": False,
    "pre_quant_scale": False,
}  # fmt: skip


_PARTIAL = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0, "partial_rotary_factor": 0.5}


def described(directory: Path, name: str = "gpt2", modules: dict[str, Any] | None = None, **changes: Any) -> Path:
    """A directory with nothing but the config.json that target tripy writes."""
    content = config(name).to_dict()
    copies = {"cls.predictions.decoder.bias": "cls.predictions.bias"} if content["tie_word_embeddings"] else {}
    section = {"format": 1, "dtype": "float16", "snapped": True, "modules": modules or {}, "copies": copies}
    content |= {"tripy": section} | changes
    (directory / "config.json").write_text(json.dumps(content))
    return directory


@pytest.mark.parametrize("name", MODELS)
def test_names_and_shapes_are_those_of_hugging_face(name: str, tp: Any, tmp_path: Path) -> None:
    with torch.device("meta"):
        wanted = getattr(transformers, MODELS[name][0])(config(name)).state_dict()
    if name == "bert-untied":
        del wanted["cls.predictions.bias"]  # of no use there: the decoder has its own
    turned = {key for key in wanted if key.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))}
    found = build(described(tmp_path, name)).state_dict()
    assert {key: tuple(value.shape) for key, value in found.items()} == {
        key: tuple(value.shape)[:: -1 if key in turned else 1] for key, value in wanted.items()
    }
    assert {value.dtype for value in found.values()} == {tp.float16}


def test_each_quantized_module_is_built_as_its_entry_says(tp: Any, tmp_path: Path) -> None:
    from bridge.targets.tripy.models.layers import BlockLinear, SmoothLinear

    blocks = ENTRY | {"quant_dtype": "int4", "weight_quant_dim": None, "layout": "in_out", "block": 20}
    modules = {
        "transformer.h.0.attn.c_attn": ENTRY,
        "transformer.h.0.mlp.c_fc": ENTRY | {"input_scale": True, "pre_quant_scale": True},
        "transformer.h.1.attn.c_proj": blocks | {"pre_quant_scale": True},
        "lm_head": ENTRY | {"quant_dtype": "float8", "weight_quant_dim": None, "input_scale": True},
    }
    module = build(described(tmp_path, modules=modules))
    first, second = module.transformer.h
    assert (first.attn.c_attn.quant_dtype, first.attn.c_attn.weight_quant_dim) == (tp.int8, 0)
    assert isinstance(first.mlp.c_fc, SmoothLinear) and first.mlp.c_fc.pre_quant_scale.shape == (60,)
    assert isinstance(second.attn.c_proj, BlockLinear) and second.attn.c_proj.weight_scale.shape == (3, 60)
    assert (module.lm_head.quant_dtype, module.lm_head.weight_quant_dim) == (tp.float8, None)
    assert second.attn.c_attn.quant_dtype is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["GPTNeoForCausalLM"]}, "no ready Tripy module for GPTNeoForCausalLM; known: BertFor"),
        ({"architectures": None}, "no ready Tripy module for none"),
        ({"modules": {"transformer.h.0.attn.q_proj": ENTRY}}, "lists transformer.h.0.attn.q_proj as quantized"),
        ({"add_cross_attention": True}, "add_cross_attention is true.*ready Tripy module of GPT2LMHeadModel"),
        ({"activation_function": "gelu_newer"}, "no Tripy activation for 'gelu_newer'.*nearest: gelu_new"),
        ({"per_layer_config": {"1": {"n_inner": 44}}}, "has equal layers only, not those of per_layer_config"),
        ({"is_causal": False}, "is_causal is false"),
        ({"n_head": "six"}, "config.json: transformers cannot read it"),
        ({"name": "bert", "is_decoder": True}, "is_decoder is true .whether.*of BertModel"),
        (
            {"name": "bert", "position_embedding_type": "relative_key"},
            "'relative_key': the Tripy module of BERT has absolute positions only",
        ),
        (
            {"name": "llama", "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "LlamaForCausalLM has no rope_type 'dynamic'",
        ),
        (
            {"name": "llama", "rope_parameters": _PARTIAL},
            "partial_rotary_factor 0.5: Tripy modules rotate whole heads only",
        ),
    ],
)  # fmt: skip
def test_what_has_no_form_is_refused(changes: dict[str, Any], said: str, tp: Any, tmp_path: Path) -> None:
    with pytest.raises((UsageError, PlanError, SourceError), match=said):
        build(described(tmp_path, **changes))


def section(entry: dict[str, Any]) -> str:
    said = {"format": 1, "dtype": "float16", "snapped": True, "modules": {"fc": entry}, "copies": {}}
    return json.dumps({"tripy": said})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "config.json: cannot be read: No such file.*bridge.convert"),
        ("{", "config.json: not JSON"),
        ("[]", "has no section 'tripy', so target tripy did not write it; write one with bridge.convert"),
        ('{"model_type": "gpt2"}', "has no section 'tripy'"),
        ('{"tripy": {"format": 2}}', "format 2 of section 'tripy'; this version reads 1"),
        ('{"tripy": {"format": 1, "dtype": "float8"}}', "dtype 'float8' of section 'tripy'; known: float32"),
        ('{"tripy": {"format": 1, "dtype": "float16", "modules": null}}', "lacks modules, copies or snapped"),
        ('{"tripy": {"format": 1, "dtype": "float16", "modules": [1, 2]}}', "lacks modules, copies or snapped"),
        (section({"quant_dtype": "int8"}), "tripy.modules.fc must have exactly block, input_scale, layout"),
        (section(ENTRY | {"layout": "in_out"}), "tripy.modules.fc has a layout that is not out_in, or in_out with"),
        (section(ENTRY | {"layout": "diagonal"}), "has a layout"),
        (section(ENTRY | {"weight_quant_dim": 1}), "weight_quant_dim that is neither 0 nor null"),
        (section(ENTRY | {"weight_quant_dim": -1}), "weight_quant_dim that is neither 0 nor null"),
        (section(ENTRY | {"block": "x"}), "a block that is not a whole number"),
        (section(ENTRY | {"block": 0}), "a block that is not a whole number"),
        (section(ENTRY | {"block": 128}), "Tripy has them for int4 only"),
        (section(ENTRY | {"quant_dtype": "int2"}), "unknown quant_dtype; Tripy has int8"),
        (section(ENTRY | {"quant_dtype": "int4", "input_scale": True}), "int4 is weight-only"),
        (section(ENTRY | {"input_scale": "no"}), "needs true or false for input_scale"),
    ],
)
def test_directory_of_another_kind_is_named(content: str | None, said: str, tp: Any, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(SourceError, match=said):
        build(tmp_path)


@pytest.mark.parametrize(("missing", "said"), [("nvtripy", "import of nvtripy halted"), (None, "not a 0.1.x version")])
def test_missing_or_strange_nvtripy_names_the_install_line(
    missing: str | None, said: str, tp: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described(tmp_path)
    if missing:
        monkeypatch.setitem(__import__("sys").modules, missing, None)
    else:
        monkeypatch.setattr(tp, "__version__", "0.2.0")
    with pytest.raises(BridgeError, match=f"(?s){said}.*pip install .*nvtripy.*TensorRT-Incubator/packages.html"):
        build(tmp_path)
