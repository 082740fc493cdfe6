from __future__ import annotations

import pytest

from bridge.core.errors import TableError
from bridge.core.mappings import mappings, parse_table
from bridge.tables.architectures.roles import load_roles
from bridge.tables.dialects.dialect import load_dialect, parse_dialect


def test_a_layer_has_the_rows_whose_roles_it_holds() -> None:
    dialect = load_dialect("trtllm")
    gated = frozenset({"mlp.gate.weight", "mlp.up.weight", "mlp.down.weight"})
    found = [row.name.rpartition("mlp.")[2] for row in dialect.rows_of("layer", gated)]
    assert found == ["fc.weight", "gate.weight", "proj.weight"]
    assert list(dialect.rows_of("last", gated)) == []


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"vocab(embed.tokens.weight)"', '"vocab(embed.token.weight)"', "nearest: embed.tokens.weight"),
        ('"vocab(embed.tokens.weight)"', '"vocabulary(embed.tokens.weight)"', "op `vocabulary` is unknown"),
        ('"vocab(embed.tokens.weight)"', '"reshape(embed.tokens.weight)"', "op `reshape` is unknown"),
        ('"vocab(embed.tokens.weight)"', '"vocab(embed.tokens.weight, heads=heads)"', "`vocab` has no count `heads`"),
        ("heads=kv_heads)", "heads=kv_head)", "`kv_head` is neither a dim"),
        ("heads=kv_heads)", "groups=kv_heads)", "`column` has no count `groups`"),
        ("mlp.router.weight", "mlp.{l}.router.weight.{e}", "role `moe.router.weight` has {l}; the row"),
        ('"transformer.ln_f.weight"', '"transformer.{l}.ln_f.weight"', "role `final.norm.weight` has no index"),
        ("[layer.gated]", "[layer.gate]", "nearest: gated"),
        ("[last]", "[final]", "unknown key `final`"),
        (
            '"stack(row(moe.down.weight), experts=experts)"',
            '"row(moe.down.weight)"',
            "role `moe.down.weight` has {e} and {l}",
        ),
        (
            '"stack(row(moe.down.weight), experts=experts)"',
            '"row(stack(moe.down.weight, experts=experts))"',
            "so it must be outermost",
        ),
        ('{l}.mlp.gate" = "', '{l}.mlp.gates" = "', "`transformer.layers.{l}.mlp.gates` has no row"),
        ('shared_head = ["gemma"]', 'shared_head = ["gemma9"]', "`gemma9` is not a layout"),
        ('= "attn.norm.weight"', '= ["attn.norm.weight"]', "a row's value is a string"),
    ],
)
def test_a_broken_row_is_named_with_its_line(old: str, new: str, says: str) -> None:
    text = (mappings() / "dialects/trtllm.toml").read_text()
    assert old in text
    with pytest.raises(TableError) as error:
        parse_dialect(parse_table(text.replace(old, new, 1), "mappings/dialects/trtllm.toml"), load_roles())
    assert says in str(error.value)
    assert "mappings/dialects/trtllm.toml:" in str(error.value)
