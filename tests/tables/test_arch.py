"""Every row meets values: roles read by the table, a forward from formulas, against the outputs of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import combinations

import pytest
import torch

from bridge.core.errors import BridgeError
from bridge.core.mappings import parse_table
from bridge.tables.architectures.arch import ArchTable, Row, load_arch, parse_arch
from bridge.tables.architectures.structure import match_table
from bridge.tables.dialects.layout import locate, role_shapes
from bridge.tables.expressions.grammar import Call, roles_in
from tests.tables.gathered import gathered
from tests.tables.reference_forward import Roles
from tests.tables.tiny import CASES, Tiny, reference, tiny

# transformers computes in float32, the reference in float64: 7.2e-6 of the largest logit is the most seen, in a gated
# delta net, which solves triangular systems; 1.3e-6 in any other case.
TOLERANCE = 2e-5
# What a wrong row must move at least; the least that any exchange of two roles moved is 2e-3.
NOTICED = 1e-3

# These hold hardly a row that another case does not: breaking them all takes its time.
VARIANTS = {
    "llama-tied",
    "llama-bare",
    "llama-sequence",
    "bert",
    "bert-masked",
    "bert-masked-untied",
    "bert-answers",
} | {"bert-sequence"}
SWEPT = [pytest.param(case, marks=[pytest.mark.slow] if case in VARIANTS else []) for case in CASES]

# A score of attention multiplies both, a step is the sum of both, both are added to one stream: a model with the two
# exchanged is the same model.
COMMUTING = [
    {"attn.q_rope_norm.weight", "attn.k_rope_norm.weight"}, {"ssm.step.bias", "ssm.step.offset"},
    {"moe.shared.fc2.bias", "moe.latent.up.bias"},
]  # fmt: skip

Make = Callable[[str], Tiny]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    return cache(lambda case: tiny(case, tmp_path_factory.mktemp(case)))


def _table(case: str) -> ArchTable:
    table = load_arch(CASES[case][0])
    assert table is not None
    return table


def _read(made: Tiny, table: ArchTable) -> dict[tuple[str, int | None, int | None], torch.Tensor]:
    matched = match_table(made.config, made.specs, table)
    found = locate(matched)
    roles = {role for role, _, _ in found}
    layers = {layer: table.names_of(matched.names, layer or 0) for _, layer, _ in found}
    shapes = {layer: role_shapes(table.roles.roles, roles, names) for layer, names in layers.items()}
    return {
        (role, layer, expert): torch.from_numpy(gathered(blocks, made.tensors).reshape(shapes[layer][role])).double()
        for (role, layer, expert), blocks in found.items()
    }


def _distance(case: str, made: Tiny, roles: Roles) -> float:
    return float((reference(case, made, roles) - made.outputs).abs().max() / made.outputs.abs().max())


@pytest.mark.parametrize("case", CASES)
def test_roles_give_the_logits_of_transformers(make: Make, case: str) -> None:
    model = make(case)
    assert _distance(case, model, _read(model, _table(case))) < TOLERANCE


def _noticed(case: str, model: Tiny, text: str, table: ArchTable) -> bool:
    """True when parsing, matching or the reference forward tells the broken table from the right one."""
    try:
        roles = _read(model, parse_arch(parse_table(text, "broken.toml"), table.roles))
        return not _distance(case, model, roles) < NOTICED  # NaN is noticed, too
    except (BridgeError, KeyError):  # a layer lacks a role that the forward asks for
        return True


def _active(table: ArchTable, model: Tiny) -> list[Row]:
    matched = match_table(model.config, model.specs, table)
    used = {id(entry.row) for entry, _, _ in matched.placed.values()}
    return [row for row in table.rows if id(row) in used]


def _rewrite(table: ArchTable, values: Mapping[int, str]) -> str:
    """Return the table's text with other values on the given lines."""
    lines = table.file.text.splitlines()
    for number, value in values.items():
        key, _, _ = lines[number - 1].partition(" = ")
        lines[number - 1] = f'{key} = "{value}"'
    return "\n".join(lines)


def _exchanges(table: ArchTable, model: Tiny) -> Iterator[tuple[str, str]]:
    """Yield every exchange of two roles, in two rows or inside one."""
    rows = _active(table, model)
    held = [(row, role) for row in rows for role in roles_in(row.expr)]  # type: ignore[arg-type]
    for (row, role), (other, another) in combinations(held, 2):
        if role == another or {role, another} in COMMUTING:
            continue
        swap = {role: another, another: role}
        values = {r.place.line: _renamed(r, swap) for r in (row, other)}
        yield f"{role} <-> {another}", _rewrite(table, values)


def _renamed(row: Row, names: Mapping[str, str]) -> str:
    text = str(row.expr)
    for at, name in enumerate(names):
        text = text.replace(name, f"\0{at}\0")
    for at, name in enumerate(names.values()):
        text = text.replace(f"\0{at}\0", name)
    return text


@pytest.mark.slow  # a second each, 50 to 200 tables
@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.product)])
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.product] * (case in VARIANTS)) for case in CASES]
)
def test_every_exchange_of_two_roles_is_noticed(make: Make, case: str, step: int) -> None:
    """Every third one here, all of them in `make test-all`."""
    model = make(case)
    table = _table(case)
    broken = list(_exchanges(table, model))
    assert len(broken) > 50
    broken = broken[::step]
    assert [what for what, text in broken if not _noticed(case, model, text, table)] == []


@pytest.mark.parametrize("case", SWEPT)
def test_every_forgotten_op_is_noticed(make: Make, case: str) -> None:
    model = make(case)
    table = _table(case)
    for row in _active(table, model):
        if isinstance(row.expr, Call) and len(row.expr.args) == 1:
            text = _rewrite(table, {row.place.line: str(row.expr.args[0])})
            assert _noticed(case, model, text, table), row.place.row


@pytest.mark.parametrize("case", SWEPT)
def test_a_rope_permutation_too_many_is_noticed(make: Make, case: str) -> None:
    model = make(case)
    table = _table(case)
    for row in _active(table, model):
        for role, heads in (("attn.q.weight", "heads"), ("attn.k.weight", "kv_heads")):
            if role in roles_in(row.expr):  # type: ignore[arg-type]
                text = _rewrite(table, {row.place.line: str(row.expr).replace(role, f"rope({role}, heads={heads})")})
                assert _noticed(case, model, text, table), row.place.row


@pytest.mark.parametrize("case", SWEPT)
def test_every_row_left_out_is_noticed(make: Make, case: str) -> None:
    model = make(case)
    table = _table(case)
    for row in _active(table, model):
        lines = table.file.text.splitlines()
        del lines[row.place.line - 1]
        assert _noticed(case, model, "\n".join(lines), table), row.place.row
