"""Rows of a dialect over slices, made by a few lines of NumPy and held to the layout that TensorRT-LLM documents."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bridge.core.values import Slice, TensorSpec
from bridge.tables.architectures.match import Matched
from bridge.tables.architectures.structure import match_table
from bridge.tables.dialects.dialect import load_dialect
from bridge.tables.dialects.layout import lay_out, locate
from bridge.tables.expressions.ops import Rank
from bridge.tables.expressions.regions import Block, Refusal, split
from tests.tables.checkpoints import GPT2, LLAMA, MIXTRAL, headers

Tensors = dict[str, np.ndarray]
PHI3 = LLAMA | {"architectures": ["Phi3ForCausalLM"]}
GEMMA2 = LLAMA | {"architectures": ["Gemma2ForCausalLM"]}
WHOLE = Rank()
HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, EXPERTS = 6, 2, 10, 48, 80, 5


def checkpoint(config: dict[str, Any]) -> tuple[Matched, Tensors]:
    """A checkpoint in which every value differs from every other."""
    specs = headers(config)
    values, tensors = 0, {}
    for name, spec in specs.items():
        tensors[name] = np.arange(values, values + spec.size, dtype=np.int64).reshape(spec.shape)
        values += spec.size
    return match_table(config, specs), tensors


def laid_out(
    config: dict[str, Any], row: str, rank: Rank = WHOLE, layer: int | None = 1
) -> tuple[np.ndarray, Tensors, tuple[Slice, ...]]:
    """The tensor of one row on one rank, made of its slices alone; the checkpoint; the slices."""
    matched, tensors = checkpoint(config)
    roles = locate(matched)
    held = {role for role, at, _ in roles if at == layer}
    (found,) = [r for r in load_dialect("trtllm").rows if r.name == row and held.issuperset(r.roles)]
    blocks = lay_out(found.expr, roles, (layer, None), matched.names, rank)
    specs = {name: TensorSpec(name, tensor.shape, "int64") for name, tensor in tensors.items()}
    slices = tuple(block.slice(specs.get(block.source)) for block in blocks)
    return np.concatenate([filled(part, tensors) for part in slices]), tensors, slices


def filled(part: Slice, tensors: Tensors) -> np.ndarray:
    if not part.source:
        assert part.rows and part.cols
        return np.zeros((part.rows[1] - part.rows[0], part.cols[1] - part.cols[0]), np.int64)
    cut = (
        tensors[part.source][tuple(slice(*(span or (None, None))) for span in (part.rows, part.cols))[:2]]
        if (tensors[part.source].ndim == 2)
        else tensors[part.source][slice(*(part.rows or (None, None)))]
    )
    return cut.T if part.transposed else cut


def layer(tensors: Tensors, name: str) -> np.ndarray:
    return tensors[f"model.layers.1.{name}"]


def heads(matrix: np.ndarray, first: int, stop: int) -> np.ndarray:
    return matrix[first * HEAD_DIM : stop * HEAD_DIM]


QKV = "transformer.layers.{l}.attention.qkv.weight"


@pytest.mark.parametrize("rank", [0, 1])
def test_each_of_two_ranks_holds_its_heads_of_q_then_k_then_v(rank: int) -> None:
    made, tensors, slices = laid_out(LLAMA, QKV, Rank(rank, 2))
    q, k, v = (layer(tensors, f"self_attn.{x}_proj.weight") for x in "qkv")
    expected = [heads(q, 3 * rank, 3 * rank + 3), heads(k, rank, rank + 1), heads(v, rank, rank + 1)]
    assert np.array_equal(made, np.concatenate(expected))
    assert [part.module for part in slices] == [f"model.layers.1.self_attn.{x}_proj" for x in "qkv"]


@pytest.mark.parametrize(("rank", "kv"), [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1)])
def test_key_and_value_heads_repeat_where_there_are_fewer_than_ranks(rank: int, kv: int) -> None:
    made, tensors, _ = laid_out(LLAMA, QKV, Rank(rank, 6))
    q, k, v = (layer(tensors, f"self_attn.{x}_proj.weight") for x in "qkv")
    assert np.array_equal(made, np.concatenate([heads(q, rank, rank + 1), heads(k, kv, kv + 1), heads(v, kv, kv + 1)]))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_fused_qkv_is_cut_as_if_it_were_three(rank: int) -> None:
    made, tensors, _ = laid_out(PHI3, QKV, Rank(rank, 2))
    fused = layer(tensors, "self_attn.qkv_proj.weight")
    q, k, v = np.split(fused, np.cumsum([HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]))
    expected = [heads(q, 3 * rank, 3 * rank + 3), heads(k, rank, rank + 1), heads(v, rank, rank + 1)]
    assert np.array_equal(made, np.concatenate(expected))


def test_a_fused_qkv_on_one_rank_is_one_whole_slice() -> None:
    _, _, slices = laid_out(PHI3, QKV)
    module = "model.layers.1.self_attn.qkv_proj"
    assert slices == (Slice(f"{module}.weight", module=module),)


@pytest.mark.parametrize(("row", "half"), [("mlp.fc", 0), ("mlp.gate", 1)])
def test_half_of_a_fused_gate_and_up_is_a_tensor_of_its_own(row: str, half: int) -> None:
    made, tensors, _ = laid_out(PHI3, f"transformer.layers.{{l}}.{row}.weight", Rank(1, 2))
    fused = layer(tensors, "mlp.gate_up_proj.weight")
    assert np.array_equal(made, fused[half * FFN : (half + 1) * FFN][FFN // 2 :])


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_conv1d_is_cut_in_its_own_axes_and_turned(rank: int) -> None:
    made, tensors, slices = laid_out(GPT2, QKV, Rank(rank, 3))
    fused = tensors["transformer.h.1.attn.c_attn.weight"]  # in, q | k | v
    expected = [part.T[rank * 20 : rank * 20 + 20] for part in np.split(fused, 3, axis=1)]
    assert np.array_equal(made, np.concatenate(expected))
    assert all(part.transposed and part.rows is None for part in slices)


@pytest.mark.parametrize("rank", [0, 1])
def test_row_parallel_matrices_are_cut_along_in(rank: int) -> None:
    made, tensors, _ = laid_out(LLAMA, "transformer.layers.{l}.attention.dense.weight", Rank(rank, 2))
    assert np.array_equal(made, layer(tensors, "self_attn.o_proj.weight")[:, 30 * rank : 30 * rank + 30])
    made, tensors, _ = laid_out(GPT2, "transformer.layers.{l}.mlp.proj.weight", Rank(rank, 2))
    assert np.array_equal(made, tensors["transformer.h.1.mlp.c_proj.weight"][120 * rank : 120 * rank + 120].T)


def test_crossed_names_of_the_mlp() -> None:
    made, tensors, _ = laid_out(LLAMA, "transformer.layers.{l}.mlp.fc.weight")
    assert np.array_equal(made, layer(tensors, "mlp.gate_proj.weight"))
    made, tensors, _ = laid_out(LLAMA, "transformer.layers.{l}.mlp.gate.weight")
    assert np.array_equal(made, layer(tensors, "mlp.up_proj.weight"))


@pytest.mark.parametrize("rank", [0, 1])
def test_experts_are_stacked_with_up_before_gate_and_halves_are_cut_apart(rank: int) -> None:
    made, tensors, _ = laid_out(MIXTRAL, "transformer.layers.{l}.mlp.fc.weight", Rank(rank, 2))
    experts = [
        [layer(tensors, f"block_sparse_moe.experts.{e}.{w}.weight") for w in ("w3", "w1")] for e in range(EXPERTS)
    ]
    share = slice(rank * FFN // 2, (rank + 1) * FFN // 2)
    expected = np.stack([np.concatenate([w3[share], w1[share]]) for w3, w1 in experts])
    assert np.array_equal(made.reshape(EXPERTS, FFN, HIDDEN), expected)
    made, tensors, _ = laid_out(MIXTRAL, "transformer.layers.{l}.mlp.proj.weight", Rank(rank, 2))
    expected = np.stack([layer(tensors, f"block_sparse_moe.experts.{e}.w2.weight")[:, share] for e in range(EXPERTS)])
    assert np.array_equal(made.reshape(expected.shape), expected)


def test_biases_are_cut_with_columns_and_whole_with_rows() -> None:
    made, tensors, _ = laid_out(GPT2, "transformer.layers.{l}.attention.qkv.bias", Rank(1, 2))
    parts = np.split(tensors["transformer.h.1.attn.c_attn.bias"], 3)
    assert np.array_equal(made, np.concatenate([part[30:] for part in parts]))
    made, tensors, slices = laid_out(GPT2, "transformer.layers.{l}.attention.dense.bias", Rank(1, 2))
    assert np.array_equal(made, tensors["transformer.h.1.attn.c_proj.bias"])
    assert slices[0].module == "", "nothing smooths a bias"


@pytest.mark.parametrize("rank", [0, 1])
def test_the_vocabulary_is_padded_before_it_is_cut(rank: int) -> None:
    made, tensors, _ = laid_out(LLAMA, "transformer.vocab_embedding.weight", Rank(rank, 2, 64), None)
    padded = np.zeros((128, HIDDEN), np.int64)
    padded[:97] = tensors["model.embed_tokens.weight"]
    assert np.array_equal(made, padded[64 * rank : 64 * rank + 64])


def test_norms_that_are_stored_less_one_are_shifted() -> None:
    matched, _ = checkpoint(GEMMA2)
    assert locate(matched)["final.norm.weight", None, None][0].shift == 1


def test_a_tied_head_is_cut_out_of_the_embedding_under_its_own_module() -> None:
    made, tensors, slices = laid_out(LLAMA | {"tie_word_embeddings": True}, "lm_head.weight", Rank(1, 2), None)
    assert np.array_equal(made[:48], tensors["model.embed_tokens.weight"][49:])
    assert slices[0].module == "lm_head"


@pytest.mark.parametrize(
    ("row", "ranks", "says"),
    [
        (QKV, 4, "6 heads cannot be shared evenly by tp=4 ranks"),
        ("transformer.layers.{l}.mlp.fc.weight", 3, "out = 80 cannot be shared evenly by tp=3 ranks"),
        ("transformer.layers.{l}.mlp.proj.weight", 3, "in = 80 cannot be shared evenly by tp=3 ranks"),
        ("transformer.layers.{l}.attention.dense.weight", 5, "6 heads cannot be shared evenly by tp=5 ranks"),
    ],
)
def test_what_does_not_divide_is_refused(row: str, ranks: int, says: str) -> None:
    with pytest.raises(Refusal, match=says):
        laid_out(LLAMA, row, Rank(0, ranks))


def test_key_heads_that_cannot_be_repeated_evenly_are_refused() -> None:
    config = LLAMA | {"num_attention_heads": 9, "num_key_value_heads": 6}
    with pytest.raises(Refusal, match="tp=9 is not a multiple of the 6 heads that the ranks would have to repeat"):
        laid_out(config, QKV, Rank(0, 9))


def test_a_matrix_is_split_where_its_blocks_end_and_where_they_do_not() -> None:
    blocks = (Block("a", (5, 9), (0, 3)), Block("b", (0, 6), (0, 3)))
    parts = split(blocks, [4, 0, 2, 4])
    assert parts == [(blocks[0],), (), (Block("b", (0, 2), (0, 3)),), (Block("b", (2, 6), (0, 3)),)]
    assert split(blocks, [7, 3])[0] == (blocks[0], Block("b", (0, 3), (0, 3)))


def test_a_head_whose_rows_are_reordered_stays_whole() -> None:
    with pytest.raises(Refusal, match="rows 0 to 6 would cut through a head of 4 reordered rows"):
        split((Block("a", (0, 8), (0, 3), rope=4),), [6, 2])
