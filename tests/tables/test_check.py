from __future__ import annotations

import tomllib

import pytest

from bridge.core.errors import TableError
from bridge.core.mappings import mappings, parse_table, table_files
from bridge.tables.architectures.arch import load_arch, parse_arch
from bridge.tables.architectures.roles import load_roles, parse_roles
from bridge.tables.check import check, check_table


@pytest.mark.slow
def test_the_tables_of_the_house_hold_together() -> None:
    assert check() == []


def _broken(old: str, new: str, arch: str = "llama") -> str:
    """Return what the table says after `old` became `new`: the TableError, or the problems of the check."""
    text = (mappings() / f"arch/{arch}.toml").read_text()
    assert text.count(old) >= 1
    try:
        return "\n".join(
            check_table(parse_arch(parse_table(text.replace(old, new, 1), f"mappings/arch/{arch}.toml"), load_roles()))
        )
    except TableError as error:
        return str(error)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"attn.q.weight"', '"attn.query.weight"', "role `attn.query.weight` is unknown"),
        ('"attn.k.weight"', '"attn.q.weight"', "role `attn.q.weight` occurs 2 times"),
        ('"model.norm.weight"', '"model.{l}.weight"', "role `final.norm.weight` has no index, the row's name does not"),
        ("layers.{l}.input", "layers.{n}.input", "index `{n}` is unknown"),
        ("layers.{l}.input", "layers.x{l}.input", "an index is a whole component"),
        ("layers.{l}.input", "layers.0.input", "role `attn.norm.weight` has {l}"),
        ('prefix        = "model."', 'preffix = "model."', "unknown key `preffix`"),
        ("[ignore]", "[ignored]", "nearest: ignore"),
        ('vocab    = "vocab_size"', 'vocab    = "vocab_sizes"', "`vocab_sizes` is neither a dim nor a field"),
        ('vocab    = "vocab_size"', 'vocabs   = "vocab_size"', "dim `vocabs` is unknown"),
        ("mlp_bias            = false", "mlp_bias = false\nmlp_biases = false", "field `mlp_biases` is unused"),
        ('labels   = "id2label', 'types = "num_labels"\nlabels   = "id2label', "dim `types` is unused"),
        ('ffn      = "intermediate_size"\n', "", "needs the dim `ffn`"),
        ('layers   = "num_hidden_layers"\n', "", "index `{l}` needs the dim `layers`"),
        ('bare          = ["LlamaModel"]', 'bare = ["LamaModel"]', "architecture `LamaModel` is not listed"),
        ('[rows_for."LlamaForCausalLM"]', '[rows_for."LlamaForCausal"]', "nearest: LlamaForCausalLM"),
        ('[rows_if."mlp_bias"]', '[rows_if."mlp_biass"]', "nearest: mlp_bias"),
        ('"lm_head.weight" = "model', '"head.weight" = "model', "`head.weight` is tied but has no row"),
        ("computed from the config; a buffer that older versions of transformers saved", "", "needs a reason"),
        ('"attn.v.weight"', "3", "a row's value is a string, not 3"),
        ("self_attn.v_proj.weight", "self_attn.k_proj.weight", "duplicate rows are not valid"),
        ("architectures", "archs", "unknown key `archs`"),
    ],
)
def test_a_broken_table_is_told_with_its_row(old: str, new: str, says: str) -> None:
    message = _broken(old, new)
    assert says in message
    assert message.startswith("mappings/arch/llama.toml:")


def test_a_row_left_out_breaks_what_stands_together() -> None:
    row = next(r for r in load_arch("LlamaForCausalLM").rows if str(r.expr) == "mlp.up.weight")  # type: ignore[union-attr]
    assert "mlp.gate.weight, mlp.down.weight without mlp.up.weight" in _broken(row.place.row + "\n", "")


def test_conditions_that_overlap_are_told() -> None:
    message = _broken("decoder_sparse_step != 0", "decoder_sparse_step == 0", "qwen3_moe")
    assert "layer 0 has mlp.gate.weight and moe.gate.weight in Qwen3MoeForCausalLM" in message


def test_conditions_that_leave_a_gap_are_told() -> None:
    message = _broken("(l + 1) % decoder_sparse_step == 0", "(l + 1) % decoder_sparse_step == 1", "qwen3_moe")
    assert "layer 0 has none of mlp.gate.weight, mlp.fc1.weight, moe.gate.weight" in message


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("in ['mlp', '-']", "in ['mlp', '-', 'moe']", "layer 1 has mlp.fc1.weight and moe.fc1.weight in NemotronH"),
        ("in ['mlp', '-']", "in ['mlp', '-', 'moe']", "two rows for `backbone.layers.{l}.norm.weight` in NemotronH"),
        ("in ['mlp', '-']", "in ['-']", "layer 3 has none of ssm.x.weight, attn.q.weight, mlp.fc1.weight, moe"),
        ('mixer = ["ssm.x', 'mixer = ["ssm.y', "role `ssm.y.weight` is unknown"),
        ("[let]", "[lets]", "unknown key `lets`"),
        ("kinds[l] in ['mlp'", "kind[l] in ['mlp'", "`kind` is neither a dim nor a field"),
    ],
)
def test_a_table_of_layers_with_one_mixer_each_says_so_itself(old: str, new: str, says: str) -> None:
    assert says in _broken(old, new, arch="nemotron_h")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('experts.{e}.up_proj.weight"   = "moe.up', 'experts.{e}.up_proj.weight" = "attn.q', "no stack has the role"),
        ("experts.{e}.up_proj", "experts.up_proj", "role `moe.up.weight` has {l} and {e}, the row's name does not"),
        ('experts.{e}.up_proj.weight"   = "moe.up', 'experts.{e}.up_proj.weight" = "moe.gate', "occurs 2 times"),
    ],
)
def test_rows_of_each_expert_that_do_not_replace_the_stacks_are_told(old: str, new: str, says: str) -> None:
    assert says in _broken(old, new, arch="llama4")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("head_dim = \"'head_dim'", "head_dims = \"'head_dim'", "dim `head_dims` is unknown"),
        ("and full and global_head_dim", "and full and global_heads", "`global_heads` is neither a dim nor a field"),
        ('values       = ["attn.k', 'values = ["attn.v_proj', "role `attn.v_proj.weight` is unknown"),
        ("[one_of]", "[one_off]", "unknown key `one_off`"),
        ('[rows_if."not shared"]', '[rows_if."not share"]', "`share` is neither a dim nor a field"),
    ],
)
def test_a_table_whose_layers_have_widths_of_their_own_is_checked(old: str, new: str, says: str) -> None:
    message = _broken(old, new, arch="gemma4")
    assert says in message
    assert message.startswith("mappings/arch/gemma4.toml:")


def test_a_switch_is_tried_both_ways() -> None:
    assert "without attn.v.bias" in _broken('= "attn.v.bias"', '= "attn.k.bias"')


def test_a_count_that_may_be_null_is_tried_as_null() -> None:
    message = _broken('= "mla.q.weight"', '= "mla.q_a.weight"', "deepseek_v3")
    assert (
        "mla.q_a.weight without mla.q_a_norm.weight, mla.q_b.weight in DeepseekV3ForCausalLM with q_lora_rank = None"
        in message
    )


@pytest.mark.parametrize("row", ["moe.down.weight", "stack(mlp.down.weight, experts=experts)"])
def test_rows_of_stacks_are_stacks_of_what_each_expert_has(row: str) -> None:
    message = _broken('"stack(moe.down.weight, experts=experts)"', f'"{row}"', "qwen3_5_moe")
    assert "a stack of roles of which each expert has a tensor, under one condition" in message


def test_roles_are_checked() -> None:
    text = (mappings() / "roles.toml").read_text()
    for old, new, says in (
        ('"vocab, hidden"', '"vocabulary, hidden"', "nearest: vocab"),
        ('"attn.v.weight", "attn.o.weight"]', '"attn.v.weight", "attn.x.weight"]', "role `attn.x.weight` is unknown"),
        ("[norm]", "[norms]", "unknown key `norms`"),
        ('= ["l", "e"]', '= ["l", "x"]', "index `x` is unknown"),
    ):
        assert old in text
        with pytest.raises(TableError, match=says):
            parse_roles(parse_table(text.replace(old, new, 1), "mappings/roles.toml"))


def test_no_architecture_stands_in_two_files() -> None:
    names = [name for path in table_files("arch") for name in tomllib.loads(path.read_text())["architectures"]]
    assert len(names) == len(set(names))
