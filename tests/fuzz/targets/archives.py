"""`.nemo` archives, read in place, against `tarfile`'s own reading of the members."""

from __future__ import annotations

import io
import posixpath
import tarfile
from pathlib import Path
from typing import Any, Literal

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from bridge.core.files.archive import open_folder
from tests.fuzz.case import Case, Target
from tests.fuzz.mutate import damaged

FILE = "model.nemo"
MEMBERS = {"./model_config.yaml": b"a: 1\n", "./weights/0.0": bytes(range(200)) * 4, "./tokenizer.model": b"words"}
NAMES = (
    "../x",
    "/etc/x",
    "./../../x",
    "a/../../x",
    "",
    ".",
    "./",
    "a" * 120,
    "a" * 400,
    "é",
    "\ud800",
    "./model_config.yaml",
    "MODEL_CONFIG.yaml",
    "./weights",
    "./weights/0.0/x",
    "a\\..\\x",
    "a\nb",
    "C:/x",
    "./a//b",
    "./a/./b",
    "a\0b",
)
TYPES = (*b"0\0123456789gxLKSDVMNXAZ",)
FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
SIZES = (0, 1, 511, 512, 513, 2**20, 2**33, 2**40)
PAX = (
    {"path": "../x"},
    {"path": "/x"},
    {"size": "-1"},
    {"size": "9" * 30},
    {"size": "1e3"},
    {"linkpath": "/etc"},
    {"x": "y" * 5000},
    {"GNU.sparse.major": "1", "GNU.sparse.minor": "0"},
    {"GNU.sparse.map": "0,1"},
    {"GNU.sparse.size": "9" * 20},
    {"mtime": "nan"},
    {"hdrcharset": "BINARY"},
    {"path": "\ud800"},
    {"GNU.sparse.name": "../x"},
)


def make(root: Path) -> None:
    (root / FILE).write_bytes(packed([(_info(name, content), content) for name, content in MEMBERS.items()]))


def _info(name: str, content: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    return info


def packed(members: list[tuple[tarfile.TarInfo, bytes]], kind: Literal[0, 1, 2] = tarfile.GNU_FORMAT) -> bytes:
    """An archive of members whose headers need not fit their content."""
    out = io.BytesIO()
    for info, content in members:
        try:
            out.write(info.tobuf(kind, errors="surrogatepass"))
        except (ValueError, UnicodeError):  # what the format cannot say
            out.write(tarfile.TarInfo("a").tobuf(kind))
        out.write(content + bytes(-len(content) % 512))
    return out.getvalue() + bytes(1024)


@st.composite
def _archives(draw: st.DrawFn) -> bytes:
    members = [(_info(name, content), content) for name, content in MEMBERS.items()]
    for _ in range(draw(st.integers(1, 3))):
        info, content = members[draw(st.integers(0, len(members) - 1))]
        change = draw(st.sampled_from(("name", "type", "size", "link", "pax", "twice", "sparse")))
        if change == "name":
            info.name = draw(st.sampled_from(NAMES))
        elif change == "type":
            info.type = bytes([draw(st.sampled_from(TYPES))])
        elif change == "size":
            info.size = draw(st.sampled_from((info.size + 1, info.size * 3, *SIZES)))
        elif change == "link":
            info.type, info.linkname = draw(st.sampled_from((b"1", b"2"))), draw(st.sampled_from(NAMES))
        elif change == "pax":
            info.pax_headers = draw(st.sampled_from(PAX))
        elif change == "twice":
            members.append((info, draw(st.sampled_from((content, b"other")))))
        else:
            info.type = b"S"
    return packed(members, draw(st.sampled_from(FORMATS)))


@st.composite
def _checked(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes of headers changed, their checksums made to fit."""
    found = bytearray(draw(damaged(data, most=3)))
    for at in range(0, len(found) - 511, 512):
        head = found[at : at + 512]
        if head[257:262] == b"ustar":
            head[148:156] = b" " * 8
            found[at + 148 : at + 156] = b"%06o\0 " % sum(head)
    return bytes(found)


def cases(root: Path) -> SearchStrategy[Case]:
    data = (root / FILE).read_bytes()
    whole = _archives()
    return st.one_of(whole, whole, whole.flatmap(_checked), _checked(data), damaged(data)).map(
        lambda found: {FILE: found}
    )


def read(root: Path) -> dict[str, bytes]:
    folder = open_folder(root / FILE)
    return {name: span.content(1 << 20) for name, span in folder.files.items()}


def agree(root: Path, found: dict[str, Any]) -> None:
    with tarfile.open(root / FILE, "r:") as tar:
        regular = {posixpath.normpath(m.name): m for m in tar if m.isreg() and not m.issparse()}
        assert set(found) == set(regular)
        for name, member in regular.items():
            file = tar.extractfile(member)
            assert file is not None
            assert file.read() == found[name]
            assert not name.startswith("/") and ".." not in name.split("/")


TARGET = Target("archives", make, cases, read, agree, FILE)
