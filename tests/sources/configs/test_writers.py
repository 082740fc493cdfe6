"""Each writer's configuration by its own words and defaults: NeMo 1, Megatron-LM, Megatron-Bridge."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import inspect
from pathlib import Path

import pytest

from bridge.core.errors import SourceError
from bridge.sources.configs.derive import hf_config
from bridge.sources.configs.facts import Fact, Given
from bridge.sources.configs.megatron import CHOICES, DEFAULTS, FOLLOWED, NO_EFFECT, SWITCHES, refusals
from bridge.sources.configs.writers import declared_by_megatron
from tests.models.megatron_configs import megatron_lm, nemo1, nemo2
from tests.models.megatron_families import FAMILIES, VOCAB
from tests.sources.configs.test_configs import as_dumped, config_of, expected, native


def test_megatron_bridges_newer_section_in_two_parts_says_the_same() -> None:
    whole = nemo2(FAMILIES["llama"])["config"]
    outer = (
        "seq_length",
        "vocab_size",
        "share_embeddings_and_output_weights",
        "rotary_base",
        "position_embedding_type",
    )
    own = {name: whole[name] for name in outer} | {
        "_target_": "megatron.bridge.models.gpt.model_config.BridgeGPTModelConfig"
    }
    inner = {name: value for name, value in whole.items() if name not in outer} | {"activation_func": "silu"}
    raw = as_dumped({"model": own | {"transformer": inner}, "train": {"train_iters": 7}}, "run_config.yaml")
    config = hf_config("x", "megatron", declared_by_megatron("run_config.yaml", raw), native(FAMILIES["llama"])).config
    assert expected(FAMILIES["llama"]).items() <= config.items()


def test_nemo1_refers_to_its_own_fields() -> None:
    raw = nemo1(FAMILIES["llama"], 1, 1) | {
        "max_position_embeddings": "${.encoder_seq_length}",
        "encoder_seq_length": 96,
    }
    told = declared_by_megatron("model_config.yaml", raw)
    assert (
        hf_config("x", "megatron", told, native(FAMILIES["llama"]), {"vocab_size": 131}).config[
            "max_position_embeddings"
        ]
        == 96
    )


def test_nemo1s_scaled_positions_have_its_defaults() -> None:
    raw = nemo1(FAMILIES["llama"], 1, 1) | {"scale_positional_embedding": True}
    told = declared_by_megatron("model_config.yaml", raw)
    rope = hf_config("x", "megatron", told, native(FAMILIES["llama"]), {"vocab_size": 131}).config["rope_parameters"]
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("llama3", 8.0, 8192)


def test_nemo1s_silence_has_nemos_defaults() -> None:
    silent = {
        "bias",
        "position_embedding_type",
        "share_embeddings_and_output_weights",
        "layernorm_epsilon",
        "activation",
    }
    raw = {name: value for name, value in nemo1(FAMILIES["gpt"], 1, 1).items() if name not in silent}
    told = declared_by_megatron("model_config.yaml", raw | {"override_vocab_size": VOCAB})
    config = hf_config("x", "megatron", told, native(FAMILIES["gpt"])).config
    fused = {"activation_function": "gelu_pytorch_tanh"}  # what its fused kernel computes
    assert (expected(FAMILIES["gpt"]) | fused).items() <= config.items()
    assert told.terms["mlp_bias"].value is True and told.terms["tied"].value is True
    assert told.terms["learned"].value is True
    silent = {"rotary_base", "num_moe_experts", "moe_router_topk"}
    raw = {name: value for name, value in nemo1(FAMILIES["mixtral"], 1, 1).items() if name not in silent}
    told = declared_by_megatron("model_config.yaml", raw | {"num_moe_experts": 5})
    config = hf_config("x", "megatron", told, native(FAMILIES["mixtral"]), {"vocab_size": VOCAB}).config
    assert (config["rope_parameters"]["rope_theta"], config["num_experts_per_tok"]) == (10000.0, 2)


def test_megatron_lms_flags_mean_what_its_parser_makes_of_them() -> None:
    raw = dict(vars(megatron_lm(FAMILIES["nemotron"], 1, 1)))
    terms = declared_by_megatron("common.pt: args", raw).terms
    assert (terms["centered"].value, terms["gated"].value, terms["activation"].value) == (True, False, "relu2")
    raw |= {"apply_layernorm_1p": False, "swiglu": True, "rotary_seq_len_interpolation_factor": 2}
    terms = declared_by_megatron("common.pt: args", raw).terms
    assert (terms["centered"].value, terms["gated"].value, terms["activation"].value) == (False, True, "silu")
    assert terms["scaling"].value == {"rope_type": "linear", "factor": 2.0}
    gelu = {"swiglu": False, "squared_relu": False}
    for flags, activation in (
        ({"openai_gelu": True}, "gelu_pytorch_tanh"), ({"bias_gelu_fusion": True}, "gelu_pytorch_tanh"), ({}, "gelu"),
        ({"quick_geglu": True}, "quick_gelu"),
    ):  # fmt: skip
        assert declared_by_megatron("common.pt: args", raw | gelu | flags).terms["activation"].value == activation


@pytest.mark.parametrize(
    ("written", "activation"),
    [
        ("silu", "silu"), ("torch.nn.functional.relu", "relu"), ("megatron.core.activations.squared_relu", "relu2"),
        ("relu2", "relu2"), ("torch._C._nn.gelu", "gelu"), ("megatron.core.activations.fast_gelu", "gelu_pytorch_tanh"),
        ("nemo.collections.llm.fn.activation.openai_gelu", "gelu_pytorch_tanh"), ("quick_gelu", "quick_gelu"),
        ("gelu_pytorch_tanh", "gelu_pytorch_tanh"), ("somewhere.openai_gelu_func", "gelu_pytorch_tanh"),
    ],
)  # fmt: skip
def test_a_function_is_known_by_its_name(written: str, activation: str) -> None:
    given = {"architectures": ["LlamaForCausalLM"]}
    as_object = {"_target_": written, "_call_": False}
    assert config_of({"activation_func": as_object}, given=given)["hidden_act"] == activation
    assert config_of({"activation_func": written}, given=given)["hidden_act"] == activation
    partial = {"_target_": "torch._C._nn.gelu", "_partial_": True, "_args_": [], "approximate": "tanh"}
    assert config_of({"activation_func": partial}, given=given)["hidden_act"] == "gelu_pytorch_tanh"


def test_every_field_of_megatron_core_is_followed_or_has_no_effect_or_is_refused() -> None:
    """A field that a new version adds belongs into one list; those that are refused have Megatron's own default."""
    module = pytest.importorskip("megatron.core.transformer.transformer_config")
    refused = {*DEFAULTS, *CHOICES}
    for config in (module.TransformerConfig, module.MLATransformerConfig):
        for field in dataclasses.fields(config):
            lists = [field.name in names for names in (FOLLOWED, NO_EFFECT, refused)]
            assert sum(lists) == 1, f"{field.name} is in {sum(lists)} lists of mappings/megatron_*.toml"
            if field.name in DEFAULTS:
                assert field.default == DEFAULTS[field.name], field.name
            elif field.name in CHOICES:
                assert field.default in CHOICES[field.name], field.name


def test_every_argument_of_megatron_bridges_gpt_is_in_a_list() -> None:
    spec = importlib.util.find_spec("megatron")  # `megatron.bridge` itself imports Transformer Engine
    paths = [
        Path(place) / "bridge/models/gpt_provider.py" for place in (spec and spec.submodule_search_locations) or ()
    ]
    path = next((path for path in paths if path.is_file()), None) or pytest.skip("megatron.bridge is not installed")
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    nodes = [node for made in classes if made.name == "GPTModelProvider" for node in made.body]
    names = {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    assert len(names) > 30
    assert not refusals({name: Fact(DEFAULTS.get(name, "aux_loss"), name) for name in names})


def test_the_parsers_defaults_of_megatron_lm_are_no_reason_to_refuse() -> None:
    """Its `args` have every option, most of them of training and none of them set."""
    args = {"lr": 1e-4, "train_iters": 500000, "rl_kl_beta": 0.0, "log_interval": 100, "hybrid_attention_ratio": 0.0}
    args |= {"use_new_switch": False, "new_option_without_value": None, "add_position_embedding": True}
    raw = vars(megatron_lm(FAMILIES["llama"], 1, 1))
    assert not declared_by_megatron("common.pt: args", raw | args).refused
    for given in ({"use_new_switch": True}, {"new_switch": True}, {"new_switch": False}):
        assert declared_by_megatron("common.pt: args", raw | given).refused.keys() == given.keys()


def test_a_switch_that_is_taken_to_be_off_by_its_name_is_off_in_megatron_cores_classes() -> None:
    """Of one that is not known, False is a change where it is on by default."""
    module = pytest.importorskip("megatron.core.transformer.transformer_config")
    gpt = inspect.signature(pytest.importorskip("megatron.core.models.gpt").GPTModel).parameters.values()
    fields = {field.name: field.default for field in dataclasses.fields(module.MLATransformerConfig)}
    fields |= {argument.name: argument.default for argument in gpt}
    computes = {name: default for name, default in fields.items() if name not in NO_EFFECT}
    assert {name for name in computes if name.startswith(SWITCHES) and computes[name] is True} == set()
    assert any(default is True for default in computes.values())
    built = {"config", "max_sequence_length", "mtp_block_spec", "pg_collection", "vp_stage"}
    assert fields.keys() - {*FOLLOWED, *NO_EFFECT, *DEFAULTS, *CHOICES} == built


def test_the_caller_leaves_an_argument_out_by_saying_none() -> None:
    raw = nemo2(FAMILIES["llama"])
    raw["config"]["residual_scale"] = 0.3
    told = declared_by_megatron("context/model.yaml", raw)
    specs = native(FAMILIES["llama"])
    with pytest.raises(SourceError, match=r'residual_scale = 0\.3: .* give config={"residual_scale": None}'):
        hf_config("x", "megatron", told, specs)
    own = Given({"residual_scale": None}, ["residual_scale"])  # a config.json of the checkpoint answers nothing
    with pytest.raises(SourceError, match="residual_scale"):
        hf_config("x", "megatron", told, specs, own)
    config = hf_config("x", "megatron", told, specs, {"residual_scale": None}).config
    assert expected(FAMILIES["llama"]).items() <= config.items() and "residual_scale" not in config
