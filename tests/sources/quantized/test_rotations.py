"""Rotations of a `transform_config`: undone as compressed-tensors applies them, carried with codes, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import bridge
from bridge.core.errors import BridgeError, PlanError, SourceError
from bridge.sources.opening import open_source

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
compressed = pytest.importorskip("compressed_tensors.transform")

from safetensors.torch import load_file, save_file  # noqa: E402

WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
FOUR = ("input", "weight_input", "output", "weight_output")


def applied(
    locations: tuple[str, ...] = FOUR, targets: str = "Linear", ignore: str = "lm_head"
) -> list[dict[str, Any]]:
    return [
        {"targets": [targets], "ignore": [ignore], "location": at, "inverse": number % 2 == 1}
        for number, at in enumerate(locations)
    ]


def groups(kind: str, **more: Any) -> dict[str, Any]:
    """One group of a transform_config."""
    return {"config_groups": {"v": {"type": kind, "apply": applied(), **more}}}


def rotated(root: Path, config: dict[str, Any] | None, stored: bool = True, bias: bool = True) -> Any:
    """Write a tiny Llama with INT8 codes under `config`; returns the model that compressed-tensors rotated, with hooks.

    stored: whether matrices are among the tensors, as `save_pretrained` writes them.
    """
    torch.manual_seed(3)
    made = transformers.LlamaConfig(vocab_size=96, num_hidden_layers=1, attention_bias=bias, **SIZES)
    model = transformers.LlamaForCausalLM(made).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    if config:
        compressed.apply_transform_config(model, compressed.TransformConfig(**config))
    tensors: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        if "_proj.v_" in name:
            tensors |= {name: tensor.clone()} if stored else {}
        elif "_proj" in module and name.endswith(".weight"):
            scale = tensor.abs().amax(1, keepdim=True) / 127
            tensors[name] = torch.round(tensor / scale).to(torch.int8)
            tensors[f"{module}.weight_scale"] = scale.detach()
            model.get_submodule(module).weight.data = tensors[name] * scale
        else:
            tensors[name] = tensor.clone()
    root.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, root / "model.safetensors")
    section = {
        "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}}, "ignore": ["lm_head"],
        "transform_config": config or {},
    }  # fmt: skip
    whole = json.loads(made.to_json_string()) | {"architectures": ["LlamaForCausalLM"], "quantization_config": section}
    (root / "config.json").write_text(json.dumps({**whole, "dtype": "float32"}))
    return model


def changed(root: Path, **entries: Any) -> Path:
    """The checkpoint with other entries in its quantization_config."""
    config = json.loads((root / "config.json").read_text())
    config["quantization_config"] |= entries
    (root / "config.json").write_text(json.dumps(config))
    return root


@pytest.mark.parametrize(
    ("kind", "more", "stored"),
    [
        ("hadamard", {}, False),
        ("hadamard", {"head_dim": 16}, False),
        ("hadamard", {"randomize": True}, True),
        ("random-hadamard", {"head_dim": 16}, True),
        ("random-matrix", {}, True),
    ],
)
def test_decoded_weights_compute_what_compressed_tensors_computes_with_its_hooks(
    kind: str, more: dict[str, Any], stored: bool, tmp_path: Path
) -> None:
    model = rotated(tmp_path / "model", groups(kind, **more), stored)
    source = open_source(tmp_path / "model")
    assert not [name for name in source.specs if "v_input" in name or "v_output" in name]
    for module in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"):
        name = f"model.layers.0.{module}"
        linear = model.get_submodule(name)
        weight = torch.from_numpy(source.read(f"{name}.weight").copy())
        part = torch.from_numpy(source.read_rows(f"{name}.weight", 5, 23).copy())
        bias = torch.from_numpy(source.read(f"{name}.bias").copy()) if linear.bias is not None else None
        inputs = torch.randn(7, linear.in_features)
        with torch.no_grad():
            want = linear(inputs)
        assert torch.allclose(torch.nn.functional.linear(inputs, weight, bias), want, rtol=1e-4, atol=1e-4), name
        assert torch.equal(part, weight[5:23]), name


def test_rotations_are_written_with_copied_codes_and_undone_without(tmp_path: Path) -> None:
    rotated(tmp_path / "model", groups("hadamard"), stored=False)
    before = json.loads((tmp_path / "model/config.json").read_text())["quantization_config"]["transform_config"]
    plan = bridge.plan(tmp_path / "model", "hf", format="compressed-tensors")
    assert any("carried as it is" in note and "transform_config" in note for note in plan.notes)
    report = bridge.convert(tmp_path / "model", "hf", out=tmp_path / "copy", format="compressed-tensors")
    assert report.passed
    written = json.loads((tmp_path / "copy/config.json").read_text())["quantization_config"]
    assert written["transform_config"] == before
    codes = "model.layers.0.mlp.up_proj.weight"
    assert bridge.verify(tmp_path / "copy", against=tmp_path / "model").passed
    assert bridge.convert(tmp_path / "model", "hf", "none", tmp_path / "plain").passed
    plain = load_file(tmp_path / "plain/model.safetensors")[codes].numpy()
    assert (plain == open_source(tmp_path / "copy").read(codes)).all()


def test_a_target_that_cannot_say_rotations_does_not_copy_codes(tmp_path: Path) -> None:
    rotated(tmp_path / "model", groups("hadamard"), stored=False)
    with pytest.raises(
        PlanError, match=r"target hf cannot say transform_config of compressed-tensors; take .*use quant='none'"
    ):
        bridge.plan(tmp_path / "model", "hf")
    rotated(tmp_path / "stored", groups("random-hadamard"))
    with pytest.raises(PlanError, match=r"matrices of transform_config are not copied; use quant='none'"):
        bridge.plan(tmp_path / "stored", "hf", format="compressed-tensors")


@pytest.mark.parametrize(
    ("group", "why"),
    [
        ({"type": "hadamard", "apply": applied(("q_attn",), "LlamaAttention")}, "rotates 'q_attn', which is no input"),
        ({"type": "hadamard", "apply": applied(("output",), "Embedding")}, "rotates what Embedding reads or gives"),
        ({"type": "hadamard", "apply": applied(), "head_dim": 24}, "head_dim 24 does not divide 64"),
        (
            {"type": "hadamard", "apply": applied(), "randomize": True},
            "its order is random, and the checkpoint does not",
        ),
        ({"type": "random-matrix", "apply": applied()}, "its matrix is a random-matrix, and the checkpoint does not"),
        ({"type": "butterfly", "apply": applied()}, "type 'butterfly' is not known; known: hadamard"),
        ({"type": "hadamard", "apply": applied(), "angle": 3}, "angle is not known here"),
        ({"type": "hadamard", "apply": applied(("input",)) * 2}, "its input is rotated twice"),
        (
            {"type": "hadamard", "apply": applied(("input",), "re:.*embed_tokens")},
            "embed_tokens reads or gives, which may",
        ),
    ],
)
def test_what_is_not_undone_is_refused_by_name_where_weights_are_decoded(
    group: dict[str, Any], why: str, tmp_path: Path
) -> None:
    rotated(tmp_path / "model", None)
    root = changed(tmp_path / "model", transform_config={"config_groups": {"v": group}})
    with pytest.raises(BridgeError, match=why):
        bridge.plan(root, "hf", "none")
    source = open_source(root)
    with pytest.raises(SourceError, match=why):
        source.read("model.layers.0.mlp.up_proj.weight")
    assert (
        bridge.plan(root, "hf", format="compressed-tensors").carried["transform_config"]["config_groups"]["v"] == group
    )


def test_an_unknown_entry_beside_the_groups_of_rotations_is_refused_too(tmp_path: Path) -> None:
    rotated(tmp_path / "model", None)
    root = changed(tmp_path / "model", transform_config={"config_groups": {}, "order": "last"})
    with pytest.raises(BridgeError, match="transform_config: order is not known here"):
        bridge.plan(root, "hf", "none")


def test_an_unknown_entry_is_carried_with_copied_codes_and_refused_where_they_are_decoded(tmp_path: Path) -> None:
    rotated(tmp_path / "model", None)
    root = changed(tmp_path / "model", zero_point_of="rows")
    with pytest.raises(
        PlanError, match="zero_point_of of compressed-tensors is not read, and may say what the codes mean"
    ):
        bridge.plan(root, "hf", "none")
    assert bridge.convert(root, "hf", out=tmp_path / "copy", format="compressed-tensors").passed
    written = json.loads((tmp_path / "copy/config.json").read_text())["quantization_config"]
    assert written["zero_point_of"] == "rows"
    with pytest.raises(SourceError, match="zero_point_of of compressed-tensors is not read"):
        open_source(root).load_model()
