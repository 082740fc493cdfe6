"""Layers of live models: names, roles, numbers and kinds, in four dialects."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from bridge.core.errors import InspectError  # noqa: E402
from bridge.core.text import fold_layers  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from bridge.workflows.inspect.layers import CONV, CONV1D, EXPERT, LINEAR, Layer, layers_of, unwrapped  # noqa: E402
from bridge.workflows.inspect.te.resolve import load_routing  # noqa: E402
from tests.models.calibrated_models import built  # noqa: E402
from tests.models.decoder_families import build  # noqa: E402
from tests.oracles import inspect_layers_process  # noqa: E402
from tests.oracles.server import processes  # noqa: E402

LLAMA = Path(__file__).parents[3] / "examples" / "models" / "tiny-llama"
STATS = {"LogTensorStats": {"enabled": True, "tensors": ["activation"], "stats": ["cur_amax"]}}
ONE_FILE = {
    "attention": {"enabled": True, "layers": {"roles": ["attn.[qkv]"], "layer_numbers": "0-1"}, "bridge": STATS},
    "down": {"enabled": True, "layers": {"roles": ["mlp.down"]}, "bridge": STATS},
}

Kinds = dict[str, tuple[str, str]]


def kinds(layers: Any) -> Kinds:
    """Folded names -> role and kind of layers that differ only in numbers."""
    found: dict[tuple[str, str], list[str]] = {}
    for layer in layers:
        found.setdefault((layer.role, layer.kind), []).append(layer.name)
    return {name: key for key, names in found.items() for name in fold_layers(names)}


FAMILIES: dict[str, Kinds] = {
    "llama": {
        "model.layers.{0..1}.self_attn.q_proj": ("attn.q", LINEAR),
        "model.layers.{0..1}.self_attn.k_proj": ("attn.k", LINEAR),
        "model.layers.{0..1}.self_attn.v_proj": ("attn.v", LINEAR),
        "model.layers.{0..1}.self_attn.o_proj": ("attn.o", LINEAR),
        "model.layers.{0..1}.mlp.gate_proj": ("mlp.gate", LINEAR),
        "model.layers.{0..1}.mlp.up_proj": ("mlp.up", LINEAR),
        "model.layers.{0..1}.mlp.down_proj": ("mlp.down", LINEAR),
        "lm_head": ("head", LINEAR),
    },
    "gpt2": {
        "transformer.h.{0..1}.attn.c_attn": ("attn.q + attn.k + attn.v", CONV1D),
        "transformer.h.{0..1}.attn.c_proj": ("attn.o", CONV1D),
        "transformer.h.{0..1}.mlp.c_fc": ("mlp.fc1", CONV1D),
        "transformer.h.{0..1}.mlp.c_proj": ("mlp.fc2", CONV1D),
        "lm_head": ("head", LINEAR),
    },
    "mixtral": {
        "model.layers.{0..1}.self_attn.q_proj": ("attn.q", LINEAR),
        "model.layers.{0..1}.self_attn.k_proj": ("attn.k", LINEAR),
        "model.layers.{0..1}.self_attn.v_proj": ("attn.v", LINEAR),
        "model.layers.{0..1}.self_attn.o_proj": ("attn.o", LINEAR),
        "model.layers.{0..1}.mlp.experts.{0..4}.gate_up_proj": ("moe.gate + moe.up", EXPERT),
        "model.layers.{0..1}.mlp.experts.{0..4}.down_proj": ("moe.down", EXPERT),
        "lm_head": ("head", LINEAR),
    },
    "bert": {
        "bert.encoder.layer.{0..1}.attention.self.query": ("attn.q", LINEAR),
        "bert.encoder.layer.{0..1}.attention.self.key": ("attn.k", LINEAR),
        "bert.encoder.layer.{0..1}.attention.self.value": ("attn.v", LINEAR),
        "bert.encoder.layer.{0..1}.attention.output.dense": ("attn.o", LINEAR),
        "bert.encoder.layer.{0..1}.intermediate.dense": ("mlp.fc1", LINEAR),
        "bert.encoder.layer.{0..1}.output.dense": ("mlp.fc2", LINEAR),
        "cls.predictions.transform.dense": ("mlm.dense", LINEAR),
        "cls.predictions.decoder": ("head", LINEAR),
    },
}


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_transformers_have_the_roles_of_the_tables(family: str) -> None:
    layers = layers_of(built(family))
    assert kinds(layers) == FAMILIES[family]
    for layer in layers:
        inner = next((part for part in layer.name.split(".") if part.isdecimal()), None)
        assert layer.number == (None if inner is None else int(inner))


@pytest.mark.parametrize("family", FAMILIES)
def test_each_layer_says_where_its_weight_is(family: str) -> None:
    model = built(family)
    for layer in layers_of(model):
        weight = model.get_submodule(layer.module).get_parameter(layer.parameter)
        assert weight.ndim == 2 if layer.expert is None else layer.expert < weight.shape[0]
        assert layer.turned == (layer.kind == CONV1D)


def test_experts_that_are_stored_turned_say_so() -> None:
    layers = [layer for layer in layers_of(build("GptOssForCausalLM")) if layer.kind == EXPERT]
    assert {(layer.parameter, layer.role, layer.turned) for layer in layers} == {
        ("gate_up_proj", "moe.gate + moe.up", True), ("down_proj", "moe.down", True),
    }  # fmt: skip


def test_without_a_table_a_module_says_that_its_stack_is_turned() -> None:
    experts = type("OddExperts", (torch.nn.Module,), {"is_transposed": True})()
    experts.up = torch.nn.Parameter(torch.empty(2, 4, 6))
    assert [(layer.name, layer.turned) for layer in layers_of(torch.nn.ModuleList([experts]))] == [
        ("0.0.up", True), ("0.1.up", True),
    ]  # fmt: skip


def test_a_stored_model_and_the_live_one_have_the_same_layers() -> None:
    source = open_source(LLAMA)
    layers = layers_of(source.load_skeleton(), source)
    assert layers == layers_of(source.load_model(), source) == layers_of(source.load_model())
    assert (len(layers), layers[0].role, layers[-1].role) == (36, "attn.q", "head")


@pytest.mark.parametrize("name", ["GPTNeoXForCausalLM", "OPTForCausalLM", "Lfm2ForCausalLM"])
def test_without_a_table_layers_have_names_and_numbers(name: str) -> None:
    model = build(name)
    layers = layers_of(model)
    assert {layer.module for layer in layers} == {
        key for key, module in model.named_modules() if isinstance(module, torch.nn.Linear | torch.nn.Conv1d)
    }
    assert not any(layer.roles for layer in layers)
    assert {layer.number for layer in layers} == {None, 0, 1}
    with pytest.raises(InspectError, match="no table knows its layers; use modules"):
        load_routing(ONE_FILE, layers)


def test_a_plain_module_has_layers_without_roles() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 6, 3), torch.nn.Linear(6, 7), torch.nn.Embedding(4, 7))
    assert layers_of(model) == (
        Layer("0", number=0, kind=CONV, module="0"), Layer("1", number=1, kind=LINEAR, module="1"),
    )  # fmt: skip
    assert layers_of(torch.nn.ModuleDict({"output": torch.nn.Linear(3, 4), "b": torch.nn.Linear(4, 3)}))[0].roles == ()


def test_wrappers_are_left_out_of_names() -> None:
    model = built("llama")
    bare = layers_of(model)
    holder = torch.nn.Module()
    holder.module = model
    assert unwrapped(holder) is model
    assert layers_of(holder) == bare
    assert layers_of(torch.compile(model)) == bare
    for number, block in enumerate(model.model.layers):
        model.model.layers[number] = torch.compile(block)
    wrapped = layers_of(model)
    assert [layer.name for layer in wrapped] == [layer.name for layer in bare]
    assert [layer.roles for layer in wrapped] == [layer.roles for layer in bare]
    assert wrapped[0].module == "model.layers.0._orig_mod.self_attn.q_proj"


# Megatron-Core and torchtitan, in processes of their own


@pytest.fixture(scope="module")
def megatron(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessPoolExecutor]:
    store = str(tmp_path_factory.mktemp("store") / "store")
    with ProcessPoolExecutor(1, processes(), inspect_layers_process.start_megatron, (store,)) as pool:
        yield pool


@pytest.fixture(scope="module")
def torchtitan() -> Iterator[Any]:
    pools = {era: _process(inspect_layers_process.start_torchtitan, era) for era in ("0.2", "0.3")}
    yield lambda name, era: pools[era].submit(inspect_layers_process.torchtitan, name, era).result()
    for pool in pools.values():
        pool.shutdown()


def _process(start: Any, argument: str) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, processes(), start, (argument,))


MEGATRON = {
    "llama": {"self_attention.linear_qkv": "attn.q + attn.k + attn.v", "self_attention.linear_proj": "attn.o",
              "mlp.linear_fc1": "mlp.gate + mlp.up", "mlp.linear_fc2": "mlp.down"},
    "nemotron": {"self_attention.linear_qkv": "attn.q + attn.k + attn.v", "self_attention.linear_proj": "attn.o",
                 "mlp.linear_fc1": "mlp.fc1", "mlp.linear_fc2": "mlp.fc2"},
    "deepseek": {"self_attention.linear_q_down_proj": "mla.q_a", "self_attention.linear_q_up_proj": "mla.q_b",
                 "self_attention.linear_kv_down_proj": "mla.kv_a",
                 "self_attention.linear_kv_up_proj": "mla.k_b + mla.v_b", "self_attention.linear_proj": "mla.o",
                 "mlp.linear_fc1": "mlp.gate + mlp.up", "mlp.linear_fc2": "mlp.down",
                 "mlp.shared_experts.linear_fc1": "moe.shared.gate + moe.shared.up",
                 "mlp.shared_experts.linear_fc2": "moe.shared.down",
                 **{f"mlp.experts.local_experts.{e}.linear_fc1": "moe.gate + moe.up" for e in range(8)},
                 **{f"mlp.experts.local_experts.{e}.linear_fc2": "moe.down" for e in range(8)}},
}  # fmt: skip
TORCHTITAN = {
    ("llama3", "0.3"): {"attention.qkv_linear.wqkv": "attn.q + attn.k + attn.v", "attention.wo": "attn.o",
                        "feed_forward.w1": "mlp.gate", "feed_forward.w2": "mlp.down", "feed_forward.w3": "mlp.up"},
    ("qwen3", "0.2"): {"attention.wq": "attn.q", "attention.wk": "attn.k", "attention.wv": "attn.v",
                       "attention.wo": "attn.o", "feed_forward.w1": "mlp.gate", "feed_forward.w2": "mlp.down",
                       "feed_forward.w3": "mlp.up"},
    ("deepseek_v3", "0.3"): {
        "attention.wq": "mla.q", "attention.wkv_a": "mla.kv_a", "attention.wkv_b": "mla.k_b + mla.v_b",
        "attention.wo": "mla.o",
        "feed_forward.w1": "mlp.gate", "feed_forward.w2": "mlp.down", "feed_forward.w3": "mlp.up",
        "moe.router.gate": "moe.router",
        **{f"moe.shared_experts.w{n}": f"moe.shared.{role}" for n, role in ((1, "gate"), (2, "down"), (3, "up"))},
        **{f"moe.routed_experts.inner_experts.{e}.{name}": f"moe.{role}" for e in range(12)
           for name, role in (("w1_EFD", "gate"), ("w2_EDF", "down"), ("w3_EFD", "up"))},
    },
}  # fmt: skip


def by_part(layers: Any, prefix: str) -> dict[str, str]:
    """The name inside a numbered block -> the role; it is the same in every block that has it."""
    parts: dict[str, str] = {}
    for layer, _ in layers:
        if layer.number is not None:
            part = layer.name.removeprefix(f"{prefix}{layer.number}.")
            assert parts.setdefault(part, layer.role) == layer.role
    return parts


@pytest.mark.slow
@pytest.mark.parametrize("name", MEGATRON)
def test_layers_of_megatron_have_the_roles_of_the_dialect(name: str, megatron: ProcessPoolExecutor) -> None:
    layers = megatron.submit(inspect_layers_process.megatron, name).result()
    assert by_part(layers, "decoder.layers.") == MEGATRON[name]
    assert [layer.role for layer, _ in layers if layer.number is None] == ["head"]
    assert all(len(shape) == 2 for _, shape in layers)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "era"), TORCHTITAN)
def test_layers_of_torchtitan_have_the_roles_of_the_dialect(name: str, era: str, torchtitan: Any) -> None:
    layers = torchtitan(name, era)
    assert by_part(layers, "layers.") == TORCHTITAN[name, era]
    assert [layer.role for layer, _ in layers if layer.number is None] == ["head"]
    assert {layer.kind for layer, shape in layers if len(shape) == 3} <= {EXPERT}


@pytest.mark.slow
def test_one_config_finds_the_layers_of_every_dialect(megatron: ProcessPoolExecutor, torchtitan: Any) -> None:
    of_hf = layers_of(built("llama"))  # two blocks; the others have three
    of_megatron = [layer for layer, _ in megatron.submit(inspect_layers_process.megatron, "llama").result()]
    of_torchtitan = [layer for layer, _ in torchtitan("llama3", "0.3")]
    found = functools.partial(load_routing, ONE_FILE)
    assert len(found(of_hf).layers) == 2 * 3 + 2
    assert [*found(of_megatron).layers] == [
        "decoder.layers.0.self_attention.linear_qkv", "decoder.layers.0.mlp.linear_fc2",
        "decoder.layers.1.self_attention.linear_qkv", "decoder.layers.1.mlp.linear_fc2",
        "decoder.layers.2.mlp.linear_fc2",
    ]  # fmt: skip
    assert [*found(of_torchtitan).layers] == [
        "layers.0.attention.qkv_linear.wqkv", "layers.0.feed_forward.w2", "layers.1.attention.qkv_linear.wqkv",
        "layers.1.feed_forward.w2", "layers.2.feed_forward.w2",
    ]  # fmt: skip
    with pytest.raises(InspectError, match=r"section 'down': .* none of mlp.down; known: .*mlp.fc1, mlp.fc2"):
        found(layers_of(built("gpt2")))
