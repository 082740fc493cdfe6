"""Archives that write outside, point outside, or are larger than they look: `.nemo` tars, zips of weights."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from collections.abc import Iterator
from typing import Literal

from tests.fuzz.corpus.entry import Entry, always
from tests.fuzz.targets import archives, pickles


def _tar(*members: tarfile.TarInfo, kind: Literal[0, 1, 2] = tarfile.GNU_FORMAT) -> bytes:
    config = tarfile.TarInfo("./model_config.yaml")
    return archives.packed([(config, b""), *((member, b"") for member in members)], kind)


def _member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0, pax: dict[str, str] | None = None
) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.type, made.linkname, made.size, made.pax_headers = kind, link, size, pax or {}
    return made


def _long(kind: bytes, size: int) -> bytes:
    """A header that says how long the name or the attributes after it are."""
    made = _member("././@LongLink", kind, size=size)
    return made.tobuf(tarfile.GNU_FORMAT) + b"x" * 4096 + bytes(1024)


def _negative() -> bytes:
    head = bytearray(_member("a").tobuf(tarfile.GNU_FORMAT))
    head[124:136] = b"\xff" * 12  # base 256, minus one
    head[148:156] = b" " * 8
    head[148:156] = b"%06o\0 " % sum(head)
    return bytes(head) + bytes(1024)


def _deflated(size: int) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("archive/data.pkl", b"\x80\x02N." + bytes(size))
        made.writestr("archive/version", b"3")
    return out.getvalue()


TARS: dict[str, bytes] = {
    "parent": _tar(_member("../attacked")),
    "parent in the middle": _tar(_member("./a/../../attacked")),
    "absolute": _tar(_member("/attacked")),
    "parent by pax": _tar(_member("a", pax={"path": "../attacked"}), kind=tarfile.PAX_FORMAT),
    "link to the outside": _tar(_member("./weights", tarfile.SYMTYPE, "/etc"), _member("./weights/passwd")),
    "config that is a link": _tar(_member("./tokenizer.model", tarfile.SYMTYPE, "/etc/passwd")),
    "hard link": _tar(_member("./tokenizer.model", tarfile.LNKTYPE, "/etc/passwd")),
    "device": _tar(_member("./zero", tarfile.CHRTYPE)),
    "pipe": _tar(_member("./pipe", tarfile.FIFOTYPE)),
    "sparse": _tar(_member("./holes", tarfile.GNUTYPE_SPARSE)),
    "twice": _tar(_member("./model_config.yaml")),
    "twice by another case": _tar(_member("./MODEL_CONFIG.YAML")),
    "larger than the archive": _tar(_member("./a", size=1 << 40)),
    "sparse by pax": _tar(
        _member("a", pax={"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.size": "9" * 18}),
        kind=tarfile.PAX_FORMAT,
    ),
    "negative size": _negative(),
    "negative size by pax": _tar(_member("a", pax={"size": "-512"}), kind=tarfile.PAX_FORMAT),
    "long name of a gigabyte": _long(tarfile.GNUTYPE_LONGNAME, 1 << 30),
    "attributes of a gigabyte": _long(tarfile.XHDTYPE, 1 << 30),
    "names after names": b"".join(
        _member("L", tarfile.GNUTYPE_LONGNAME, size=2).tobuf() + b"a\0" + bytes(510) for _ in range(3000)
    )
    + bytes(1024),
    "compressed": gzip.compress(bytes(50 << 20)),
    "many members": _member("./a").tobuf() * 20_000 + bytes(1024),
    "nothing but zeros": bytes(10240),
}
MAY = (
    "link to the outside",
    "config that is a link",
    "hard link",
    "device",
    "pipe",
    "sparse",
    "sparse by pax",
    "twice by another case",
)
ZIPS: dict[str, bytes] = {
    "zip bomb": _deflated(200 << 20),
    "no members": b"PK\x05\x06" + bytes(18),
    "end record alone": b"PK\x03\x04" + b"PK\x05\x06" + b"\xff" * 18,
    "many members promised": b"PK\x03\x04" + bytes(26) + b"PK\x05\x06" + bytes(4) + b"\xfe\xff\xfe\xff" + bytes(10),
}


def entries() -> Iterator[Entry]:
    for name, data in TARS.items():
        yield Entry(f"tar: {name}", always({archives.FILE: data}), _links, refused=name not in MAY)
    for name, data in ZIPS.items():
        yield Entry(f"zip: {name}", always({pickles.FILE: data}), pickles.read)


def _links(root: object) -> None:
    """Read every member: a link, a device or a hole must not be one of them."""
    found = archives.read(root)  # type: ignore[arg-type]
    assert set(found) <= {"model_config.yaml", "MODEL_CONFIG.YAML", "weights/passwd"}, found
    assert not any(found.values()), found
