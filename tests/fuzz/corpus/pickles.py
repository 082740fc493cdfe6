"""Pickles that run programs, bypass tables of names, or blow up; written opcode by opcode: nothing runs here."""

from __future__ import annotations

import io
import pickle
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.fuzz.corpus.entry import Entry
from tests.fuzz.opcodes import integer, named, text
from tests.fuzz.targets import legacy, metadata, pickles, records

MAGIC = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2) + pickle.dumps({"little_endian": True}, 2)
TENSOR = named("torch._utils _rebuild_tensor_v2")


def call(function: bytes, *arguments: bytes) -> bytes:
    """Call what `function` pushes."""
    return function + b"(" + b"".join(arguments) + b"tR"


def run(name: str, command: str = "touch {}") -> bytes:
    return call(named(name), text(command))


def stacked(module: str, name: str) -> bytes:
    """STACK_GLOBAL, whose words come from anywhere."""
    return text(module) + text(name) + b"\x93"


def _listed(names: str) -> list[str]:
    return [" ".join(name.split()) for name in names.split(",")]


# What takes a command.
SHELLS = _listed("""
    os system, posix system, nt system, os popen, os execv, os posix_spawn, subprocess Popen, subprocess call,
    subprocess check_output, subprocess getoutput, pty spawn, commands getoutput, asyncio create_subprocess_shell,
    multiprocessing.util spawnv_passfds, platform popen, webbrowser open, shutil rmtree, os remove, os unlink
""")
# What takes code of Python's.
CODE = _listed("""
    builtins eval, builtins exec, __builtin__ eval, __builtin__ execfile, builtins compile, timeit timeit, cProfile
    run, profile run, pdb run, bdb Bdb, doctest debug_script, code InteractiveInterpreter, trace Trace, runpy
    _run_code, torch.jit.unsupported_tensor_ops execWrapper, numpy.testing._private.utils runstring, sympy sympify,
    idlelib.pyshell x, torch.utils.data.datapipes.utils.decoder basichandlers, torch._inductor.codecache
    compile_file, pydoc pipepager
""")
# What takes a path, or anything.
PATHS = _listed("""
    builtins open, io open, io FileIO, _io FileIO, io open_code, pathlib Path, tempfile NamedTemporaryFile,
    distutils.file_util write_file, numpy save, numpy memmap, torch save, torch load, torch.jit load, torch.hub
    load, torch.storage _load_from_bytes, torch.package PackageImporter, pickle loads, _pickle loads, _pickle
    Unpickler, dill loads, cloudpickle.cloudpickle _make_function, marshal loads, types FunctionType, types
    CodeType, ctypes CDLL, ctypes.util find_library, importlib import_module, importlib.machinery SourceFileLoader,
    pkgutil resolve_name, zipimport zipimporter, sqlite3 connect, logging.config fileConfig, shelve open, socket
    create_connection, urllib.request urlopen, smtplib SMTP, ssl SSLContext, builtins getattr, builtins setattr,
    builtins vars, builtins globals, builtins type, builtins object, builtins map, builtins filter, builtins
    bytearray, operator attrgetter, operator methodcaller, operator itemgetter, functools partial, functools reduce,
    itertools starmap, collections defaultdict, copyreg _reconstructor, copyreg add_extension, numpy.core.multiarray
    _reconstruct, numpy._core.multiarray scalar, numpy load, numpy.f2py.crackfortran getlincoef, torch._utils
    _rebuild_device_tensor_from_numpy, torch._utils _rebuild_wrapper_subclass, torch._tensor _rebuild_from_type_v2,
    torch._utils _rebuild_sparse_tensor, torch nn.Module, torch.nn.modules.linear Linear, bridge.core.formats.unpickle
    Call, bridge.core.formats.inert_pickle record_class, sys settrace, gc get_objects, inspect getattr_static, weakref
    finalize, atexit register, threading Thread, signal signal, site addpackage, venv create, ensurepip _run_pip,
    pip main, setuptools.msvc x
""")

GETATTR = call(named("builtins getattr"), call(named("builtins __import__"), text("os")), text("system"))
# Programs that leave one value; `{}` is the canary's path.
RUNNING: dict[str, bytes] = {
    **{name.replace(" ", "."): run(name) for name in SHELLS},
    **{name.replace(" ", "."): run(name, "open('{}', 'w')") for name in CODE},
    **{name.replace(" ", "."): run(name, "{}") for name in PATHS},
    "getattr chain": call(GETATTR, text("touch {}")),
    "reduce of a reduce": call(call(named("functools partial"), named("os system")), text("touch {}")),
    "map over system": call(
        named("builtins list"), call(named("builtins map"), named("os system"), b"]" + text("touch {}") + b"a")
    ),
    "stack global": call(stacked("os", "system"), text("touch {}")),
    "stack global from memo": call(text("system") + b"\x940" + text("os") + b"h\0\x93", text("touch {}")),
    "dotted name": call(stacked("builtins", "eval.__call__"), text("open('{}', 'w')")),
    "dotted through torch": call(stacked("torch.serialization", "os.system"), text("touch {}")),
    "globals of an allowed one": call(
        stacked("torch._utils", "_rebuild_tensor_v2.__globals__.__getitem__"), text("__builtins__")
    ),
    "inst": b"(" + text("touch {}") + b"ios\nsystem\n",
    "obj": b"(" + named("os system") + text("touch {}") + b"o",
    "newobj": named("subprocess Popen") + text("touch {}") + b"\x85\x81",
    "newobj_ex": named("subprocess Popen") + text("touch {}") + b"\x85}\x92",
    "newobj of an allowed one": named("collections OrderedDict")
    + b")\x81"
    + b"}"
    + text("__class__")
    + named("os system")
    + b"sb",
    "build calls setstate": named("bridge.core.formats.unpickle Sealed") + b")\x81}b",
    "build on the table": TENSOR + b"}" + text("make") + named("os system") + b"sb",
    "build slots on the table": TENSOR + b"N}" + text("make") + named("os system") + b"s\x86b",
    "build on a class": named("torch FloatStorage") + b"}" + text("__setstate__") + named("os system") + b"sb",
    "build on a dict": b"}" + b"}" + text("__class__") + named("os system") + b"sb",
    "numpy object array": call(
        named("numpy.core.multiarray _reconstruct"), named("numpy ndarray"), integer(0), b"C\x01b"
    )
    + b"("
    + integer(1)
    + integer(0)
    + b"\x85"
    + call(named("numpy dtype"), text("O8"))
    + b"\x89"
    + b"]"
    + GETATTR
    + b"atb",
    "ext1": b"\x82\x01" + text("touch {}") + b"\x85R",
    "ext2": b"\x83\x01\x01" + text("touch {}") + b"\x85R",
    "ext4": b"\x84\x01\x01\x01\x01" + text("touch {}") + b"\x85R",
    "persistent id by text": b"Pos.system\n",
    "persistent id of a function": named("os system") + b"Q",
    "persistent id of a deep tuple": b"(" + text("storage") + b")" + b"\x85" * 5000 + b"tQ",
    "storage that is a function": b"("
    + text("storage")
    + named("os system")
    + text("0")
    + text("cpu")
    + integer(6)
    + b"tQ",
    "out-of-band buffer": b"\x97",
    "read-only buffer": b"\x97\x98",
}
LONG = struct.pack("<I", 0x7FFFFFFF)
COSTLY = 200_000  # bytes of a program that takes a third of a second to read, or longer
EXPLODING: dict[str, bytes] = {
    "memo index": b"Nr" + LONG,
    "memo index of text": b"Np99999999999999999999\n",
    "mark after mark": b"(" * 3_000_000 + b"N",
    "empty sets": b"](" + b"\x8f" * 4_000_000 + b"e",
    "empty lists": b"](" + b"]" * 8_000_000 + b"e",
    "dicts of one": b"](" + b"}K\0K\0s" * 1_000_000 + b"e",
    "memoized": b"](" + b"]\x94" * 4_000_000 + b"e",
    "nested lists": b"]" * 200_000 + b"a" * 199_999,
    "nested tuples": b")" + b"\x85" * 500_000,
    "nested key": b"})" + b"\x85" * 200_000 + b"Ns",
    "laughs": b"K\1" + b"2\x86" * 60,
    "key of laughs": b"}K\1" + b"2\x86" * 60 + b"Ns",
    "frozenset of laughs": b"(K\1" + b"2\x86" * 60 + b"\x91",
    "bytearray": b"\x96" + b"\xff\xff\xff\x7f\0\0\0\0",
    "long text": b"X\xff\xff\xff\x7f",
    "long text of 64 bits": b"\x8d" + b"\xff" * 7 + b"\x7f",
    "bytes of 64 bits": b"\x8e" + b"\xff" * 7 + b"\x7f",
    "negative string": b"T\xff\xff\xff\xff",
    "frame": b"\x95" + b"\xff" * 7 + b"\x7fN",
    "long integer": b"\x8b\xff\xff\xff\x7f",
    "integer of 5 MB": b"\x8b" + struct.pack("<i", 5_000_000) + b"\x7f" * 5_000_000,
    "decimal of 100 kB": b"L" + b"9" * 100_000 + b"L\n",
    "self-containing": b"]\x94h\0a",
    "dup for ever": b"N" + b"2" * 5_000_000,
    "classes": b"".join(named(f"m{n} x") + b"0" for n in range(9000)) + b"N",
}


def zipped(program: bytes) -> bytes:
    """A file of torch.save with this pickle."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        for name, content in (
            ("data.pkl", b"\x80\x04" + program + b"."),
            ("byteorder", b"little"),
            ("version", b"3\n"),
        ):
            made.writestr(zipfile.ZipInfo(f"archive/{name}"), content)
    return out.getvalue()


def _reading(file: str, target: Any, wrap: Any) -> tuple[str, Any, Any]:
    return file, target.read, wrap


PLACES: dict[str, tuple[str, Any, Any]] = {
    "bin": (pickles.FILE, pickles.read, zipped),
    "legacy": (legacy.FILE, legacy.read, lambda program: MAGIC + b"\x80\x04" + program + b"." + pickle.dumps([], 2)),
    "metadata": (metadata.FILE, metadata.read, lambda program: b"\x80\x04" + program + b"."),
    "common": (records.FILE, records.read, zipped),
}


def entries(whole: bool) -> Iterator[Entry]:
    """Every program in every place that a pickle is read from; in `common.pt` what names nothing is only data.

    One unpickler reads all places, and a program of a megabyte takes it a second: unless `whole`, each of those goes to
    one place, and each place gets some.
    """
    long = [name for name, program in EXPLODING.items() if len(program) >= COSTLY]
    for number, (place, (file, read, wrap)) in enumerate(PLACES.items()):
        for name, program in (RUNNING | EXPLODING).items():
            if not whole and name in long and long.index(name) % len(PLACES) != number:
                continue

            def files(canary: Path, program: bytes = program, file: str = file, wrap: Any = wrap) -> dict[str, bytes]:
                return {file: wrap(_aimed(program, canary))}

            yield Entry(f"{place}: {name}", files, read, refused=place != "common")
    several = (("x/data.pkl", b"N."), ("archive/data.pkl", RUNNING["os.system"] + b"."), ("archive/data/0", b""))
    yield Entry("bin: several data.pkl", lambda canary: {pickles.FILE: _zip(several)}, pickles.read)
    yield Entry("bin: data.pkl twice", lambda canary: {pickles.FILE: _zip((several[1], several[1]))}, pickles.read)


def _zip(members: Any) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as made:
        for name, content in members:
            made.writestr(zipfile.ZipInfo(name), content)
    return out.getvalue()


def _aimed(program: bytes, canary: Path) -> bytes:
    """The program with the canary's path in its texts, whose lengths stand before them."""
    if b"{}" not in program:
        return program
    parts, at = [], 0
    while (found := program.find(b"X", at)) >= 0 and found + 5 <= len(program):
        (length,) = struct.unpack_from("<I", program, found + 1)
        word = program[found + 5 : found + 5 + length]
        if length < 200 and b"{}" in word:
            parts += [program[at:found], text(word.decode().replace("{}", str(canary)))]
            at = found + 5 + length
        else:
            parts.append(program[at : found + 1])
            at = found + 1
    return b"".join([*parts, program[at:]])
