from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bridge.core.errors import PlanError, TableError
from bridge.core.mappings import Place
from bridge.tables.expressions.grammar import Call, Expr, Formula, Ref, parse_formula, parse_row, parse_shape, roles_in
from bridge.tables.expressions.ops import OPS
from bridge.tables.expressions.shapes import row_shape

ROLES = ["attn.q.weight", "attn.k.weight", "attn.v.weight", "mlp.fc1.weight"]
DIMS = ["heads", "kv_heads", "head_dim"]
ROW = '"qkv.weight" = "..."'
PLACE = Place("mappings/dialects/megatron.toml", 9, ROW)


def _parse(text: str) -> Expr:
    return parse_row(text, PLACE, ROLES, DIMS)


def _error(text: str) -> str:
    with pytest.raises(TableError) as caught:
        _parse(text)
    return str(caught.value)


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> Expr:
    if depth == 0 or draw(st.booleans()):
        return Ref(draw(st.sampled_from(ROLES)))
    op = OPS[draw(st.sampled_from(sorted(OPS)))]
    args = tuple(draw(expressions(depth=depth - 1)) for _ in range(op.most or 3))
    counts = ((key, parse_formula(draw(st.sampled_from([*DIMS, "2", "-1"])), PLACE)) for key in op.counts)
    return Call(op.name, args, tuple(counts))


@pytest.mark.slow
@given(expressions())
def test_printing_and_parsing_are_inverse(expr: Expr) -> None:
    assert _parse(str(expr)) == expr


def test_roles_are_read_left_to_right() -> None:
    assert roles_in(_parse("transpose(concat(attn.v.weight, attn.q.weight))")) == ("attn.v.weight", "attn.q.weight")


def test_unknown_role_names_the_nearest_of_its_stem() -> None:
    message = _error("attn.query.weight")
    assert message.splitlines()[0] == "mappings/dialects/megatron.toml:9: role `attn.query.weight` is unknown"
    assert f"row    {ROW}" in message
    assert "known: attn.k.weight, attn.q.weight, attn.v.weight; nearest: attn.q.weight" in message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("interlave(attn.q.weight, attn.k.weight)", "nearest: interleave"),
        ("interleave(attn.q.weight, attn.k.weight)", "`interleave` needs groups"),
        ("interleave(attn.q.weight, attn.k.weight, group=heads)", "nearest: groups"),
        ("interleave(attn.q.weight, attn.k.weight, groups=kvheads)", "nearest: kv_heads"),
        ("transpose(attn.q.weight, attn.k.weight)", "takes 1 inputs, not 2"),
        ("concat(attn.q.weight)", "takes 2 or more inputs, not 1"),
        ("transpose(attn.q.weight, dim=1)", "takes no count"),
        ("rope(attn.q.weight)", "`rope` needs heads"),
        ("attn.q.weight + 1", "neither a role nor an op"),
        ("transpose(*attn)", "neither a role nor an op"),
        ("(lambda: 1)()", "neither a role nor an op"),
        ("concat(attn.q.weight,", "is not an expression"),
        ("rope(attn.q.weight, heads=heads.real)", "is not allowed here"),
    ],
)
def test_a_row_outside_the_grammar_is_refused(text: str, says: str) -> None:
    assert says in _error(text)


@pytest.mark.parametrize(
    ("text", "fields", "value"),
    [
        ("head_dim or hidden // heads", {"head_dim": None, "hidden": 48, "heads": 6}, 8),
        ("head_dim or hidden // heads", {"head_dim": 10, "hidden": 48, "heads": 6}, 10),
        ("n_inner or 4 * n_embd", {"n_inner": None, "n_embd": 60}, 240),
        ("ids and len(ids) or n", {"ids": {"0": "a", "1": "b", "2": "c"}, "n": 2}, 3),
        ("ids and len(ids) or n", {"ids": None, "n": 2}, 2),
        ("-a + b % 3", {"a": 1, "b": 5}, 1),
        ("not (dense and l in dense)", {"dense": [1], "l": 1}, False),
        ("l not in dense", {"dense": [1], "l": 2}, True),
        ("rates and rates['sparse'] or 4", {"rates": {"sparse": 8}}, 8),
        ("(l + 1) % step == 0", {"l": 1, "step": 2}, True),
        ("a != b and a <= 3 and b > 3 and a < b and b >= 4", {"a": 3, "b": 4}, True),
    ],
)
def test_formulas_compute_what_python_would(text: str, fields: dict[str, object], value: object) -> None:
    formula = parse_formula(text, PLACE, list(fields))
    assert formula.value(fields) == value
    assert formula.value(fields) == eval(text, dict(fields))
    assert formula.names == set(fields)


@pytest.mark.parametrize(
    "text", ["open('x')", "a.b", "{1}", "range(a, b)", "a ** b", "a if b else c", "1.5", "a < b < c", "f'{a}'"]
)
def test_a_formula_outside_the_white_list_is_refused(text: str) -> None:
    with pytest.raises(TableError, match="not allowed"):
        parse_formula(text, PLACE)


@pytest.mark.parametrize(
    ("text", "fields", "says"),
    [
        ("hidden // heads", {"hidden": 48, "heads": None}, "the config has heads = None"),
        ("hidden // heads", {"hidden": 48, "heads": 0}, "heads is 0 in the config"),
        ("hidden", {"hidden": "48"}, "must be a whole number, it is '48'; given hidden = '48'"),
        ("hidden", {"hidden": True}, "must be a whole number"),
        ("len(ids)", {"ids": 3}, "needs a list, the config has ids = 3"),
        ("ids[2]", {"ids": [3, 4]}, "needs a list with an entry 2, the config has [3, 4]"),
        ("ids[at]", {"ids": [3, 4], "at": -1}, "needs a list with an entry -1"),
        ("rates['sparse']", {"rates": {"dense": 8}}, "needs an object with 'sparse', the config has {'dense': 8}"),
        ("rates['sparse']", {"rates": [8]}, "needs an object with 'sparse', the config has [8]"),
        ("max(ids)", {"ids": []}, "needs a number or a list of them, the config has []"),
        ("max(ids)", {"ids": ["3"]}, "needs a number or a list of them, the config has ['3']"),
        ("3 in ids", {"ids": None}, "needs a list, the config has ids = None"),
    ],
)
def test_a_config_of_the_wrong_type_is_told(text: str, fields: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError, match=re.escape(says)):
        parse_formula(text, PLACE).count(fields)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("range(layers)", (0, 1, 2, 3, 4)),
        ("dense or []", []),
        ("max(layers)", 5),
        ("pattern[1]", 1),
        ("of_layers[3]['width']", 7),
        ("of_layers[12]['width']", 9),
        ("of_layers[2] or 5", 5),
        ("max([2, layers, 3])", 5),
        ("sliding(layers, [1, 1])", ["sliding", "full", "sliding", "full", "sliding"]),
        ("sliding(layers, pattern)", ["sliding", "sliding", "sliding", "full", "sliding"]),
        ("sliding(layers, [0, 2])", ["full"] * 5),
    ],
)
def test_lists_and_functions_of_layers(text: str, value: object) -> None:
    found = parse_formula(text, PLACE).value(
        {"layers": 5, "pattern": (3, 1), "dense": None, "of_layers": {"03": {"width": 7}, "12": {"width": 9}}}
    )
    kinds = [f"{kind}_attention" for kind in value] if "sliding" in text and isinstance(value, list) else value
    assert found == kinds


@pytest.mark.parametrize("pattern", [None, 6, [0, 0], [-1, 2], [1]])
def test_a_pattern_is_two_counts(pattern: object) -> None:
    with pytest.raises(PlanError, match=r"sliding\(layers, pattern\)` needs two counts of layers, it has"):
        parse_formula("sliding(layers, pattern)", PLACE).value({"layers": 5, "pattern": pattern})


@pytest.mark.parametrize(
    ("text", "needs"),
    [("a", {"a"}), ("a or b", {"b"}), ("a or False", set()), ("(a or 0) // b", {"b"}), ("len(a) + a % b", {"a", "b"})],
)
def test_what_stands_before_an_or_may_be_missing(text: str, needs: set[str]) -> None:
    assert parse_formula(text, PLACE).needs == needs


def test_a_word_has_a_letter_for_each_layer() -> None:
    formula = parse_formula("len(kinds) - 2 and kinds[l] in ['full', '*']", PLACE)
    assert [formula.value({"kinds": "M*E", "l": layer}) for layer in range(3)] == [False, True, False]
    with pytest.raises(PlanError, match=r"needs a list with an entry 3, the config has 'M\*E'"):
        formula.value({"kinds": "M*E", "l": 3})


def test_a_formula_stands_for_its_name() -> None:
    let = {"kinds": parse_formula("listed or word", PLACE)}
    formula = parse_formula("kinds[l] == 'M'", PLACE, ["listed", "word", "l"], let)
    assert str(formula) == "kinds[l] == 'M'"
    assert formula.names == {"listed", "word", "l"}
    assert formula.value({"listed": None, "word": "*M", "l": 1})


def test_shapes_are_formulas_with_commas() -> None:
    assert [str(f) for f in parse_shape("heads * head_dim, 2", PLACE, DIMS)] == ["heads * head_dim", "2"]


def test_equal_formulas_are_equal_however_they_are_spaced() -> None:
    assert parse_formula("a*b", PLACE) == parse_formula("a * b", PLACE)
    assert isinstance(parse_formula("a", PLACE), Formula)


def test_a_count_that_does_not_divide_names_the_one_that_does() -> None:
    row = _parse("interleave(attn.q.weight, attn.k.weight, attn.v.weight, groups=heads)")
    shapes = {"attn.q.weight": (60, 48), "attn.k.weight": (20, 48), "attn.v.weight": (20, 48)}
    told = {"attn.k.weight": "kv_heads * head_dim, hidden"}
    with pytest.raises(TableError) as caught:
        row_shape(row, shapes, {"heads": 6, "kv_heads": 2, "head_dim": 10}, PLACE, told)
    assert str(caught.value).splitlines() == [
        "mappings/dialects/megatron.toml:9: `interleave` cannot make 6 groups out of 20 rows",
        f"  row    {ROW}",
        "  input  attn.k.weight (20, 48) = kv_heads * head_dim, hidden",
        "  hint   groups=kv_heads? groups=head_dim?",
    ]
