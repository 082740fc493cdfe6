"""Dialects are checked with every architecture: each way in which a row can be wrong is told, with its line."""

from __future__ import annotations

import pytest

from bridge.core.errors import TableError
from bridge.core.mappings import mappings, parse_table
from bridge.tables.architectures.arch import load_arch
from bridge.tables.architectures.roles import load_roles
from bridge.tables.dialects.check import check_dialect, check_dialects
from bridge.tables.dialects.dialect import dialect_names, load_dialect, parse_dialect


@pytest.mark.slow
def test_the_dialects_of_the_house_spell_all_that_their_architectures_hold() -> None:
    assert dialect_names() == ["gguf", "megatron", "meta", "mlx", "torchtitan", "transformers", "trtllm"]
    assert check_dialects() == []


@pytest.mark.parametrize("name", dialect_names())
def test_every_architecture_of_a_dialect_has_a_table(name: str) -> None:
    for architecture in load_dialect(name).architectures:
        assert load_arch(architecture) is not None


def _said(old: str, new: str, name: str, architecture: str) -> str:
    text = (mappings() / f"dialects/{name}.toml").read_text()
    assert old in text
    table = load_arch(architecture)
    assert table is not None
    try:
        dialect = parse_dialect(parse_table(text.replace(old, new, 1), f"mappings/dialects/{name}.toml"), load_roles())
    except TableError as error:
        return str(error)
    return "\n".join(check_dialect(dialect, table, architecture))


QKV = "interleave(attn.q.weight, attn.k.weight, attn.v.weight, groups=kv_heads)"
FC1 = '"concat(column(mlp.gate.weight), column(mlp.up.weight))"'
DOWN = '"decoder.layers.{l}.mlp.linear_fc2.weight"                            = "row(mlp.down.weight)"'
LLAMA, MIXTRAL = "LlamaForCausalLM", "MixtralForCausalLM"


@pytest.mark.parametrize(
    ("old", "new", "name", "architecture", "says"),
    [
        (DOWN, "", "megatron", LLAMA, "mappings/dialects/megatron.toml has no row for `mlp.down.weight` of LlamaForC"),
        ('= "moe.router.weight"', '= "moe.router.choice_bias"', "megatron", MIXTRAL, "no row for `moe.router.weight`"),
        (FC1, '"concat(column(mlp.gate.weight), column(mlp.gate.weight))"', "megatron", LLAMA, "is written twice"),
        ('"attn.v.weight"', '"attn.k.weight"', "torchtitan", "Qwen3ForCausalLM", "is written twice"),
        (QKV, QKV.replace("kv_heads", "heads"), "megatron", LLAMA, "cannot make 6 groups out of 20 rows"),
        ('"row(attn.o.weight)"', f'"transpose({QKV})"', "megatron", LLAMA, "takes one contiguous matrix"),
        (FC1, '"concat(column(mlp.gate.weight), mlp.up.weight)"', "megatron", LLAMA, "split its parts differently"),
        ('.bias_w"', '.weight_w" ', "megatron", LLAMA, "duplicate rows are not valid"),
        (
            "[also] ", '[also]\n"output_layer.weight" = "final.norm.weight"\n#', "megatron", LLAMA,
            "`output_layer.weight` is also `column(pad(head.weight, multiple=vocab_multiple))` in LlamaForCausalLM",
        ),
        ('"mlp.up.bias"   ', '"mlp.upper.bias"', "torchtitan", LLAMA, "role `mlp.upper.bias` is unknown"),
        ('"mlp.up.bias"   ', '"embed.types.weight"', "torchtitan", LLAMA, "no row for `mlp.up.bias` of LlamaForC"),
        ("[for.llama3.also]", "[for.llama3.other]", "torchtitan", LLAMA, "a row's value is a string"),
        ("[for.qwen3]", "[for.qwen4]", "torchtitan", LLAMA, "`qwen4` is not a layout"),
        (FC1, '"concat(column(mlp.gate.weight), column(mlp.down.weight))"', "megatron", LLAMA, "cannot join (46, 74)"),
        (QKV, QKV.replace("kv_heads", "heads - heads"), "megatron", LLAMA, "cannot make 0 groups"),
        ("multiple=vocab_multiple", "multiple=heads - heads", "megatron", LLAMA, "up to a multiple of 0"),
        ('"row(attn.o.weight)"', '"row(attn.o.weight, heads=kv_heads - heads)"', "megatron", LLAMA, "between -4 heads"),
        ('"row(attn.o.weight)"', '"row(attn.o.bias)"', "megatron", LLAMA, "`row` needs a matrix"),
        ('"row(attn.o.weight)"', '"stack(attn.o.weight, experts=experts)"', "megatron", LLAMA, "belong to an expert"),
        ("shared_head", "shared_head = 3 #", "trtllm", LLAMA, "`shared_head` is a list of strings"),
        ("[architectures]", '[joined]\nx = 3\n[architectures]', "megatron", LLAMA, "[joined] is a string, not 3"),
        ("[ignore]", "[ignore]\nx = 3", "meta", LLAMA, "a value of [ignore] is a string, not 3"),
        ("multiple=vocab_multiple", "multiple=vocab_size", "megatron", LLAMA, "`vocab_size` is neither a dim"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_told(old: str, new: str, name: str, architecture: str, says: str) -> None:
    message = _said(old, new, name, architecture)
    assert says in message
    assert message.startswith("mappings/")


@pytest.mark.parametrize("ignored", ["norm.weight", "norm.*", "layers.{l}.attention.*"])
def test_a_row_that_is_ignored_as_well_is_told(ignored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (mappings() / "dialects/meta.toml").read_text().replace('"rope.freqs" ', f'"{ignored}" ')
    dialect = parse_dialect(parse_table(text, "mappings/dialects/meta.toml"), load_roles())
    monkeypatch.setattr("bridge.tables.dialects.check.load_dialect", lambda _: dialect)
    assert ignored.removesuffix("*") in check_dialects()[0]
    assert "the tensor is also under [ignore]" in check_dialects()[0]


def test_an_architecture_that_nobody_wrote_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    text = (mappings() / "dialects/meta.toml").read_text().replace("LlamaForCausalLM", "LamaForCausalLM")
    dialect = parse_dialect(parse_table(text, "mappings/dialects/meta.toml"), load_roles())
    monkeypatch.setattr("bridge.tables.dialects.check.load_dialect", lambda _: dialect)
    assert "no file of mappings/arch lists `LamaForCausalLM`" in check_dialects()[0]
