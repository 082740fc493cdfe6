"""Roles of tensors (`mappings/roles.toml`), and the inputs of matrices (`[inputs]`).

    "attn.q.weight, attn.k.weight, attn.v.weight" = "attn.norm.weight"     they read one tensor, that norm's output

input = norm's role | previous(norm's role, norm's role) | residual | shared(input)

`previous(a, b)` is the output of `a` in the layer before, for the first layer that of `b`. `residual` is not the output
of a norm. `shared(...)`: something else, such as a residual connection, reads it too, so nothing can be folded into the
norm. The rows of roles.toml apply to every table; a table's own row replaces those that name one of its roles.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from bridge.core.mappings import Place, TableFile, mappings, read_table
from bridge.core.text import nearest
from bridge.tables.expressions.grammar import Formula, parse_shape

KINDS = ("embedding", "norm", "linear", "bias", "mix", "router", "recurrent", "grouped", "head")


@dataclass(frozen=True)
class InputRow:
    """Matrices that read the output of `norm` ("": of no norm); if it is the previous layer's, layer 0 has `first`."""

    readers: tuple[str, ...]
    place: Place
    norm: str = ""
    first: str = ""
    shared: bool = False


def parse_inputs(file: TableFile, roles: Mapping[str, Role], section: str = "inputs") -> tuple[InputRow, ...]:
    """Parse `[inputs]` or `[reads]`; TableError if a role is unknown, of another kind or listed twice."""
    rows = []
    seen: set[str] = set()
    for key, text in file.data.get(section, {}).items():
        place = file.place(section, key)
        readers = tuple(part.strip() for part in key.split(","))
        for reader in readers:
            _role(reader, ("linear", "router", "recurrent", "head"), roles, place)
            if reader in seen:
                raise place.error(f"role `{reader}` has two inputs")
            seen.add(reader)
        rows.append(_input(str(text), readers, place, roles))
    return tuple(rows)


def merge_inputs(own: tuple[InputRow, ...], common: tuple[InputRow, ...]) -> tuple[InputRow, ...]:
    """A table's own rows, and the common rows that share no role with them."""
    covered = {reader for row in own for reader in row.readers}
    return (*own, *(row for row in common if not covered & set(row.readers)))


def _input(text: str, readers: tuple[str, ...], place: Place, roles: Mapping[str, Role]) -> InputRow:
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise place.error(f"`{text}` is not an expression: {error.msg}") from error
    shared = False
    match node:
        case ast.Call(func=ast.Name("shared"), args=[inner], keywords=[]):
            node, shared = inner, True
    match node:
        case ast.Name("residual"):
            return InputRow(readers, place, shared=shared)
        case ast.Attribute():
            return InputRow(readers, place, _norm(node, roles, place), shared=shared)
        case ast.Call(func=ast.Name("previous"), args=[norm, first], keywords=[]):
            return InputRow(readers, place, _norm(norm, roles, place), _norm(first, roles, place), shared)
    hint = "attn.norm.weight, previous(mlp.add_norm.weight, embed.norm.weight), residual, shared(...)"
    raise place.error(f"`{ast.unparse(node)}` is not an input", hint=hint)


def _norm(node: ast.expr, roles: Mapping[str, Role], place: Place) -> str:
    return _role(ast.unparse(node), ("norm",), roles, place)


def _role(name: str, kinds: tuple[str, ...], roles: Mapping[str, Role], place: Place) -> str:
    known = [role.name for role in roles.values() if role.kind in kinds]
    if name not in roles:
        raise place.error(f"role `{name}` is unknown", hint=nearest(name, known))
    if name not in known:
        raise place.error(f"role `{name}` is a {roles[name].kind}, not a {kinds[0]}", hint=nearest(name, known))
    return name


@dataclass(frozen=True)
class Role:
    name: str
    kind: str
    shape: tuple[Formula, ...]


@dataclass(frozen=True)
class Roles:
    """The vocabulary: roles, the dims of their shapes, named indices, sets of roles.

    `prune`: dims that can be cut, with the indices that each have a choice of their own.
    `one_of`: a layer has exactly one role of the set. `together`: it has all of them or none. `inputs`: the inputs of
    matrices, unless a table gives others. `reads`: matrix -> the norm that it reads, where `inputs` does not tell.
    """

    roles: Mapping[str, Role]
    dims: Mapping[str, str]
    index: Mapping[str, str]
    per: Mapping[str, tuple[str, ...]]
    prune: Mapping[str, tuple[str, ...]]
    one_of: Mapping[str, tuple[str, ...]]
    together: Mapping[str, tuple[str, ...]]
    inputs: tuple[InputRow, ...]
    reads: Mapping[str, str]
    file: TableFile

    def indices(self, role: str) -> tuple[str, ...]:
        """Return the indices of a role: none, the layer, or layer and expert."""
        stems = [stem for stem in self.per if role.startswith(f"{stem}.")]
        return self.per[max(stems, key=len)] if stems else ()


@cache
def load_roles() -> Roles:
    """Read `mappings/roles.toml`, cached: parsing it takes longer than parsing a table."""
    return parse_roles(read_table(mappings() / "roles.toml"))


def parse_roles(file: TableFile) -> Roles:
    """Parse the vocabulary."""
    file.known_keys([*KINDS, "dims", "index", "per", "prune", "one_of", "together", "inputs", "reads"])
    dims = file.data["dims"]
    roles: dict[str, Role] = {}
    for kind in KINDS:
        for name, shape in file.data.get(kind, {}).items():
            place = file.place(kind, name)
            if name in roles:
                raise place.error(f"role `{name}` has two kinds: {roles[name].kind}, {kind}")
            roles[name] = Role(name, kind, parse_shape(shape, place, dims))
    for index, dim in file.data["index"].items():
        if dim not in dims:
            raise file.place("index", index).error(f"index `{index}` counts unknown `{dim}`", hint=nearest(dim, dims))
    return Roles(
        roles, dims, file.data["index"], sets_of(file, "per", "index", file.data["index"]),
        sets_of(file, "prune", "index", file.data["index"]), sets_of(file, "one_of", "role", roles),
        sets_of(file, "together", "role", roles), parse_inputs(file, roles),
        {reader: row.norm for row in parse_inputs(file, roles, "reads") for reader in row.readers}, file,
    )  # fmt: skip


def sets_of(file: TableFile, section: str, word: str, known: Mapping[str, object]) -> dict[str, tuple[str, ...]]:
    """Return the sets of a section; each member, a `word` in messages, must be known."""
    sets = {name: tuple(members) for name, members in file.section(section).items()}
    for name, members in sets.items():
        for member in members:
            if member not in known:
                raise file.place(section, name).error(f"{word} `{member}` is unknown", hint=nearest(member, known))
    return sets
