"""Manifests of batches, read, and as far planned as `--dry-run` goes for a row, against `tomllib` and `itertools`.

Correct is: every combination that no `exclude` takes out is a row once, with what its table or else the defaults say,
of every key; names and outputs are apart; a row that cannot be planned has failed in our words.
"""

from __future__ import annotations

import itertools
import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from bridge.core.addresses import is_remote
from bridge.core.progress import no_progress
from bridge.core.text import byte_count
from bridge.quant.schemes.load import load_scheme
from bridge.targets import load_target
from bridge.workflows.batch.audience import Counted
from bridge.workflows.batch.job import CRASH
from bridge.workflows.batch.manifest.keys import OWN
from bridge.workflows.batch.manifest.naming import short_name
from bridge.workflows.batch.manifest.read import Manifest, read_manifest
from bridge.workflows.batch.report import BatchReport
from bridge.workflows.batch.run import Asked, run
from bridge.workflows.batch.values import Row
from tests.fuzz.case import Case, Target
from tests.fuzz.mutate import VALUES, encoded, one_file, pick, texts, toml_text, trees
from tests.models.golden_made import LLAMA

FILE = "batch.toml"
EXAMPLE = (LLAMA.parent.parent / FILE).read_text()
MODEL = "models/tiny-llama"
MANIFEST: dict[str, Any] = {
    "workers": 2,
    "memory": "16GB",
    "strict": False,
    "summary": "told.json",
    "defaults": {"out": "out/{name}", "verify": False, "samples": 4, "timeout": 90.5},
    "matrix": [
        {
            "model": [MODEL, "org/other"],
            "target": ["hf", "tripy"],
            "quant": ["int8_wo", "none"],
            "exclude": [{"model": "org/other", "quant": "none"}],
        }
    ],
    "row": [
        {"name": "plain", "model": MODEL, "target": "hf"},
        {"model": MODEL, "target": "trtllm", "quant": "int4_wo", "tp": 2, "config": {"a": 1}, "memory": "2GB"},
        {"name": "far", "model": MODEL, "target": "hf", "out": "s3://bucket/{name}/{target}", "timeout": 60},
    ],
}
PLACES = (
    "../out", "~/out", "~nobody/x", "~", "out/" * 2000, "x" * 300, "out\0", "/", "{name}" * 3, "s3://b/c", "gs://b/{name}",
)  # fmt: skip
SIZES = ("16GB", "9" * 400, "1e9", "0", "1.5TiB", "-1GB")
KNOWN = (MODEL, "hf", "trt", "fp8", "nvfp4", "org/name@main", "https://me:secret@host/a", "./models", "{model}", "{x}")
WORDS = (
    *(f'"{word}"' for word in (*KNOWN, *PLACES[:5])), "[[row]]", "[[matrix]]", "[row]", "[local]", "[ray]", "exclude",
    "[defaults]", "name", "config", "memory", "1979-05-27T07:32:00Z", "nan", "a.b.c = 1", "[" * 400, "a." * 2000,
)  # fmt: skip
KEYS = ("model", "target", "quant", "kv", "device", "verify", "samples", "shards", "tp", "opset", "nothing")
GIVEN: dict[str, Any] = {"verify": True, "overwrite": False, "shards": 1}
FREE = ("where", "resume")  # of a row: what no manifest says
FEW = 12_000  # rows; those that are too many are counted, not made


@dataclass(frozen=True)
class Read:
    """A manifest, and what a dry run said of one of its rows, where one may be planned without asking a server."""

    manifest: Manifest
    drawn: BatchReport | None


def make(root: Path) -> None:
    (root / "models").mkdir()
    (root / MODEL).symlink_to(LLAMA)
    (root / FILE).write_bytes(toml_text(MANIFEST))


@st.composite
def _large(draw: st.DrawFn) -> bytes:
    """A matrix that comes to many rows, with rules that take many out, and texts that grow as they are filled in."""
    sizes = draw(st.lists(st.sampled_from((1, 2, 9, 90, 3000)), min_size=1, max_size=6))
    matrix: dict[str, Any] = {"model": [MODEL], "target": ["hf"]}
    for key, size in zip(KEYS, sizes, strict=False):
        matrix[key] = [pick(draw, KNOWN), *(f"{key}{n}" for n in range(1, size))]
    rules = draw(st.sampled_from((0, 1, 90, 3000)))
    key = pick(draw, KEYS)
    matrix["exclude"] = [{key: f"{key}{n}"} for n in range(1, rules + 1)]
    times = draw(st.sampled_from((1, 50, 5000)))
    defaults = {"name": "{model}{target}" * times, "out": pick(draw, ("{name}", "{name}/{name}" * times))}
    return toml_text({"defaults": defaults, "matrix": matrix})


def cases(root: Path) -> SearchStrategy[Case]:
    values = (*VALUES, *PLACES, *SIZES, *KNOWN)
    whole = trees(MANIFEST, values).map(toml_text)
    text = encoded(texts(EXAMPLE, WORDS))
    few = st.integers(0, 11).flatmap(lambda one: whole if one < 7 else text if one < 11 else _large())
    return few.map(one_file(FILE))


def read(root: Path) -> Read:
    manifest = read_manifest(root / FILE)
    row = next((row for row in manifest.rows if _is_here(row)), None)
    if row is None or not manifest.summary.is_relative_to(root):
        return Read(manifest, None)
    asked = Asked(engine="local", dry_run=True)
    return Read(manifest, run(replace(manifest, rows=(row,)), asked, Counted(no_progress)))


def _is_here(row: Row) -> bool:
    """Whether planning a row opens a model of this machine and nothing else, and takes milliseconds."""
    places = (row.model, row.calib, row.tokenizer, row.out)
    near = all(place is None or Path(place).is_absolute() for place in places)
    if not near or row.target == "trt":
        return False
    return row.calib is not None or row.quant in (None, "none") or not load_scheme(row.quant, row.kv).needs_calibration


def agree(root: Path, found: Read) -> None:
    words = tomllib.loads((root / FILE).read_text(encoding="utf-8"))
    rows = found.manifest.rows
    wanted = list(itertools.islice(_wanted(words), FEW))
    assert 0 < len(rows) <= len(wanted) < FEW
    made = [_text({key: value for key, value in asdict(row).items() if key not in FREE}, root) for row in rows]
    assert made == list(dict.fromkeys(_text(_made(one, axes, root), root) for one, axes in wanted))
    assert not any(_is_there(root / row.model) for row in rows if not Path(row.model).is_absolute()), "asks the hub"
    for kind in ("name", "out"):
        assert len({getattr(row, kind) for row in rows}) == len(rows), f"two rows have one {kind}"
    assert found.manifest.limits.workers == words.get("workers")
    for end in found.drawn.outcomes.values() if found.drawn else ():
        assert end.kind != CRASH, end.error


def _wanted(words: dict[str, Any]) -> Iterator[tuple[dict[str, Any], list[str]]]:
    """What each row is made from, and the keys that its table varies."""
    for key in words:
        tables = words[key] if isinstance(words[key], list) else [words[key]]
        for table in tables if key in ("row", "matrix") else ():
            axes = [name for name, value in table.items() if isinstance(value, list) and name != "exclude"]
            for values in itertools.product(*(table[name] for name in axes)):
                one = words.get("defaults", {}) | table | dict(zip(axes, values, strict=True))
                one.pop("exclude", None)
                rules = table.get("exclude", []) if key == "matrix" else []
                if not any(all(one.get(name) == value for name, value in rule.items()) for rule in rules):
                    yield one, axes


def _made(one: dict[str, Any], axes: list[str], root: Path) -> dict[str, Any]:
    """The row that is made from them, of all its fields but `FREE`."""
    options = {entry.name for entry in fields(load_target(one["target"]).Options)} & {*one}
    texts = {"quant": "none"} | {key: short_name(one[key]) for key in one if key in OWN or key in options}
    more = "".join(f"-{key}-{{{key}}}" for key in axes if key in texts and key not in ("model", "quant", "target"))
    texts["name"] = _filled(one.get("name", "{model}-{quant}-{target}" + more), texts)
    row = dict.fromkeys(OWN) | GIVEN | {key: one[key] for key in one if key in OWN}
    row |= {"name": texts["name"], "out": _beside(_filled(one.get("out", "{name}"), texts), root)}
    if isinstance(row["config"], str):
        row["config"] = _beside(row["config"], root)
    if row["quant"] and ("/" in row["quant"] or row["quant"].endswith(".toml")):
        row["quant"] = _beside(row["quant"], root)
    if isinstance(row["memory"], str):
        row["memory"] = byte_count(row["memory"], "memory")
    return row | {"options": {key: one[key] for key in options}}


def _filled(pattern: str, texts: dict[str, str]) -> str:
    return re.sub(r"\{(\w*)\}", lambda found: texts[found[1]], pattern)


def _beside(place: str | None, root: Path) -> str | None:
    """Where a path of a manifest in `root` leads."""
    return place if place is None or is_remote(place) else str(root.absolute() / Path(place).expanduser())


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # a name too long for a file
        return False


def _text(row: dict[str, Any], root: Path) -> str:
    """All of a row, `1` told from `true`; what is a name of the hub, or a path, as if it were the path."""
    places = {key: _beside(row[key], root) for key in ("model", "calib", "tokenizer")}
    return json.dumps(row | places, sort_keys=True, default=str)


TARGET = Target("batches", make, cases, read, agree, FILE)
