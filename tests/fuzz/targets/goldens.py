"""Goldens, whose digest is made to fit after each change, against `json` and the safetensors library."""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from safetensors.numpy import load_file

import bridge
from bridge.workflows.golden.store import Golden, load
from tests.fuzz.case import Case, Target
from tests.fuzz.mutate import damaged, json_text, jsons, trees
from tests.models.golden_made import converted_made

FILE = "golden.json"
LINES = ("tensors.jsonl", "origins.jsonl", "files.jsonl")
VALUES = "values.safetensors"


def make(root: Path) -> None:
    with tempfile.TemporaryDirectory() as work:
        bridge.golden.record(converted_made(Path(work, "out")), root / "golden", run=False)
    for path in list((root / "golden").iterdir()):
        path.rename(root / path.name)
    (root / "golden").rmdir()


@st.composite
def _lines(draw: st.DrawFn, root: Path) -> dict[str, bytes | None]:
    """A line of the tables changed, or one too many, under a digest that fits."""
    texts = {name: (root / name).read_bytes() for name in LINES}
    name = draw(st.sampled_from(LINES))
    lines = texts[name].splitlines(keepends=True)
    at = draw(st.integers(0, len(lines) - 1))
    changed = json_text(draw(trees(json.loads(lines[at])))) + b"\n"
    lines[at : at + draw(st.sampled_from((0, 1, 1, 1)))] = [changed]
    texts[name] = b"".join(lines)
    head = json.loads((root / FILE).read_bytes())
    head["digest"] = hashlib.sha256(b"\0".join(texts[name] for name in LINES)).hexdigest()
    return {name: texts[name], FILE: json.dumps(head).encode()}


def cases(root: Path) -> SearchStrategy[Case]:
    head = json.loads((root / FILE).read_bytes())
    values = (root / VALUES).read_bytes()
    return st.one_of(
        _lines(root), _lines(root), jsons(head).map(lambda content: {FILE: content}),
        damaged(values, edge=400).map(lambda content: {VALUES: content}),
        st.sampled_from((*LINES, VALUES)).map(lambda name: {name: None}),
    )  # fmt: skip


def read(root: Path) -> Golden:
    return load(root)


def agree(root: Path, found: Golden) -> None:
    rows = [json.loads(line) for line in (root / LINES[0]).read_text().splitlines()]
    tensors = {(tensor.file, tensor.name): tensor for tensor in found.snapshot.tensors.values()}
    assert {(row["file"], row["name"]): (row["dtype"], row["shape"], row["hash"]) for row in rows} == {
        key: (tensor.dtype, list(tensor.shape), tensor.hash) for key, tensor in tensors.items()
    }
    samples = load_file(root / VALUES)["samples"].tobytes()
    assert b"".join(found.snapshot.samples[key].tobytes() for key in sorted(found.snapshot.tensors)) == samples


TARGET = Target("goldens", make, cases, read, agree, FILE)
