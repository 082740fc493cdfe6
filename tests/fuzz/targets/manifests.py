"""`bridge.json` of a written model, which `verify` and goldens read, against `json`."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from bridge.workflows.golden.snapshot import SnapshotReader, origins_of
from tests.fuzz.case import Case, Target
from tests.fuzz.mutate import damaged, json_text, trees
from tests.models.golden_made import converted_made

FILE = "bridge.json"


def make(root: Path) -> None:
    with tempfile.TemporaryDirectory() as work:
        shutil.copytree(converted_made(Path(work, "out")), root, dirs_exist_ok=True)


@st.composite
def _files(draw: st.DrawFn, manifest: dict[str, object], heads: list[dict[str, object]]) -> bytes:
    """The whole changed, of which most are steps of the plan; in half of the cases one step, or what is not one."""
    if draw(st.booleans()):
        return json_text(draw(trees(manifest)))
    head = draw(st.sampled_from(heads))
    return json_text(draw(trees(head)))


def cases(root: Path) -> SearchStrategy[Case]:
    manifest = json.loads((root / FILE).read_bytes())
    steps = manifest["plan"]["steps"]
    short = manifest | {"plan": manifest["plan"] | {"steps": steps[:2]}}
    heads = [short, short | {"plan": short["plan"] | {"sources": {}}}]
    whole = _files(manifest, heads)
    return st.one_of(whole, whole, whole, damaged(json_text(short))).map(lambda content: {FILE: content})


def read(root: Path) -> SnapshotReader:
    found = SnapshotReader(root)
    origins_of(found.plan)
    return found


def agree(root: Path, found: SnapshotReader) -> None:
    plan = json.loads((root / FILE).read_bytes())["plan"]
    assert json.loads(json.dumps(found.plan.to_dict())) == plan


TARGET = Target("manifests", make, cases, read, agree, FILE)
