"""Foreign checkpoints in Hugging Face's names: values, spellings and refusals."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np
import pytest

from bridge.core.errors import BridgeError
from bridge.core.mappings import parse_table
from bridge.core.values import TensorSpec
from bridge.tables.architectures.roles import load_roles
from bridge.tables.dialects.dialect import load_dialect, parse_dialect
from bridge.tables.dialects.layout import role_shapes
from bridge.tables.dialects.translate import Native, Translated, Translator, translate, translator
from bridge.tables.expressions.grammar import Call
from bridge.tables.expressions.regions import Block
from tests.tables.checkpoints import LLAMA, headers
from tests.tables.foreign import CENTERED, CONFIGS, Tensors, megatron, meta, torchtitan

TITAN = ["llama", "llama-mha", "llama-mqa", "qwen3", "qwen3-moe", "gpt_oss", "deepseek", "deepseek-plain"]


def hugging_face(config: dict[str, Any]) -> Tensors:
    """A checkpoint in which every value differs from every other."""
    values, tensors = 1, {}
    for name, spec in headers(config).items():
        tensors[name] = np.arange(values, values + spec.size, dtype=np.float64).reshape(spec.shape)
        values += spec.size
    return tensors


def specs_of(tensors: Tensors, dtype: str = "float32") -> list[TensorSpec]:
    return [TensorSpec(name, tensor.shape, dtype) for name, tensor in tensors.items()]


def spell(dialect: str, case: str, native: Tensors, centered: int | None = None) -> tuple[Tensors, Translator]:
    """Every tensor that the rectangles make of `native`, by NumPy alone."""
    dims = {"vocab_multiple": 16, "centered": int(case in CENTERED) if centered is None else centered}
    found, made = translate(load_dialect(dialect), CONFIGS[case], dims, specs_of(native), "here")
    return {name: put_together(tensor, made.native, native) for name, tensor in found.items()}, made


def put_together(tensor: Translated, native: dict[str, Native], stored: Tensors) -> np.ndarray:
    parts = [part(block, native[block.source], stored) for block in tensor.blocks]
    made = np.concatenate(parts)
    if tensor.turned:
        *stack, rows, columns = tensor.spec.shape
        made = made.reshape(*stack, columns, rows).swapaxes(-1, -2)
    return made.reshape(tensor.spec.shape)


def part(block: Block, native: Native, stored: Tensors) -> np.ndarray:
    flat = stored[native.stored].reshape(-1)[native.first : native.first + math.prod(native.shape)]
    whole = flat.reshape(-1, native.shape[-1]) if block.cols else flat
    rows, cols = (block.cols, block.rows) if block.transposed else (block.rows, block.cols)
    cut = whole[slice(*rows or (None,))]
    if block.rope:  # from pairs to halves, as torchtitan's `to_hf` writes it, or back
        halves = (-1, -block.rope // 2, 2) if block.rope < 0 else (-1, 2, block.rope // 2)
        cut = cut.reshape(*halves, *cut.shape[1:]).swapaxes(1, 2).reshape(cut.shape)
    cut = cut if cols is None else cut[:, slice(*cols)]
    return (cut.T if block.transposed else cut)[:: block.step] + block.shift


def assert_same(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert np.array_equal(found[name], tensor), name


# values


@pytest.mark.parametrize("case", CONFIGS)
def test_megatrons_tensors_are_hugging_faces(case: str) -> None:
    hf = hugging_face(CONFIGS[case])
    found, made = spell("megatron", case, megatron(case, hf))
    assert_same(found, hf)
    assert made.ignored == {}


@pytest.mark.parametrize("case", ["llama", "qwen2", "gemma", "mixtral", "gpt2"])
@pytest.mark.parametrize("prefix", ["", "module.", "model."])
def test_stacked_layers_are_shown_one_by_one(case: str, prefix: str) -> None:
    hf = hugging_face(CONFIGS[case])
    found, _ = spell("megatron", case, {prefix + name: t for name, t in stacked(megatron(case, hf)).items()})
    assert_same(found, hf)


def stacked(native: Tensors) -> Tensors:
    """Layers that are alike under one name, along a leading axis."""
    names = {name.replace("layers.0.", "layers.", 1): name for name in native if ".layers.0." in name}
    out = {name: tensor for name, tensor in native.items() if ".layers." not in name}
    for name, first in names.items():
        out[name] = np.stack([native[first.replace("layers.0.", f"layers.{layer}.", 1)] for layer in range(3)])
    return out


@pytest.mark.parametrize("case", TITAN)
@pytest.mark.parametrize("old", [False, True])
def test_torchtitans_tensors_of_both_eras_are_hugging_faces(case: str, old: bool) -> None:
    hf = hugging_face(CONFIGS[case])
    found, _ = spell("torchtitan", case, torchtitan(case, hf, old))
    assert_same(found, hf)


def test_metas_tensors_are_hugging_faces() -> None:
    hf = hugging_face(LLAMA)
    found, made = spell("meta", "llama", meta(hf))
    assert_same(found, hf)
    assert made.ignored == {"rope.freqs": "computed from the configuration"}


def test_norms_less_one_are_shifted_where_only_one_side_stores_them_so() -> None:
    hf = hugging_face(LLAMA)
    native = megatron("llama", hf)
    native = {name: t - 1 if "norm" in name else t for name, t in native.items()}
    assert_same(spell("megatron", "llama", native, centered=1)[0], hf)
    hf = hugging_face(CONFIGS["gemma"])
    native = {name: t + 1 if "norm" in name else t for name, t in megatron("gemma", hf).items()}
    assert_same(spell("megatron", "gemma", native, centered=0)[0], hf)


CASES = ("llama-biases", "qwen3", "gemma3", "starcoder2", "qwen3-moe", "gpt_oss", "deepseek")
SWEPT = [("megatron", case) for case in CASES]
SWEPT += [("torchtitan", case) for case in ("llama", "qwen3-moe", "gpt_oss", "deepseek")] + [("meta", "llama")]


@pytest.mark.slow
@pytest.mark.parametrize(("dialect", "case"), SWEPT)
def test_every_role_in_the_place_of_another_is_noticed(dialect: str, case: str) -> None:
    hf = hugging_face(CONFIGS[case])
    native = megatron(case, hf) if dialect == "megatron" else torchtitan(case, hf, old=dialect == "meta")
    dims = {"vocab_multiple": 16, "centered": int(case in CENTERED)}
    made = translator(load_dialect(dialect), CONFIGS[case], dims)
    rows = {row.place.line: row for name in native if (row := made.row_of(name))}
    held = sorted({role for row in rows.values() for role in row.roles})
    shapes = role_shapes(made.table.roles.roles, held, made.names)  # of another shape it is refused
    broken = 0
    for row in rows.values():
        for role, other in itertools.product(row.roles, held):
            if role != other and shapes[role] == shapes[other]:
                text = _exchanged(made.dialect.file.text, row.place.line, role, other)
                assert _noticed(text, case, dims, native, hf), f"{row.place.row}: {other}"
                broken += 1
        if (
            isinstance(row.expr, Call)
            and row.expr.op in ("rope", "shift")
            and (case in CENTERED or row.expr.op == "rope")
        ):
            value = row.expr.args[0]
            assert _noticed(_replaced(made.dialect.file.text, row.place.line, str(value)), case, dims, native, hf)
    assert broken > 10


def _exchanged(text: str, line: int, role: str, other: str) -> str:
    lines = text.splitlines()
    key, _, value = lines[line - 1].partition(" = ")
    swap = {role: other, other: role}
    value = re.sub(r"[a-z_]+(\.[a-z0-9_]+)+", lambda found: swap.get(found[0], found[0]), value.split("#")[0])
    lines[line - 1] = f"{key} = {value}"
    return "\n".join(lines)


def _replaced(text: str, line: int, value: str) -> str:
    lines = text.splitlines()
    lines[line - 1] = f'{lines[line - 1].partition(" = ")[0]} = "{value}"'
    return "\n".join(lines)


def _noticed(text: str, case: str, dims: dict[str, int], native: Tensors, hf: Tensors) -> bool:
    """True where parsing or spelling refuses the broken table, or a tensor has other values."""
    try:
        dialect = parse_dialect(parse_table(text, "broken.toml"), load_roles())
        found, made = translate(dialect, CONFIGS[case], dims, specs_of(native), "here")
    except BridgeError:
        return True
    values = {name: put_together(tensor, made.native, native) for name, tensor in found.items()}
    return not all(np.array_equal(values[name], tensor) for name, tensor in hf.items())


# other spellings


def test_gate_and_up_apart_become_columns_that_take_turns() -> None:
    hf = hugging_face(CONFIGS["gpt_oss"])
    native, name = megatron("gpt_oss", hf), "decoder.layers.1.mlp.experts.experts"
    for expert, fused in enumerate(native.pop(f"{name}.linear_fc1.weight")):
        gate, up = np.split(fused, 2)
        native |= {f"{name}.{expert}.linear_fc1.weight_{w}": half for w, half in (("w", gate), ("v", up))}
    assert_same(spell("megatron", "gpt_oss", native)[0], hf)


def _renamed(native: Tensors, *pairs: tuple[str, str]) -> Tensors:
    out = {}
    for name, tensor in native.items():
        for old, new in pairs:
            name = name.replace(old, new)
        out[name] = tensor
    return out


LOCAL = (
    ("self_attention.linear_qkv.layer_norm_", "input_layernorm."),
    ("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm."),
)


@pytest.mark.parametrize("case", ["llama", "gemma", "starcoder2", "gpt2"])
def test_norms_of_the_local_specification_are_read(case: str) -> None:
    hf = hugging_face(CONFIGS[case])
    assert_same(spell("megatron", case, _renamed(megatron(case, hf), *LOCAL))[0], hf)


@pytest.mark.parametrize("case", ["mixtral", "deepseek", "deepseek-plain"])
def test_what_the_local_specification_saves_of_experts_is_read(case: str) -> None:
    hf = hugging_face(CONFIGS[case])
    pairs = [("pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_")]
    pairs += [("linear_q_up_proj.layer_norm_", "q_layernorm."), ("linear_kv_up_proj.layer_norm_", "kv_layernorm.")]
    assert_same(spell("megatron", case, _renamed(megatron(case, hf), *pairs))[0], hf)


def test_gate_and_up_that_are_saved_apart_are_read() -> None:
    hf = hugging_face(LLAMA)
    native = {}
    for name, tensor in megatron("llama", hf).items():
        if name.endswith("linear_fc1.weight"):
            native[f"{name}_w"], native[f"{name}_v"] = np.split(tensor, 2)
        else:
            native[name] = tensor
    assert_same(spell("megatron", "llama", native)[0], hf)


@pytest.mark.parametrize(
    "spelling", ["local_experts.{e}.{fc}.weight", "experts.{e}.{fc}.weight", "{fc}.weight{e}", "apart"]
)
def test_experts_that_are_saved_one_by_one_are_read(spelling: str) -> None:
    hf = hugging_face(CONFIGS["qwen3-moe"])
    native: Tensors = {}
    for name, tensor in megatron("qwen3-moe", hf).items():
        stem, found, end = name.partition("experts.experts.")
        for e in range(5 if found else 0):
            fc = end.removesuffix(".weight")
            if spelling != "apart":
                native[f"{stem}experts.{spelling.format(e=e, fc=fc)}"] = tensor[e]
            elif fc == "linear_fc2":
                native[f"{stem}experts.experts.{e}.{fc}.weight"] = tensor[e]
            else:
                gate, up = np.split(tensor[e], 2)
                native |= {f"{stem}experts.experts.{e}.{fc}.weight_{x}": t for x, t in (("w", gate), ("v", up))}
        if not found:
            native[name] = tensor
    assert_same(spell("megatron", "qwen3-moe", native)[0], hf)


def test_a_tied_head_that_is_stored_all_the_same_is_a_tensor() -> None:
    hf = hugging_face(CONFIGS["llama-tied"])
    assert "lm_head.weight" not in hf
    native = megatron("llama-tied", hf)
    assert "output_layer.weight" not in native
    native["output_layer.weight"] = native["embedding.word_embeddings.weight"]
    found, _ = spell("megatron", "llama-tied", native)
    assert np.array_equal(found.pop("lm_head.weight"), hf["model.embed_tokens.weight"])
    assert_same(found, hf)


def test_extra_state_and_draft_layers_are_ignored_for_a_reason() -> None:
    native = megatron("llama", hugging_face(LLAMA))
    extra = ["decoder.layers.1.self_attention.linear_qkv._extra_state", "decoder.layers.mlp.linear_fc2._extra_state"]
    _, made = spell("megatron", "llama", native | {name: np.zeros(3) for name in extra})
    assert made.ignored == dict.fromkeys(extra, "state of Transformer Engine")
    native = torchtitan("deepseek", hugging_face(CONFIGS["deepseek"]))
    _, made = spell("torchtitan", "deepseek", native | {"mtp_layers.0.eh_proj.weight": np.zeros((4, 8))})
    assert "drafts tokens ahead" in made.ignored["mtp_layers.0.eh_proj.weight"]


def test_what_only_training_needs_is_ignored_where_the_architecture_has_no_role_for_it() -> None:
    native = torchtitan("qwen3-moe", hugging_face(CONFIGS["qwen3-moe"]))
    _, made = spell("torchtitan", "qwen3-moe", native | {"layers.0.moe.expert_bias_E": np.zeros(5)})
    assert made.ignored["layers.0.moe.expert_bias_E"].startswith("balances experts in training")
    _, made = spell("torchtitan", "deepseek", torchtitan("deepseek", hugging_face(CONFIGS["deepseek"])))
    assert made.ignored == {}


# how ranks share a tensor


@pytest.mark.parametrize(
    ("dialect", "case", "name", "cut"),
    [
        ("megatron", "llama", "decoder.layers.1.self_attention.linear_qkv.weight", (0, 1)),
        ("megatron", "llama", "decoder.layers.1.self_attention.linear_proj.weight", (1, 1)),
        ("megatron", "llama", "module.decoder.layers.1.mlp.linear_fc1.weight", (0, 2)),
        ("megatron", "llama-biases", "decoder.layers.1.mlp.linear_fc1.bias", (0, 2)),
        ("megatron", "llama-biases", "decoder.layers.1.mlp.linear_fc2.bias", None),
        ("megatron", "nemotron", "decoder.layers.1.mlp.linear_fc1.weight", (0, 1)),
        ("megatron", "mixtral", "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight", (0, 2)),
        ("megatron", "mixtral", "decoder.layers.1.mlp.experts.experts.linear_fc2.weight", (2, 1)),
        ("megatron", "mixtral", "decoder.layers.mlp.router.weight", None),
        ("megatron", "llama", "embedding.word_embeddings.weight", (0, 1)),
        ("megatron", "llama", "decoder.final_layernorm.weight", None),
        ("meta", "llama", "layers.2.attention.wq.weight", (0, 1)),
        ("meta", "llama", "layers.2.feed_forward.w2.weight", (1, 1)),
    ],
)
def test_rows_say_how_ranks_share_a_tensor(dialect: str, case: str, name: str, cut: tuple[int, int] | None) -> None:
    row = translator(load_dialect(dialect), CONFIGS[case], {"vocab_multiple": 1, "centered": 0}).row_of(name)
    assert row is not None
    assert row.cut == cut


def test_a_tensor_that_no_row_knows_has_none() -> None:
    assert translator(load_dialect("meta"), LLAMA, {}).row_of("layers.0.lora.weight") is None
