"""Target `megatron`: loaded strictly by megatron-core it answers as the model did; what Megatron cannot say is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import yaml

import bridge
from bridge.core.errors import PlanError, SchemeError, UsageError
from bridge.sources.opening import open_source
from tests.covering import grid
from tests.models.megatron_families import EVERY
from tests.models.sources_made import MadeSource
from tests.oracles import megatron_bridge_process, megatron_oracle
from tests.tables import foreign
from tests.targets.dcp import bridge_section
from tests.targets.dcp.test_torchtitan import made, of_hf, read_by_torch

# Those whose tensors Megatron-Bridge maps. What is computed by the same code of the same floats is the same; grouped
# experts and ranks sum in another order, and transformers is other code: float32, logits of about five.
MAPPED = [name for name in EVERY if name not in ("gpt", "mixtral-grouped", "starcoder2")]
EXACT, CLOSE = 1e-30, 1e-4
# Mixtral's dense width is nobody's; Gemma 2's window counts the token that looks in transformers, in Megatron not, and
# Megatron-Bridge copies the number; where scores are sigmoids no softmax stands before the choice or behind it;
# add_bias_linear speaks for queries, keys and values as well, and what is written of YaRN lacks all numbers. Its GLM
# has one draft layer, whether or not the config has any.
BRIDGE_SAYS_OTHERWISE = {
    "mixtral": ("ffn_hidden_size",), "glm4_moe": ("mtp_num_layers",),
    "gemma2": ("window_size",), "deepseek_v3": ("moe_router_pre_softmax",),
    "gpt_oss": (
        "ffn_hidden_size", "add_qkv_bias", "yarn_rotary_scaling_factor", "yarn_original_max_position_embeddings",
        "yarn_beta_fast", "yarn_beta_slow", "yarn_correction_range_round_to_int",
    ),
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 5000.0}
GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, "query_pre_attn_scalar": 20}
# What config.json of each family says besides its extents.
SAID: dict[str, dict[str, Any]] = {
    "gemma": GEMMA,
    "gemma2": GEMMA | {
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma3": GEMMA | {
        "sliding_window": 16, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": None, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    },
    "mistral": {"sliding_window": 16},
    "gpt_oss": {
        "attention_bias": True, "swiglu_limit": 7.0, "sliding_window": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "deepseek": {"rms_norm_eps": 1e-6},  # of the norms of latents, whatever the config says
    "deepseek-plain": {"rms_norm_eps": 1e-6},
    "mixtral": {"sliding_window": None},
    "glm4-moe": {"partial_rotary_factor": 0.5},
    "glm4-moe-plain": {"partial_rotary_factor": 0.5},
    "nemotron": {"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "starcoder2": {"hidden_act": "gelu_pytorch_tanh", "norm_epsilon": 1e-5},
    "gpt2": {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
    "llama-tied": {"tie_word_embeddings": True},
}  # fmt: skip
PLAIN: dict[str, Any] = {
    "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": False,
    "num_experts_per_tok": 2, "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5,
    "rope_parameters": ROPE,
}  # fmt: skip


def config_of(case: str, **more: Any) -> dict[str, Any]:
    return PLAIN | foreign.CONFIGS[case] | SAID.get(case, {}) | more


def native(directory: Path) -> dict[str, np.ndarray]:
    """The weights, layers one by one."""
    found = {}
    for name, tensor in read_by_torch(directory).items():
        head, stacked, rest = name.partition(".layers.")
        if stacked and not rest[0].isdigit():
            found |= {f"{head}.layers.{layer}.{rest}": part.numpy() for layer, part in enumerate(tensor)}
        else:
            found[name] = tensor.numpy()
    return found


@pytest.mark.parametrize("case", foreign.CONFIGS)
def test_every_tensor_is_what_megatron_documents(case: str, tmp_path: Path) -> None:
    source = made(config_of(case))
    report = bridge.convert(source, "megatron", out=tmp_path / "out", vocab_multiple=16)
    written, expected = native(tmp_path / "out"), foreign.megatron(case, source.arrays)
    assert written.keys() == expected.keys()
    for name, array in expected.items():
        real = slice(97) if "word_embeddings" in name or "output_layer" in name else slice(None)
        assert written[name].shape == array.shape
        assert np.array_equal(written[name][real], array[real]), name
        assert real == slice(None) or not written[name][97:].any()
    assert not report.findings and report.passed


@pytest.mark.slow
@pytest.mark.parametrize("case", foreign.CONFIGS)
def test_run_config_alone_gives_the_model_back_to_the_bit(case: str, tmp_path: Path) -> None:
    source = made(config_of(case))
    bridge.convert(source, "megatron", out=tmp_path / "out")
    (tmp_path / "out/config.json").unlink()
    back = open_source(tmp_path / "out")
    assert back.config["architectures"] == source.config["architectures"]
    assert back.specs.keys() == source.specs.keys()
    assert all(np.array_equal(back.read(name), array) for name, array in source.arrays.items())


@grid({"case": ["gemma2", "gemma3"], "scalar": [16, 20, 168]})
def test_what_queries_are_divided_by_comes_back_with_a_config_beside(case: str, scalar: int, tmp_path: Path) -> None:
    """Megatron-Core multiplies scores by `softmax_scale`; Gemma 3 has 168 where a head has 128."""
    bases = {"sliding_attention": ROPE, "full_attention": ROPE | {"rope_theta": 1e6}}
    config = config_of(case, query_pre_attn_scalar=scalar) | {"rope_parameters": bases if case == "gemma3" else ROPE}
    source = made(config, "bfloat16")
    bridge.convert(source, "megatron", out=tmp_path / "megatron", vocab_multiple=16)
    section = yaml.safe_load((tmp_path / "megatron/run_config.yaml").read_text())["model"]
    if case == "gemma3":
        assert section["softmax_scale"] == pytest.approx(scalar**-0.5, rel=1e-15)
    for given in (None, config):
        bridge.convert(tmp_path / "megatron", "hf", out=tmp_path / "hf", config=given, overwrite=True)
        back = open_source(tmp_path / "hf")
        assert back.specs.keys() == source.specs.keys()
        assert all(back.read(name).tobytes() == array.tobytes() for name, array in source.arrays.items())
        assert back.config["query_pre_attn_scalar"] == scalar
        assert {name: back.config[name] for name in config} == config


@grid(
    {"name": MAPPED, "spec": ["te", "local"]},
    shows=lambda name, spec: {(spec, "experts", bool(EVERY[name].experts)), (spec, "latent", bool(EVERY[name].latent))},
)
def test_megatron_core_loads_it_strictly_and_answers_the_same(name: str, spec: str, tmp_path: Path) -> None:
    """`raise_all`: every state that the local spec asks for is there, and nothing besides. Experts are loaded one by
    one, and as one module.
    """
    known = megatron_oracle.family(name)
    bridge.convert(_source(name), "megatron", out=tmp_path / spec, vocab_multiple=72, spec=spec)
    strict = "raise_all" if spec == "local" else "assume_ok_unexpected"
    one_module = EVERY[name].experts and not EVERY[name].config["add_bias_linear"]  # megatron's own has no biases
    for grouped in (False, True)[: 1 + bool(one_module)]:
        logits = megatron_oracle.load_and_run(tmp_path / spec, name, strict=strict, spec=spec, grouped=grouped)
        assert np.abs(logits - known.logits).max() < (CLOSE if grouped else EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2", "mixtral", "qwen3-moe", "deepseek"])
def test_two_ranks_share_it(name: str, tmp_path: Path) -> None:
    """Each loads its part of the tensors of one file."""
    bridge.convert(_source(name), "megatron", out=tmp_path / "out", vocab_multiple=72)
    logits = megatron_oracle.load_and_run(tmp_path / "out", name, tp=2)
    assert np.abs(logits - megatron_oracle.family(name).logits).max() < CLOSE


@grid({"name": ["gpt", "starcoder2"], "spec": ["te", "local"]})
def test_megatron_core_answers_as_transformers_where_nobody_maps_names(name: str, spec: str, tmp_path: Path) -> None:
    config, ids = EVERY[name].hf, megatron_oracle.family(name).ids
    tensors, logits = transformers_model(config, ids)
    bridge.convert(of_hf(tensors, config), "megatron", out=tmp_path / "out", vocab_multiple=72, spec=spec)
    strict = "raise_all" if spec == "local" else "assume_ok_unexpected"
    found = megatron_oracle.load_and_run(tmp_path / "out", name, strict=strict, spec=spec)
    assert np.abs(found - logits).max() < CLOSE


def transformers_model(config: dict[str, Any], ids: np.ndarray) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Random tensors of the model under the names that it saves, and what it answers."""
    import transformers

    made_of = transformers.AutoConfig.for_model(**config)
    model = transformers.AutoModelForCausalLM.from_config(made_of, attn_implementation="eager").eval()
    numbers = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(torch.randn(tensor.shape, generator=numbers) * 0.15 + (tensor == 1).all())
        logits = model(torch.from_numpy(ids)).logits
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    return {key: value.numpy() for key, value in model.state_dict().items() if key not in tied}, logits.numpy()


@pytest.mark.slow
def test_a_checkpoint_of_another_program_is_written_as_megatrons(tmp_path: Path) -> None:
    """GPT-2, which Megatron-Bridge has no mapping for, by way of our own reader."""
    known = megatron_oracle.family("gpt")
    bridge.convert(known.save(tmp_path / "nemo", "nemo2"), "megatron", out=tmp_path / "out", vocab_multiple=72)
    assert np.array_equal(megatron_oracle.load_and_run(tmp_path / "out", "gpt"), known.logits)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MAPPED if name != "gemma3"])
def test_megatron_bridge_says_the_same_of_the_model(name: str, tmp_path: Path) -> None:
    bridge.convert(_source(name), "megatron", out=tmp_path / "out", vocab_multiple=72, verify=False)
    ours = yaml.safe_load((tmp_path / "out/run_config.yaml").read_text())["model"]
    pool = megatron_oracle.in_bridge()
    theirs = yaml.safe_load(pool.submit(megatron_bridge_process.run_config, name, 1, 1).result())["model"]
    unsaid = ("_target_", "moe_grouped_gemm", *BRIDGE_SAYS_OTHERWISE.get(EVERY[name].hf["model_type"], ()))
    differing = {
        key: (value, theirs.get(key)) for key, value in ours.items() if key not in unsaid and value != theirs.get(key)
    }
    assert not differing
    assert pool.submit(bridge_section.made, ours).result() == {k: v for k, v in ours.items() if k[0] != "_"}


def _source(name: str) -> MadeSource:
    family = EVERY[name]
    activation = {"silu": "silu", "fast_gelu": "gelu_pytorch_tanh", "squared_relu": "relu2"}.get(family.activation)
    return of_hf(megatron_oracle.bridged(name), family.hf | {"hidden_act": activation})


@pytest.mark.slow
def test_layers_that_differ_are_written_one_by_one(tmp_path: Path) -> None:
    bridge.convert(made(config_of("deepseek")), "megatron", out=tmp_path / "out")
    described = dcp.FileSystemReader(tmp_path / "out").read_metadata().state_dict_metadata
    assert "decoder.layers.0.mlp.linear_fc1.weight" in described
    assert described["decoder.layers.1.mlp.experts.experts.linear_fc1.weight"].size == torch.Size([5, 56, 48])
    assert "decoder.layers.1.mlp.experts.experts.linear_fc1._extra_state/shard_4_5" in described
    assert "decoder.layers.1.self_attention.core_attention._extra_state/shard_0_1" in described
    section = yaml.safe_load((tmp_path / "out/run_config.yaml").read_text())["model"]
    assert section["moe_layer_freq"] == [0, 1, 1]


@pytest.mark.slow
def test_what_lies_beside_is_what_a_load_reads_first(tmp_path: Path) -> None:
    bridge.convert(made(config_of("llama")), "megatron", out=tmp_path / "out")
    assert json.loads((tmp_path / "out/metadata.json").read_text())["sharded_backend"] == "torch_dist"
    assert torch.load(tmp_path / "out/common.pt", weights_only=True) == {"checkpoint_version": 3.0, "iteration": 0}
    described = dcp.FileSystemReader(tmp_path / "out").read_metadata()
    states = [name for name in described.state_dict_metadata if "_extra_state" in name]
    assert len({(info.offset, info.length) for key, info in described.storage_data.items() if key.fqn in states}) == 1
    (tmp_path / "out/metadata.json").unlink()
    report = bridge.verify(tmp_path / "out", against=made(config_of("llama")))
    assert any("metadata.json" in finding for finding in report.findings)


@pytest.mark.parametrize(
    ("config", "arguments", "error", "says"),
    [
        (config_of("llama"), {"quant": "int8_wo"}, SchemeError, "Megatron-Core loads plain weights only"),
        (config_of("llama"), {"quant": "fp8", "kv": "fp8"}, SchemeError, "KV cache: Megatron-Core reads no"),
        (config_of("llama"), {"vocab_multiple": 0}, UsageError, "vocab_multiple=0 must be a whole number, at least 1"),
        (config_of("llama"), {"spec": "tee"}, UsageError, "spec 'tee' is unknown"),
        (config_of("llama"), {"dtype": "fp8"}, UsageError, "'fp8'"),
        (config_of("llama", hidden_act="quick"), {}, PlanError, "activation 'quick'; known: silu"),
        (config_of("llama", rms_norm_eps=None), {}, PlanError, "the config does not give rms_norm_eps"),
        (config_of("llama", attention_bias=True), {}, PlanError, "add_bias_linear"),
        (config_of("qwen2", use_sliding_window=True, sliding_window=9), {}, PlanError, "has use_sliding_window = True"),
        (
            config_of("llama", rope_parameters=ROPE | {"rope_type": "dynamic", "factor": 2.0}), {}, PlanError,
            "'rope_type': 'dynamic', 'factor': 2.0} would be read as {'rope_theta': 5000.0, 'rope_type': 'default'}",
        ),
        (config_of("llama") | {"architectures": ["Phi3ForCausalLM"]}, {}, PlanError, "no layout for Phi3ForCausalLM"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_before_any_weight_is_read(
    config: dict[str, Any], arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    source = made(config)
    source.broken = frozenset(source.specs)
    with pytest.raises(error) as told:
        bridge.plan(source, "megatron", **arguments)
    assert says in str(told.value)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192},
        {"rope_type": "linear", "factor": 3.0},
        {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    ],
)  # fmt: skip
@pytest.mark.parametrize("case", ["llama", "deepseek"])
def test_a_scaled_rope_is_said_as_it_was_or_refused(case: str, rope: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(case, rope_parameters=None, rope_theta=5000.0, rope_scaling=rope)
    if case == "deepseek" and "type" not in rope:
        with pytest.raises(PlanError, match="would be read as"):
            bridge.plan(made(config), "megatron")
        return
    bridge.convert(made(config), "megatron", out=tmp_path / "out", verify=False)
    (tmp_path / "out/config.json").unlink()
    said = open_source(tmp_path / "out").config["rope_parameters"]
    kind = rope.get("rope_type") or rope["type"]
    spread = {"beta_fast": 32.0, "beta_slow": 1.0} if kind == "yarn" else {}  # transformers' defaults
    spread |= {"truncate": True} if kind == "yarn" and case == "llama" else {}
    assert said == {"rope_theta": 5000.0, "rope_type": kind, **spread, **{k: v for k, v in rope.items() if k != "type"}}


def test_layers_of_two_dtypes_cannot_be_one_tensor() -> None:
    source = made(config_of("llama"))
    name = "model.layers.1.mlp.down_proj.weight"
    source.specs = {**source.specs, name: type(source.specs[name])(name, source.specs[name].shape, "float16")}
    with pytest.raises(
        PlanError, match=r"linear_fc2.weight: is one tensor here, but its layers are float16 and float32"
    ):
        bridge.plan(source, "megatron")
    assert bridge.plan(source, "megatron", dtype="bf16")
