"""What a pickle says, as inert data: any class or function it names becomes a record; nothing is imported or called.

For configuration (`args` of Megatron-LM) and ModelOpt's state; weights have their own, narrower table.
"""

from __future__ import annotations

from typing import Any, NoReturn, cast

from bridge.errors import SourceError
from bridge.sources.programs import REFUSAL, runs_programs
from bridge.sources.stored_tensor import WEIGHTS
from bridge.sources.unpickle import Call, Table

MOST_NAMES = 2000  # each becomes a class of about a kilobyte; a file of names must not become gigabytes of them


class _Fixed(type):
    """Refuses attributes from outside: a record's class is as inert as the record."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise SourceError("the pickle tries to change a class")


class Record(dict[Any, Any], metaclass=_Fixed):
    """An object of a pickle as a mapping of its attributes; `kind` is the class, `args` what it was made from.

    Where a file names a class or function and makes nothing of it (an activation), the value is the record's class.
    """

    __slots__ = ("args", "state")
    kind = ""
    args: tuple[Any, ...]
    state: Any  # what the object's own __setstate__ would have taken, where that is no mapping

    def __new__(cls, *args: Any, **options: Any) -> Record:
        made = super().__new__(cls)
        made.args, made.state = args, None
        return made

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(options)

    def __setstate__(self, state: Any) -> None:
        slots = isinstance(state, tuple) and len(state) == 2 and all(s is None or isinstance(s, dict) for s in state)
        for part in state if slots else (state,):
            if isinstance(part, dict):
                self.update(part)
            elif not slots:
                self.state = part

    # Identity: records are keys in torch's own index, and comparing two hostile ones could recurse without end.
    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__
    __ne__ = object.__ne__


def record_class(module: str, name: str) -> type[Record]:
    """Return the class whose instances stand for those of `module.name`."""
    kind = f"{module}.{name}"
    made = _Fixed(name[:80], (Record,), {"kind": kind, "__module__": __name__, "__slots__": ()})
    return cast("type[Record]", made)


class _Inert(dict[tuple[str, str], object]):
    """Makes a record class for every name that is not plain data."""

    def __missing__(self, name: tuple[str, str]) -> object:
        if runs_programs(".".join(name)):
            raise SourceError(f"the pickle asks for {'.'.join(name)}, {REFUSAL}")
        if len(self) > MOST_NAMES:
            raise SourceError(f"the pickle names more than {MOST_NAMES} classes")
        found = self[name] = record_class(*name)
        return found


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    if not isinstance(text, str) or encoding != "latin1":
        raise SourceError("the pickle encodes bytes in an unknown way")
    return text.encode("latin1")


def inert() -> Table:
    """Return a table in which every name stands for itself; new for each file, because it remembers the names."""
    names = _Inert(WEIGHTS.names)
    names["_codecs", "encode"] = Call(_encode)  # how protocol 2 writes bytes
    return Table(names, "which cannot be read as data")


# Transformer Engine's `_extra_state` lies between the weights of a rank: a BytesIO, which is not looked into.
WEIGHTS_AND_EXTRA = Table(
    {**WEIGHTS.names, ("_io", "BytesIO"): record_class("_io", "BytesIO"), ("_codecs", "encode"): Call(_encode)},
    WEIGHTS.refusal,
)
