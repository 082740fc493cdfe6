"""What `qbridge show` says of tables: an architecture's alone, and beside a dialect's."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from bridge.cli.check import check_path
from bridge.cli.main import app
from bridge.cli.show import describe
from bridge.core.errors import UsageError
from bridge.core.mappings import mappings
from bridge.tables.dialects.dialect import dialect_names, load_dialect
from bridge.tables.dialects.listing import Line, find_table, merged
from bridge.tables.expressions.grammar import roles_in

LAYER, THEIRS = "model.layers.{l}", "decoder.layers.{l}"


def _lines(name: str, dialect: str, also: bool = False) -> list[Line]:
    table = find_table(name)
    assert table is not None
    return merged(table, load_dialect(dialect), name, also)


def test_a_tensor_stands_beside_the_one_that_holds_its_role() -> None:
    lines = {line.tensor: line for line in _lines("llama", "megatron")}
    line = lines[f"{LAYER}.mlp.up_proj.weight"]
    assert (line.roles, line.native) == ("mlp.up.weight", f"{THEIRS}.mlp.linear_fc1.weight")
    assert line.made == "concat(column(mlp.gate.weight), column(mlp.up.weight))"
    assert lines[f"{LAYER}.self_attn.q_proj.bias"].when == "attention_bias"


def test_what_a_layer_may_be_gives_a_line_each() -> None:
    norm = [line.native for line in _lines("deepseek_v3", "megatron") if "post_attention" in line.tensor]
    assert norm == [f"{THEIRS}.mlp.linear_fc1.layer_norm_weight", f"{THEIRS}.pre_mlp_layernorm.weight"]
    norm = [line.native for line in _lines("mixtral", "megatron") if "post_attention" in line.tensor]
    assert norm == [f"{THEIRS}.pre_mlp_layernorm.weight"]


def test_layouts_of_other_architectures_are_left_out() -> None:
    for name, made in (("llama", "rope(attn.q.weight, heads=heads)"), ("qwen3", "attn.q.weight")):
        (line,) = [line for line in _lines(name, "torchtitan") if line.roles == "attn.q.weight"]
        assert (line.native, line.made) == ("layers.{l}.attention.qkv_linear.wq.weight", made)


def test_spellings_that_are_only_read_are_shown_on_request() -> None:
    lines = [line for line in _lines("llama", "torchtitan", also=True) if line.roles == "head.weight"]
    assert [(line.native, line.written) for line in lines] == [("lm_head.weight", True), ("output.weight", False)]


def test_a_role_that_the_dialect_cannot_say_has_the_reason() -> None:
    (line,) = [line for line in _lines("llama", "meta") if line.roles == "mlp.up.bias"]
    assert (line.native, line.made) == ("", "Meta's models have no biases")


@pytest.mark.parametrize("dialect", dialect_names())
def test_every_tensor_of_every_architecture_is_shown(dialect: str) -> None:
    for architecture in load_dialect(dialect).architectures:
        table = find_table(architecture)
        assert table is not None
        shown = {line.tensor for line in _lines(architecture, dialect)}
        rows = [row for row in table.rows if not row.only or architecture in row.only]
        assert shown == {row.name for row in rows if row.expr and roles_in(row.expr)}


def test_the_command_prints_both() -> None:
    shown = CliRunner().invoke(app, ["show", "Qwen3ForCausalLM", "--dialect", "megatron"]).output
    assert f"{THEIRS}.self_attention.q_layernorm.weight" in shown.replace("\n", " ")
    data, _ = describe("gpt2")
    assert data[0] == {"tensor": "transformer.wte.weight", "roles": "embed.tokens.weight", "when": ""}


@pytest.mark.parametrize(
    ("what", "dialect", "says"),
    [
        ("phi3", "megatron", "mappings/dialects/megatron.toml has no layout for 'phi3'"),
        (
            "llama",
            "megatrn",
            "no dialect named 'megatrn'; known: gguf, megatron, meta, mlx, torchtitan, transformers, trtllm; near",
        ),
        ("lama", "meta", "no table for 'lama'"),
        ("lama", None, "nearest: llama"),
    ],
)
def test_unknown_names_are_told_with_what_is_near(what: str, dialect: str | None, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        describe(what, dialect=dialect)
    assert says in str(caught.value)


def test_a_dialect_of_ones_own_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = (mappings() / "dialects/meta.toml").read_text()
    path.write_text(text)
    assert check_path(path) == []
    path.write_text(text.replace('"norm.weight" ', '"norm.bias" ').replace('"final.norm.weight"', '"final.norm.bias"'))
    (problem,) = check_path(path)
    assert f"{path} has no row for `final.norm.weight` of LlamaForCausalLM" in problem.text
    path.write_text(text.replace("LlamaForCausalLM", "LamaForCausalLM"))
    (problem,) = check_path(path)
    assert problem.text == "no table lists `LamaForCausalLM`"
