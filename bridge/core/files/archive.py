"""List directories and `.nemo` archives as folders of files, without unpacking."""

from __future__ import annotations

import os
import posixpath
import tarfile
from pathlib import Path
from typing import cast

from bridge.core.errors import SourceError
from bridge.core.files.handles import dead_link, identity, opened, read_at, refuse_pointer, size_of
from bridge.core.files.span import Folder, Span, span_of
from bridge.core.remote.path import remote
from bridge.core.text import listed, named

MAX_HEADER = 1 << 20  # bytes of names and attributes, which take hundreds
MAX_MEMBERS = 1 << 18  # a zarr checkpoint has a file for each chunk of each tensor, some 10,000
_HEADERS = (
    tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE
)  # fmt: skip
GZIP = b"\x1f\x8b"


def open_folder(path: Path) -> Folder:
    """List a directory or an archive; SourceError for anything else.

    >>> sorted(open_folder(Path("model.nemo")).files)  # doctest: +SKIP
    ['model_config.yaml', 'model_weights.ckpt']
    """
    return _directory(path) if path.is_dir() else _archive(path)


def below(name: str) -> str:
    """Return a relative name without `.` and `..`; "" if it leads out of its directory.

    >>> below("./a/../b.ckpt"), below("a/../../b.ckpt"), below("/b.ckpt")
    ('b.ckpt', '', '')
    """
    plain = posixpath.normpath(name)
    return "" if plain.startswith("/") or plain.split("/")[0] == ".." else plain


def _directory(root: Path) -> Folder:
    """List the files below `root`, links to files included: the hub's cache has them. Unreadable files are skipped."""
    if far := remote(root):
        return Folder(str(root), {name: span_of(cast(Path, path)) for name, path in far.files()}, {})
    files: dict[str, Span] = {}
    skipped: dict[str, str] = {}

    def unlisted(error: OSError) -> None:
        skipped[Path(error.filename).relative_to(root).as_posix()] = f"cannot be listed: {error.strerror}"

    for at, folders, names in os.walk(root, onerror=unlisted):
        folders.sort()
        below = Path(at)
        for name in [name for name in folders if (below / name).is_symlink()]:
            skipped[(below / name).relative_to(root).as_posix()] = "a link to a directory"
        for name in sorted(names):
            path = below / name
            relative = path.relative_to(root).as_posix()
            if not path.is_file():
                skipped[relative] = dead_link(path) or "not a regular file"
                continue
            try:
                files[relative] = span_of(path)
            except SourceError as error:
                skipped[relative] = str(error).removeprefix(f"{path}: ")
    return Folder(str(root), files, skipped)


def _archive(path: Path) -> Folder:
    """List the members of a tar by the place of their bytes; a compressed one has a copy, which is read."""
    with opened(path) as fd:
        head = read_at(fd, 512, 0, path)
    refuse_pointer(path, head)
    tar = path
    if head.startswith(GZIP):
        if remote(path):
            raise SourceError(f"{path}: a compressed archive; download it, and give the file")
        from bridge.core.files.decompressed import decompressed

        tar = decompressed(path)
    with opened(tar) as fd:
        mark, size = identity(fd), size_of(fd)
    members = _members(tar, path)
    files: dict[str, Span] = {}
    skipped: dict[str, str] = {}
    problems: list[str] = []
    twice: list[str] = []
    outside: list[str] = []
    for member in members:
        name = below(member.name)
        if not name or (name == "." and not member.isdir()):
            outside.append(member.name[:200])
        elif why := _unsafe(member):
            skipped[name] = why
        elif member.isdir():
            continue
        elif name in files:
            twice.append(name)
        elif member.size < 0 or member.offset_data + member.size > size:
            problems.append(
                f"shorter than its members: {name} takes {member.size} bytes from {member.offset_data} on, the file "
                f"has {size}"
            )
        else:
            files[name] = Span(tar, member.offset_data, member.size, f"{path}: {name}", mark)
    if twice:
        problems.append(f"holds {named(set(twice))} twice: programs differ in which one they unpack; pack it again")
    if outside:
        problems.append(
            f"holds names outside its directory ({named(outside)}), where unpacking would write; no archive of NeMo's "
            "does: do not unpack it, get it from its maker"
        )
    if not files and not problems:
        problems.append("an archive without files")
    if problems:
        raise listed(str(path), problems)
    return Folder(str(path), files, skipped)


class _Member(tarfile.TarInfo):
    """A member whose sizes are checked before they are used."""

    def _proc_member(self, tar: tarfile.TarFile) -> tarfile.TarInfo:
        """Refuse long names and attributes that would fill the memory: tarfile reads them whole."""
        if self.type in _HEADERS and self.size > MAX_HEADER:
            raise tarfile.ReadError(f"a header of {self.size} bytes")
        return super()._proc_member(tar)  # type: ignore[misc,no-any-return]

    def _block(self, count: int) -> int:
        """Refuse a negative size, on which older versions of tarfile loop forever (CVE-2025-8194)."""
        if count < 0:
            raise tarfile.ReadError("a member has a negative size")
        return super()._block(count)  # type: ignore[misc,no-any-return]


def _members(place: Path, path: Path) -> list[tarfile.TarInfo]:
    """The members of the tar at `place`, which messages call `path`."""
    try:
        with place.open("rb") as file, tarfile.open(fileobj=file, mode="r:", tarinfo=_Member) as tar:
            members = []
            for member in tar:
                members.append(member)
                if len(members) > MAX_MEMBERS:
                    raise tarfile.ReadError(f"more than {MAX_MEMBERS} members")
    except RecursionError as error:  # tarfile reads a long name and its member recursively
        raise SourceError(f"{path}: long names of long names without end; get it again") from error
    except (tarfile.TarError, OSError, ValueError, OverflowError) as error:
        raise SourceError(f"{path}: not a complete tar archive ({error}); get it again") from error
    # A tar ends with zero blocks: without them, unknown members may be missing.
    with opened(place) as fd:
        last = members[-1] if members else None
        end = last.offset_data + -(-last.size // 512) * 512 if last else 0
        if end >> 63 or read_at(fd, 512, end, place) != bytes(512):
            raise SourceError(
                f"{path}: the archive has no end after {last.name if last else 'nothing'}: cut off there, or written "
                "without one; get it again, or pack it again with tar"
            )
    return members


def _unsafe(member: tarfile.TarInfo) -> str:
    """Say why a member is not read; "" for a regular file or directory inside the archive."""
    if member.issym() or member.islnk():
        return f"a link to {member.linkname[:200]}"
    if member.issparse():
        return "a sparse file"
    return "" if member.isreg() or member.isdir() else "not a regular file"
