"""Pickles as programs: valid ones with opcodes changed, and the gadgets that attackers put into them; runs none."""

from __future__ import annotations

import pickle
import pickletools
import struct
from collections.abc import Sequence

from hypothesis import strategies as st

# What a loader that obeys would look up. The corpus has whole attacks; these stand between a checkpoint's own opcodes.
GLOBALS = (
    "os system",
    "posix system",
    "builtins eval",
    "builtins exec",
    "builtins getattr",
    "builtins __import__",
    "__builtin__ eval",
    "subprocess Popen",
    "importlib import_module",
    "operator attrgetter",
    "operator methodcaller",
    "functools partial",
    "functools reduce",
    "torch load",
    "torch.hub load",
    "torch.storage _load_from_bytes",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_tensor_v3",
    "torch._utils _rebuild_parameter",
    "torch FloatStorage",
    "torch BFloat16Storage",
    "torch.storage UntypedStorage",
    "torch Size",
    "torch float32",
    "collections OrderedDict",
    "collections defaultdict",
    "numpy.core.multiarray _reconstruct",
    "numpy ndarray",
    "copyreg _reconstructor",
    "copyreg __newobj__",
    "copy_reg _reconstructor",
    "pickle loads",
    "_pickle loads",
    "torch.distributed.checkpoint.metadata Metadata",
    "torch.distributed.checkpoint.metadata MetadataIndex",
    "torch.distributed.checkpoint.filesystem _StorageInfo",
    "pathlib PosixPath",
    "argparse Namespace",
    "_io BytesIO",
    "_codecs encode",
    "builtins bytearray",
    "builtins object",
    "builtins type",
    " ",
    "a.b c.d",
    "__main__ x",
    "sys exit",
    "bridge.core.formats.unpickle Call",
    "bridge.core.errors BridgeError",
)
NUMBERS = (0, 1, 2, 3, 4, 5, 6, 24, 255, 2**31 - 1, -1, -(2**31))
LONGS = (2**31, 2**40, 2**63 - 1, 2**63, 2**64, 2**200, -(2**70))


def integer(n: int) -> bytes:
    """Push an integer of any size."""
    return pickle.BININT + struct.pack("<i", n) if -(2**31) <= n < 2**31 else pickle.dumps(n, 2)[2:-1]


def text(word: str) -> bytes:
    """Push a string."""
    data = word.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data


def named(name: str) -> bytes:
    """Look a name up."""
    module, _, attribute = name.partition(" ")
    return pickle.GLOBAL + f"{module}\n{attribute}\n".encode()


VALUES = (
    *map(integer, (*NUMBERS, *LONGS)),
    *(text(word) for word in ("", "0", "1", "a", "cpu", "x" * 200, "\ud800", "../a", "storage")),
    b"N",
    b"\x88",
    b"\x89",
    b"G\x7f\xf8\0\0\0\0\0\0",
    b"G\x7f\xf0\0\0\0\0\0\0",
    b"]",
    b"}",
    b")",
    b"\x8f",
    b"C\x02ab",
)
BARE = (
    b"(",
    b"0",
    b"1",
    b"2",
    b".",
    b"R",
    b"b",
    b"o",
    b"Q",
    b"t",
    b"l",
    b"d",
    b"s",
    b"u",
    b"a",
    b"e",
    b"\x85",
    b"\x86",
    b"\x87",
    b"\x81",
    b"\x91",
    b"\x90",
    b"\x92",
    b"\x93",
    b"\x94",
    b"\x95\xff\xff\0\0\0\0\0\0",
    b"\x96\xff\xff\xff\x7f\0\0\0\0",
    b"\x97",
    b"\x98",
    b"q\0",
    b"r\xff\xff\xff\x7f",
    b"h\0",
    b"j\xff\xff\xff\x7f",
    b"\x82\x01",
    b"\x84\xff\xff\xff\x7f",
    b"P0\n",
    b"I00\n",
    b"I99999999999999999999\n",
    b"Ios\n",
    b"F1e999\n",
    b"S'a'\n",
    b"S'\n",
    b"Va\\u0041\n",
    b"L5\n",
    b"p0\n",
    b"g0\n",
    b"\x80\x05",
    b"\x80\xff",
    b"\x8a\xff" + b"\x7f" * 8,
    b"\x8b\xff\xff\xff\x7f",
    b"\x8b\xff\xff\xff\xff",
    b"\x8e" + b"\xff" * 8,
    b"\x8d" + b"\xff" * 7 + b"\x7f",
    b"B\xff\xff\xff\x7f",
    b"T\xff\xff\xff\xff",
    b"X\xff\xff\xff\x7f",
    b"ios\nsystem\n",
)
# Opcodes that do the same with other things: one in the place of another keeps the program going.
_INTEGERS = ("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "INT")
_TEXTS = ("BINUNICODE", "SHORT_BINUNICODE", "SHORT_BINSTRING")
_KINDS = (*_INTEGERS, *_TEXTS, "GLOBAL")


def split(program: bytes) -> list[tuple[str, bytes]]:
    """The opcodes of a pickle, each with its bytes."""
    ops = [(op.name, at or 0) for op, _, at in pickletools.genops(program)]
    ends = [at for _, at in ops[1:]] + [len(program)]
    return [(name, program[at:end]) for (name, at), end in zip(ops, ends, strict=True)]


@st.composite
def programs(draw: st.DrawFn, program: bytes, names: Sequence[str] = (), most: int = 3) -> bytes:
    """`program` with some of its opcodes changed; `names`: globals to use besides."""
    ops = [op for op in split(program) if op[0] != "FRAME"]
    for _ in range(draw(st.integers(1, most))):
        at, other = draw(st.integers(0, len(ops) - 1)), draw(st.integers(0, len(ops) - 1))
        change = draw(
            st.sampled_from(("like", "like", "like", "like", "value", "global", "drop", "twice", "swap", "bare", "run"))
        )
        if change == "like":
            at = next((i for i in (*range(at, len(ops)), *range(at)) if ops[i][0] in _KINDS), at)
            ops[at] = draw(_like(*ops[at], names))
        elif change == "value":
            ops[at] = ("BININT", draw(st.sampled_from(VALUES)))
        elif change == "global":
            ops[at] = ("GLOBAL", named(draw(st.sampled_from((*GLOBALS, *names)))))
        elif change == "drop" and len(ops) > 1:
            del ops[at]
        elif change == "twice":
            ops.insert(other, ops[at])
        elif change == "swap":
            ops[at], ops[other] = ops[other], ops[at]
        elif change == "run":
            word = draw(st.sampled_from(GLOBALS))
            ops.insert(at, ("REDUCE", named(word) + text("touch attacked") + b"\x85R"))
        else:
            ops.insert(at, ("MARK", draw(st.sampled_from(BARE)) * draw(st.sampled_from((1, 1, 1, 2, 2000)))))
    return b"".join(content for _, content in ops)


@st.composite
def _like(draw: st.DrawFn, name: str, content: bytes, names: Sequence[str]) -> tuple[str, bytes]:
    """An opcode of the same kind: a number for a number, a name for a name."""
    if name in _INTEGERS:
        return "BININT", integer(draw(st.sampled_from((*NUMBERS, *LONGS))))
    if name in _TEXTS:
        return "BINUNICODE", text(
            draw(st.sampled_from(("", "0", "1", "2", "cpu", "storage", "a", "é" * 70, "data.pkl")))
        )
    return "GLOBAL", named(draw(st.sampled_from((*GLOBALS, *names)))) if name == "GLOBAL" else content
