"""EAGLE-3's drafts, which are checkpoints of their own, through target `hf`."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import bridge
from bridge.cli.check import check_path
from bridge.core.errors import PlanError, SchemeError
from bridge.targets.hf.lint import lint
from tests.models.draft_families import Tensors, write

HIDDEN, VOCABULARY, OWN = 32, 64, 48
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": VOCABULARY,
    "draft_vocab_size": OWN, "hidden_size": HIDDEN, "intermediate_size": 80, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
MATRICES = {
    "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (32, 64), "mlp.gate_proj": (80, 32), "mlp.up_proj": (80, 32), "mlp.down_proj": (32, 80),
}  # fmt: skip
NORMS = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")


def draft() -> Tensors:
    """A draft without an embedding, as the hub's for Llama 3 are."""
    generator = torch.Generator().manual_seed(0)
    shapes = {f"midlayer.{name}": shape for name, shape in MATRICES.items()}
    shapes |= {"fc": (HIDDEN, 3 * HIDDEN), "lm_head": (OWN, HIDDEN)}
    tensors = {f"{name}.weight": torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": torch.ones(HIDDEN) for name in NORMS}
    return tensors | {"d2t": torch.zeros(OWN, dtype=torch.int64), "t2d": torch.arange(VOCABULARY) < OWN}


@pytest.mark.parametrize("spelled", ["modelopt", "compressed-tensors"])
def test_a_draft_of_its_own_is_quantized_with_torchs_codes(spelled: str, tmp_path: Path) -> None:
    write(tmp_path / "draft", draft(), CONFIG)
    report = bridge.convert(tmp_path / "draft", "hf", "fp8_pc_pt", tmp_path / "out", format=spelled, progress=False)
    assert report.passed and not lint(tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    for name, weight in draft().items():
        if name.removeprefix("midlayer.").removesuffix(".weight") in MATRICES:
            codes = (weight / (weight.abs().amax(1) / 448)[:, None]).to(torch.float8_e4m3fn)
            assert torch.equal(written[name].view(torch.uint8), codes.view(torch.uint8))
        else:
            assert torch.equal(written[name], weight) and written[name].dtype == weight.dtype
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert all(any(fnmatch(name, entry) for entry in ignored) for name in ("fc", "model.fc", "lm_head"))
    asked = "model.layers.32.self_attn.qkv_proj", "model.layers.32.mlp.gate_up_proj"  # by vLLM, after 32 layers
    assert not any(fnmatch(name, entry) for name in asked for entry in ignored)


def test_a_changed_table_of_tokens_is_found(tmp_path: Path) -> None:
    write(tmp_path / "draft", draft(), CONFIG)
    bridge.convert(tmp_path / "draft", "hf", "int8_wo", tmp_path / "out", progress=False, verify=False)
    assert bridge.verify(tmp_path / "out", against=tmp_path / "draft").passed
    written = load_file(tmp_path / "out" / "model.safetensors")
    written["d2t"][-1] += 1
    written["t2d"][-17:-15] = torch.tensor([False, True])
    save_file(written, tmp_path / "out" / "model.safetensors", {"format": "pt"})
    report = bridge.verify(tmp_path / "out", against=tmp_path / "draft")
    assert not report.passed and "d2t" in str(report)


@pytest.mark.parametrize(
    ("lost", "changed", "message"),
    [
        (["d2t", "t2d"], {}, "lm_head has 48 tokens and the model's vocabulary 64, but d2t"),
        ([], {"d2t": torch.arange(40)}, r"d2t has shape \(40,\), and lm_head 48 tokens"),
        ([], {"t2d": torch.zeros(70, dtype=torch.bool)}, r"t2d has shape \(70,\), and config.json says vocab_size 64"),
        (
            [],
            {"d2t": torch.full((OWN,), 20)},
            r"d2t maps 4 of 48 tokens outside of the model's vocabulary of 64 \(token 64",
        ),
        ([], {"d2t": -torch.ones(OWN, dtype=torch.int64)}, r"d2t maps 1 of 48 tokens outside"),
        ([], {"d2t": torch.ones(OWN, dtype=torch.int64)}, r"t2d marks other tokens than those that d2t maps to"),
        (["fc.weight", "midlayer.mlp.up_proj.weight"], {}, r"fc\.weight is missing(.|\n)*mlp\.up_proj\.weight is miss"),
    ],
)
def test_a_draft_that_is_not_whole_is_refused(lost: list[str], changed: Tensors, message: str, tmp_path: Path) -> None:
    write(tmp_path / "draft", {n: t for n, t in (draft() | changed).items() if n not in lost}, CONFIG)
    with pytest.raises(PlanError, match=message):
        bridge.plan(tmp_path / "draft", "hf", "int8_wo")
    assert re.search(message, "\n".join(lint(tmp_path / "draft")))
    (problem,) = [found for found in check_path(tmp_path / "draft") if found.fatal]
    assert "error [drafts]" in problem.text and re.search(message.split("(.|")[0], problem.text)


def test_inputs_of_a_draft_of_its_own_cannot_be_measured(tmp_path: Path) -> None:
    write(tmp_path / "draft", draft(), CONFIG)
    with pytest.raises(SchemeError, match="inputs cannot be measured; use a scheme without stored scales"):
        bridge.plan(tmp_path / "draft", "hf", "fp8")


@pytest.mark.parametrize("choice", ["quantize", "drop"])
def test_a_draft_of_its_own_has_no_choice(choice: str, tmp_path: Path) -> None:
    write(tmp_path / "draft", draft(), CONFIG)
    with pytest.raises(PlanError, match=f"a draft of its own, which the scheme quantizes(.|\n)*drafts='{choice}'"):
        bridge.plan(tmp_path / "draft", "hf", "int8_wo", drafts=choice)


def test_a_count_of_tokens_that_the_head_does_not_have_is_refused(tmp_path: Path) -> None:
    write(tmp_path, draft(), CONFIG | {"draft_vocab_size": OWN - 1})
    with pytest.raises(PlanError, match=rf"draft_vocab_size {OWN - 1}, and lm_head has {OWN} tokens"):
        bridge.plan(tmp_path, "hf", "fp8_pc_pt")
