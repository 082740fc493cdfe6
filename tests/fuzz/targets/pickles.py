"""Files of torch.save, a zip each: pickle, directory and storages, against torch.load(weights_only=True)."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from bridge.core.formats.torch_file import TorchFile
from tests.fuzz.case import Case, Target
from tests.fuzz.mutate import damaged, one_file
from tests.fuzz.opcodes import programs

FILE = "pytorch_model.bin"
NAMES = (
    "data.pkl",
    "data/0",
    "data/1",
    "data/../0",
    "byteorder",
    "version",
    "constants.pkl",
    "code/a.py",
    "../../x",
    "/x",
)


def state() -> dict[str, torch.Tensor]:
    base = torch.arange(24, dtype=torch.float32)
    return {
        "a.weight": base.reshape(4, 6),
        "a.turned": base.reshape(4, 6).T,
        "b": torch.arange(5, dtype=torch.bfloat16),
        "tied": base.reshape(4, 6),
        "scalar": torch.tensor(3),
    }


def make(root: Path) -> None:
    torch.save(state(), root / FILE)


@st.composite
def _zips(draw: st.DrawFn, data: bytes) -> bytes:
    """The members written again: the pickle a changed program, members twice, renamed, compressed, too short."""
    with zipfile.ZipFile(io.BytesIO(data)) as zipped:
        members = [(name, zipped.read(name)) for name in zipped.namelist()]
    changes = draw(
        st.sets(st.sampled_from(("pickle", "pickle", "twice", "name", "short", "packed", "order")), min_size=1)
    )
    members = [
        (name, draw(programs(content)) if name.endswith("data.pkl") and "pickle" in changes else content)
        for name, content in members
    ]
    at = draw(st.integers(0, len(members) - 1))
    name, content = members[at]
    if "twice" in changes:
        members.append((name, draw(st.sampled_from((content, b"", b"\x80\x02N.")))))
    if "name" in changes:
        members[at] = (draw(st.sampled_from(("archive/", "", "other/"))) + draw(st.sampled_from(NAMES)), content)
    if "short" in changes:
        members[at] = (members[at][0], draw(st.sampled_from((content[:-1], b"", content * 2, b"big"))))
    if "order" in changes:
        members.reverse()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as zipped:
        for name, content in members:
            packed = "packed" in changes and draw(st.booleans())
            zipped.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED)
    return out.getvalue()


def cases(root: Path) -> SearchStrategy[Case]:
    data = (root / FILE).read_bytes()
    whole = _zips(data)
    tail = damaged(data[::-1], edge=700).map(lambda found: found[::-1])  # the directory stands at the end
    return st.one_of(whole, whole, whole, whole.flatmap(damaged), tail, damaged(data)).map(one_file(FILE))


def read(root: Path) -> dict[str, np.ndarray]:
    file = TorchFile(root / FILE)
    return {name: file.read(name) for name in file.specs}


def agree(root: Path, found: dict[str, np.ndarray]) -> None:
    agree_or_known(lambda: loaded((root / FILE).read_bytes()), found, state())


def agree_or_known(
    other: Callable[[], dict[str, torch.Tensor]], found: dict[str, np.ndarray], known: dict[str, torch.Tensor]
) -> None:
    """What another reader reads, or, where it wants more than bridge has a use for, what was there before."""
    try:
        wanted = other()
    except Exception as error:
        if "Unsupported operand" in str(error):  # opcodes of later protocols, which the other reader does not know
            return
        was = {(tuple(tensor.shape), _bits(tensor)) for tensor in known.values()}
        assert {(array.shape, array.tobytes()) for array in found.values()} <= was
    else:
        same(wanted, found)


def loaded(data: bytes, checked: bool = True) -> Any:
    """torch's answer to the members as `zipfile` reads them; where that opens no such zip, torch's own.

    torch's reader of zips is not asked first: it gives memory that nobody wrote for a member that the directory calls
    a folder. `checked`: a member that does not match its checksum is an error.
    """
    out = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as damaged, zipfile.ZipFile(out, "w") as whole:
            for name in damaged.namelist():
                if name.split("/")[-1].startswith("."):  # .storage_alignment and the like
                    continue
                with damaged.open(name) as member:
                    if not checked:
                        member._expected_crc = None  # type: ignore[attr-defined]
                    whole.writestr(zipfile.ZipInfo(name), member.read())
    except zipfile.BadZipFile:
        return torch.load(io.BytesIO(data), "cpu", weights_only=True)
    out.seek(0)
    return torch.load(out, "cpu", weights_only=True)


def same(wanted: dict[str, torch.Tensor], found: dict[str, np.ndarray]) -> None:
    """Hold arrays of bits against torch's tensors."""
    assert set(wanted) == set(found)
    for name, tensor in wanted.items():
        assert tuple(tensor.shape) == found[name].shape
        assert _bits(tensor) == found[name].tobytes(), name


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


TARGET = Target("pickles", make, cases, read, agree, FILE)
