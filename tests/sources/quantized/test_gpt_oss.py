"""gpt-oss as it is published, experts in MXFP4: read as transformers dequantizes them, told apart where damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from bridge.core.errors import SchemeError, SourceError
from bridge.sources.opening import open_source

torch = pytest.importorskip("torch")

from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import GptOssConfig, GptOssForCausalLM  # noqa: E402
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # noqa: E402

from bridge.sources.live_models.loading import as_tensor  # noqa: E402

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 10, "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 23,
}  # fmt: skip
LAYER = "model.layers.1.mlp.experts."
KEEP = 'base = "int8_wo"\n[[rule]]\nmodules = ["*.experts.*"]\nquant = "none"\n'


def published(root: Path, dtype: Any = torch.bfloat16) -> dict[str, Any]:
    """Write a tiny gpt-oss with random codes and scales; returns its tensors as transformers dequantizes them."""
    torch.manual_seed(3)
    GptOssForCausalLM(GptOssConfig(**SIZES)).to(dtype).save_pretrained(root)
    tensors = load_file(root / "model.safetensors")
    want = dict(tensors)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, in_, out = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, out, in_ // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 126, (experts, out, in_ // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        want[name] = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    save_file(tensors, root / "model.safetensors", {"format": "pt"})
    config = json.loads((root / "config.json").read_text())
    del config["dtype"]  # the hub's config has none
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (root / "config.json").write_text(json.dumps(config))
    return want


def changed(root: Path, change: dict[str, Any]) -> None:
    """Replace tensors of a written checkpoint, or remove those for which None is given."""
    tensors = load_file(root / "model.safetensors") | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, root / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_experts_are_what_transformers_dequantizes(tmp_path: Path, dtype: Any) -> None:
    want = published(tmp_path / "model", dtype)
    source = open_source(tmp_path / "model")
    assert source.specs.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(as_tensor(source.read(name).copy(), source.specs[name].dtype), tensor), name
    assert "quantization_config" not in source.config


def test_every_code_under_every_scale_has_the_value_that_transformers_gives_it(tmp_path: Path) -> None:
    published(tmp_path / "model")
    name = f"{LAYER}down_proj"  # 5 experts, out 64, in 96: more blocks than scales
    codes = torch.arange(16, dtype=torch.uint8)
    blocks = (codes | codes.flip(0) << 4).expand(5, 64, 3, 16).contiguous()
    # 127 + 127 and 128: infinite and no number in transformers, too
    scales = (torch.arange(5 * 64 * 3) % 253).to(torch.uint8).reshape(5, 64, 3)
    changed(tmp_path / "model", {f"{name}_blocks": blocks, f"{name}_scales": scales})
    source = open_source(tmp_path / "model")
    ours = as_tensor(source.read(name).copy(), "bfloat16")
    assert torch.equal(ours.view(torch.int16), convert_moe_packed_tensors(blocks, scales).view(torch.int16))


@pytest.mark.parametrize("rows", [(0, 1), (2, 4), (0, 5)])
def test_rows_are_experts_of_the_whole(tmp_path: Path, rows: tuple[int, int]) -> None:
    published(tmp_path / "model")
    source = open_source(tmp_path / "model")
    out = np.empty((rows[1] - rows[0], 64, 192), np.uint16)
    assert source.read_rows(f"{LAYER}gate_up_proj", *rows, out) is out
    assert np.array_equal(out, source.read(f"{LAYER}gate_up_proj")[slice(*rows)])


def test_it_is_written_dequantized(tmp_path: Path) -> None:
    want = published(tmp_path / "model")
    report = bridge.convert(tmp_path / "model", target="hf", quant="none", out=tmp_path / "out")
    assert report.passed
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
def test_it_is_trained_on_and_comes_back_dequantized(target: str, tmp_path: Path) -> None:
    want = published(tmp_path / "model")
    assert bridge.convert(tmp_path / "model", target=target, quant="none", out=tmp_path / "native").passed
    assert bridge.convert(tmp_path / "native", target="hf", out=tmp_path / "out").passed
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


def test_its_attention_is_quantized_where_a_recipe_keeps_the_experts(tmp_path: Path) -> None:
    want = published(tmp_path / "model")
    (tmp_path / "keep.toml").write_text(KEEP)
    report = bridge.convert(tmp_path / "model", target="hf", quant=tmp_path / "keep.toml", out=tmp_path / "out")
    assert report.passed
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert got["model.layers.0.self_attn.q_proj.weight"].dtype == torch.int8
    assert torch.equal(got[f"{LAYER}gate_up_proj"], want[f"{LAYER}gate_up_proj"])


def test_codes_are_not_carried_over_and_the_message_says_what_is(tmp_path: Path) -> None:
    published(tmp_path / "model")
    with pytest.raises(SchemeError) as caught:
        bridge.plan(tmp_path / "model", target="hf")
    message = str(caught.value)
    assert "model.layers.{0..1}.mlp.experts.gate_up_proj" in message
    assert "all experts of a layer in one tensor" in message
    assert "use quant='none' (--quant none) to dequantize" in message
    assert "keep" not in message  # of codes nothing can be kept


def test_everything_that_is_damaged_is_named(tmp_path: Path) -> None:
    published(tmp_path / "model")
    first = "model.layers.0.mlp.experts."
    changed(
        tmp_path / "model",
        {
            f"{LAYER}down_proj_scales": None,
            f"{LAYER}gate_up_proj_blocks": None,
            f"{first}down_proj_blocks": torch.zeros(5, 64, 3, 8, dtype=torch.uint8),
            f"{first}gate_up_proj_scales": torch.zeros(5, 192, 3, dtype=torch.uint8),
        },
    )
    with pytest.raises(SourceError) as caught:
        open_source(tmp_path / "model")
    message = str(caught.value)
    assert f"{LAYER}down_proj_scales: missing beside {LAYER}down_proj_blocks" in message
    assert f"{LAYER}gate_up_proj_blocks: missing beside {LAYER}gate_up_proj_scales" in message
    assert f"{first}down_proj_blocks: is uint8 (5, 64, 3, 8), not uint8 (experts, out, in / 32, 16)" in message
    assert f"{first}gate_up_proj_scales: is uint8 (5, 192, 3), but" in message and "(5, 192, 2)" in message


def test_both_forms_of_one_tensor_are_refused(tmp_path: Path) -> None:
    want = published(tmp_path / "model")
    changed(tmp_path / "model", {f"{LAYER}down_proj": want[f"{LAYER}down_proj"].clone()})
    with pytest.raises(SourceError, match="which of the two to read is unclear"):
        open_source(tmp_path / "model")


def test_a_scale_that_is_no_number_is_not_written(tmp_path: Path) -> None:
    published(tmp_path / "model")
    scales = load_file(tmp_path / "model" / "model.safetensors")[f"{LAYER}down_proj_scales"].clone()
    scales[2, 3, 1] = 255
    changed(tmp_path / "model", {f"{LAYER}down_proj_scales": scales})
    with pytest.raises(SourceError, match=r"layers\.1\.mlp\.experts\.down_proj: holds NaN"):
        bridge.convert(tmp_path / "model", target="hf", quant="none", out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
