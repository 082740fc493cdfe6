"""Float graphs that tests need, kept in tests/graphs: python -m tests.kept_graphs

One archive a family. A graph is loaded if its request and `made_with()`, the digest of everything else that decides it,
are those that it was exported with; any other is exported. Exports that `make test` needs are stored in build/graphs:
later runs load them from there, and `make graphs` moves them into the archives, exports stale requests again, and
removes those that the last whole run did not need. BRIDGE_GRAPHS=export (`make test-all`) exports all and compares;
BRIDGE_GRAPHS=whole (`make test`) marks a whole run.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from types import FunctionType
from typing import Any

from bridge.core.version import installed
from tests import once

ROOT = Path(__file__).parent.parent
ARCHIVES, WAITING = ROOT / "tests" / "graphs", ROOT / "build" / "graphs"
ENDING, ABOUT = ".tar.xz", "about.json"
# The code that decides a graph, beside its request: a change of it renews all. A path that is gone fails the tests.
CODE = (
    "bridge/targets/onnx/export", "bridge/targets/onnx/families", "bridge/sources/live_models", "mappings/tasks.toml",
    "bridge/targets/onnx/run/tiles.py", "bridge/sources/configs/diffusion.py", "bridge/core/dtypes.py",
    "bridge/targets/tasks.py", "bridge/targets/onnx/files.py",
)  # fmt: skip
# Of CODE, what exports nothing.
OTHER_CODE = (
    "bridge/targets/onnx/export/templates", "bridge/targets/onnx/export/cached.py",
    "bridge/targets/onnx/export/request.py", "bridge/targets/onnx/families/templates.py",
    "bridge/targets/onnx/families/refusals.py",
)  # fmt: skip
PACKAGES = ("torch", "transformers", "onnx", "onnx-ir", "onnxscript", "numpy", "ml-dtypes", "sympy")
ROUNDED = 1e-6  # processors round the frequencies of rotary embeddings otherwise

needed_later = False  # the test that runs is one of `make test-all` alone, whose graphs are not kept


@functools.cache
def made_with() -> str:
    """The digest of the code and the packages that export, not of comments, docstrings and layout."""
    versions = {name: installed(name).partition("+")[0] for name in PACKAGES}  # "+cpu" is the same torch
    code = {str(path.relative_to(ROOT)): code_of(path) for path in code_files()}
    return _digest([versions, code])


def code_files() -> list[Path]:
    """The files of CODE."""
    places = [ROOT / name for name in CODE]
    files = {file for place in places for file in (place.rglob("*") if place.is_dir() else [place])}
    left_out = [ROOT / name for name in OTHER_CODE]
    kept = [file for file in files if not any(file.is_relative_to(each) for each in left_out)]
    return sorted(file for file in kept if file.suffix in (".py", ".toml"))


def code_of(path: Path) -> str:
    """The content of a file; of Python its syntax tree, equal for all versions of Python."""
    text = path.read_text()
    return repr(_normal(ast.parse(text))) if path.suffix == ".py" else text


def _normal(node: Any) -> Any:
    if isinstance(node, list):
        return [_normal(each) for each in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
        fields["body"] = node.body[1:]
    return [type(node).__name__, *([name, _normal(value)] for name, value in fields.items() if value not in (None, []))]


class Request:
    """The arguments of `export_graph`: a config's fields, and the options, with all defaults."""

    def __init__(self, fields: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.fields, self.options = fields, options
        self.key = _digest([fields, options])[:32]
        self.family = re.sub(r"[^\w.-]", "_", str(fields.get("model_type") or fields.get("_class_name")))

    def text(self) -> str:
        """The line from which `of_text` makes the request again; TypeError if JSON cannot hold it."""
        return json.dumps([dict(self.fields), dict(self.options)])

    @classmethod
    def of_text(cls, text: str) -> Request:
        """Undo `text`."""
        return cls(*json.loads(text))

    def content(self) -> bytes:
        """The exported graph."""
        from bridge.targets.onnx.export.export import export_graph
        from bridge.targets.onnx.export.float_graph import plain_bytes

        options = {**self.options, "image": self.options["image"] and tuple(self.options["image"])}
        return plain_bytes(export_graph(dict(self.fields), **options), {})

    def may_be_kept(self) -> bool:
        """Whether nothing but the request, CODE and PACKAGES decides the graph: no test replaced or added code."""
        from bridge.sources.configs.diffusion import is_diffusion
        from bridge.sources.live_models.as_installed import replaced
        from bridge.sources.live_models.meta_device import resolve_config
        from bridge.targets.onnx.export.tasks import choose_task, model_class

        if needed_later or is_diffusion(self.fields):  # diffusers is no package of this environment
            return False
        try:
            if Request.of_text(self.text()).key != self.key:
                return False
            config = resolve_config(dict(self.fields))
            model = model_class(config, self.options["task"] or choose_task(None, config.architectures[0]))
        except Exception:  # whoever exports it says what is wrong
            return False
        classes = (type(config), model)
        return all(each.__module__.startswith("transformers.") for each in classes) and not [*replaced(), *_replaced()]


def _replaced() -> Iterator[str]:
    """The functions of CODE's modules that a test put there; `export_graph` is one."""
    homes = tuple(name.removesuffix(".py").replace("/", ".") for name in CODE)
    for name, module in list(sys.modules.items()):
        for key, value in list(vars(module).items()) if name.startswith(homes) else ():
            home = value.__globals__.get("__name__", "") if isinstance(value, FunctionType) else ""
            if home.startswith("tests.") and key != "export_graph":
                yield f"{name}.{key}"


def exports_all() -> bool:
    """Whether this run loads nothing."""
    return os.environ.get("BRIDGE_GRAPHS") == "export"


def load(request: Request) -> bytes | None:
    """The content of a kept graph; None if there is none that an export would give today."""
    if exports_all():
        return None
    with suppress(OSError):
        return _content(_waiting(request).read_bytes())
    entry = archived(request.family).get(request.key)
    return None if entry is None else _content(entry)


def store(request: Request, content: bytes) -> None:
    """Store an export for later runs and for `make graphs`."""
    path = _waiting(request)
    with suppress(OSError):  # a tree that cannot be written
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_bytes(request.text().encode() + b"\n" + content)
        part.replace(path)


@functools.lru_cache(maxsize=8)
def archived(family: str) -> dict[str, bytes]:
    """Key -> request and content of a family's archive; {} if other code or other packages made it."""
    about, entries = read_archive(ARCHIVES / f"{family}{ENDING}")
    return entries if about.get("made_with") == made_with() else {}


def read_archive(path: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """What an archive says of itself, and its entries; nothing of a file that is not there."""
    if not path.exists():
        return {}, {}
    with tarfile.open(path) as archive:
        entries = {member.name: file.read() for member in archive if (file := archive.extractfile(member))}
    return json.loads(entries.pop(ABOUT)), entries


def write_archive(path: Path, entries: Mapping[str, bytes]) -> None:
    """Write the entries of a family, made with what is installed."""
    about = {"made_with": made_with(), "packages": {name: installed(name) for name in PACKAGES}}
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz", preset=9) as archive:
        for name, content in [(ABOUT, json.dumps(about, indent=1).encode()), *sorted(entries.items())]:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    path.parent.mkdir(exist_ok=True)
    part = path.with_name(f".{path.name}")
    part.write_bytes(data.getvalue())
    part.replace(path)


def differences(content: bytes, kept: bytes) -> list[str]:
    """What two contents differ in, but for the last bits of floats."""
    import onnx

    if content == kept:
        return []
    texts, models = zip(*(_split(each) for each in (content, kept)), strict=True)
    if json.loads(texts[0]) != json.loads(texts[1]):
        return [f"{texts[0].decode()[:500]} is not {texts[1].decode()[:500]}"]
    one, other = (onnx.ModelProto.FromString(model) for model in models)
    pairs = [*zip(_tensors(one), _tensors(other), strict=False)]
    far = [a.name or "a constant" for a, b in pairs if not _settle(a, b)]
    return far or ([] if one == other else ["nodes or values"])


def _split(content: bytes) -> tuple[bytes, bytes]:
    line, _, rest = content.partition(b"\n")
    return line, rest


def _tensors(message: Any) -> Iterator[Any]:
    """Every tensor with data below a message of ONNX, in order."""
    if message.DESCRIPTOR.name == "TensorProto":
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for each in value if field.is_repeated else (value,):
                yield from _tensors(each)


def _settle(tensor: Any, other: Any) -> bool:
    """Whether two tensors hold nearly the same floats; then `tensor` gets those of `other`."""
    import numpy as np
    import onnx

    if tensor == other or tensor.data_location == onnx.TensorProto.EXTERNAL:
        return bool(tensor == other)
    a, b = (onnx.numpy_helper.to_array(each) for each in (tensor, other))
    if a.shape != b.shape or a.dtype != b.dtype or not np.issubdtype(a.dtype, np.floating):
        return False
    near = np.allclose(a, b, rtol=ROUNDED, atol=0, equal_nan=True)
    tensor.CopyFrom(other)
    return bool(near)


def note(request: Request, how: str) -> None:
    """Note for the end of the run that a graph was loaded or exported."""
    if once.ROOT:
        test = os.environ.get("PYTEST_CURRENT_TEST", "a server").partition("::")[0]
        with (once.ROOT / "graphs.log").open("a") as log:
            log.write(f"{how} {request.key} {test}\n")


def report(shared: Path, passed: bool) -> list[str]:
    """How many graphs a run loaded and exported, and where. A whole run that passed says which graphs are needed."""
    log = shared / "graphs.log"
    rows = [line.split(" ", 2) for line in log.read_text().splitlines()] if log.exists() else []
    if not rows:
        return []
    keys = {how: {key for each, key, _ in rows if each == how} for how, _, _ in rows}
    if passed and os.environ.get("BRIDGE_GRAPHS") == "whole":
        WAITING.mkdir(parents=True, exist_ok=True)
        used = keys.get("loaded", set()) | keys.get("stored", set())
        (WAITING / f"{made_with()[:16]}.used").write_text("\n".join(sorted(used)))
    parts = [f"{len(keys[how])} {how}" for how in ("loaded", "stored", "exported") if how in keys]
    lines = [f"float graphs: {', '.join(parts)}" + ("; `make graphs` keeps the stored" if "stored" in keys else "")]
    files = Counter(file for how, _, file in rows if how != "loaded")
    return lines + [f"  {count} exports in {file}" for file, count in files.most_common(10)]


def renew() -> None:
    """Bring the archives up to date."""
    used_file = WAITING / f"{made_with()[:16]}.used"
    used = set(used_file.read_text().split()) if used_file.exists() else None
    found = {path.name.removesuffix(ENDING): read_archive(path) for path in sorted(ARCHIVES.glob(f"*{ENDING}"))}
    current = {family: rows for family, (about, rows) in found.items() if about["made_with"] == made_with()}
    stale = {key: _text(entry) for family in found.keys() - current for key, entry in found[family][1].items()}
    missing = [
        text for key, text in stale.items() if _wanted(key, used) and not _waiting(Request.of_text(text)).exists()
    ]
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), initializer=_alone) as pool:
        for number, what in enumerate(pool.map(_export, missing), 1):
            print(f"{number} of {len(missing)}: {what}", flush=True)
    folder = WAITING / made_with()[:16]
    families = {path.name for path in folder.glob("*") if path.is_dir()}
    for family in sorted({*found, *families}):
        waiting = {file.name: file.read_bytes() for file in (folder / family).glob("[0-9a-f]*")}
        entries = {key: rows for key, rows in (current.get(family, {}) | waiting).items() if _wanted(key, used)}
        path = ARCHIVES / f"{family}{ENDING}"
        if not entries:
            path.unlink(missing_ok=True)
        elif entries != current.get(family):
            write_archive(path, entries)
    shutil.rmtree(WAITING, ignore_errors=True)
    sizes = [path.stat().st_size for path in ARCHIVES.glob(f"*{ENDING}")]
    print(f"{len(sizes)} archives, {sum(sizes):,} bytes")


def _alone() -> None:
    import torch

    torch.set_num_threads(1)


def _export(text: str) -> str:
    request = Request.of_text(text)
    try:
        store(request, request.content())
    except Exception as error:  # the tests that ask for it say so as well
        return f"{request.family}: {type(error).__name__}: {error}"
    return request.family


def _wanted(key: str, used: set[str] | None) -> bool:
    return used is None or key in used


def _waiting(request: Request) -> Path:
    return WAITING / made_with()[:16] / request.family / request.key


def _text(entry: bytes) -> str:
    return entry.partition(b"\n")[0].decode()


def _content(entry: bytes) -> bytes:
    return entry.partition(b"\n")[2]


def _digest(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


if __name__ == "__main__":
    renew()
