"""Read pickles as inert data: every class or function becomes a record.

For configuration (`args` of Megatron-LM) and ModelOpt's state; weights have their own, narrower table. Nothing is
imported or called.
"""

from __future__ import annotations

from typing import Any, NoReturn, cast

from bridge.core.errors import SourceError
from bridge.core.formats.torch_pickle import WEIGHTS
from bridge.core.formats.unpickle import REFUSAL, Call, Table, runs_programs

MAX_NAMES = 2000  # each becomes a class of about a kilobyte, so that a file of names could take gigabytes


class _Fixed(type):
    """Refuses to set attributes: a record's class is as inert as the record."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise SourceError("the pickle tries to change a class")


class Record(dict[Any, Any], metaclass=_Fixed):
    """An object of a pickle as a mapping of its attributes; `kind` is its class, `args` its constructor's arguments.

    If a file names a class or function without a call (an activation), the value is the record's class.
    """

    __slots__ = ("args", "state")
    kind = ""
    args: tuple[Any, ...]
    state: Any  # the argument of the object's own __setstate__, if it is not a mapping

    def __new__(cls, *args: Any, **options: Any) -> Record:
        record = super().__new__(cls)
        record.args, record.state = args, None
        return record

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(options)

    def __setstate__(self, state: Any) -> None:
        slots = isinstance(state, tuple) and len(state) == 2 and all(s is None or isinstance(s, dict) for s in state)
        for part in state if slots else (state,):
            if isinstance(part, dict):
                self.update(part)
            elif not slots:
                self.state = part

    # Identity: records are keys in torch's own index, and comparing two hostile ones could recurse endlessly.
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__
    __ne__ = object.__ne__


def record_class(module: str, name: str) -> type[Record]:
    """Return the class of records for instances of `module.name`."""
    attributes = {"kind": f"{module}.{name}", "__module__": __name__, "__slots__": ()}
    return cast("type[Record]", _Fixed(name[:80], (Record,), attributes))


class _Inert(dict[tuple[str, str], object]):
    """Makes a record class for every name that is not plain data."""

    def __missing__(self, name: tuple[str, str]) -> object:
        if runs_programs(".".join(name)):
            raise SourceError(f"the pickle asks for {'.'.join(name)}, {REFUSAL}")
        if len(self) > MAX_NAMES:
            raise SourceError(f"the pickle names more than {MAX_NAMES} classes")
        record = self[name] = record_class(*name)
        return record


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise SourceError("the pickle encodes bytes in an unknown way")
    return text.encode("latin1")


def _bytes(*args: Any) -> bytes:
    """Empty bytes, or those of a bytearray; a number would allocate as many."""
    if args and not (len(args) == 1 and isinstance(args[0], bytes)):
        raise SourceError("the pickle makes bytes of something else")
    return args[0] if args else b""


# How protocol 2, which torch.save writes, has bytes; empty ones are a call without arguments.
_BYTES: dict[tuple[str, str], object] = {
    ("_codecs", "encode"): Call(_encode),
    **{(module, name): Call(_bytes) for module in ("__builtin__", "builtins") for name in ("bytes", "bytearray")},
}


def inert() -> Table:
    """Return a table in which every name becomes a record; new for each file, because it stores the names."""
    names = _Inert(WEIGHTS.names)
    names.update(_BYTES)
    return Table(names, "which cannot be read as data")


# Transformer Engine's `_extra_state` is among the weights of a rank: a BytesIO, which is not read.
WEIGHTS_AND_EXTRA = Table(
    {**WEIGHTS.names, ("_io", "BytesIO"): record_class("_io", "BytesIO"), **_BYTES},
    WEIGHTS.refusal,
)
