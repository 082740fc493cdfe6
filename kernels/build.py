"""Compile kernels ahead of time: `python -m bridge._kernels.build [FILE ...]`, all files if none is given.

A process of its own: numba is imported for a given level of processors, and in other processes not at all.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from bridge._kernels import jit, objects
from bridge._kernels.native import link
from bridge.core.output.temporary import write_whole

OTHERS = {"__init__", "build", "jit", "native", "objects"}


def modules() -> list[str]:
    """The files that hold kernels."""
    return sorted({path.stem for path in objects.HERE.glob("*.py")} - OTHERS)


def build(module: str, level: str, directory: Path, linked: bool = True) -> Path:
    """Compile the kernels of one file; the result is visible in one rename. `linked`: as a shared library if it can."""
    jit.BUILDING = True
    names, parts = {}, []
    for function in vars(importlib.import_module(f"bridge._kernels.{module}")).values():
        for words in getattr(function, "words", ()):
            symbol, code = compiled(function, words)
            names[" ".join((function.__qualname__, *words))] = symbol
            parts.append(code)
    link(module, names, parts)  # fails here, and not where it is used, if the code needs numba's runtime
    library = shared(names, parts) if linked else None
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{objects.file_name(module, level)}{objects.LINKED if library else ''}"
    write_whole(path, objects.sealed(library or objects.packed(names, parts)))
    if directory == objects.BESIDE:  # of this source alone; others may share a user's cache
        for old in {*directory.glob(f"{module}-*.{sys.platform}-{level}*")} - {path}:
            old.unlink(missing_ok=True)
    return path


def shared(names: dict[str, str], parts: list[bytes]) -> bytes | None:
    """A shared library of object files and the names of their symbols; None without a compiler of C."""
    tool = shutil.which("cc") if sys.platform == "linux" else None
    if tool is None:
        return None
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        told = json.dumps(json.dumps(names, sort_keys=True))  # the quotes and backslashes of JSON are those of C
        (place / "names.c").write_text(f"const char {objects.NAMES}[] = {told};\n")
        files = [place / f"{at}.o" for at in range(len(parts))]
        for file, part in zip(files, parts, strict=True):
            file.write_bytes(part)
        command = [tool, "-shared", "-s", "-Wl,-z,defs", "-o", place / "out", place / "names.c", *files]
        run = subprocess.run(command, capture_output=True, cwd=place)
        return (place / "out").read_bytes() if run.returncode == 0 else None


def compiled(function: Any, words: tuple[str, ...]) -> tuple[str, bytes]:
    """The symbol and the object file of a kernel for one signature."""
    from numba.core import compiler
    from numba.core.registry import cpu_target

    flags = compiler.Flags()
    flags.nrt, flags.release_gil, flags.error_model = False, True, "numpy"
    flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    entry, types = _entry(function, words)
    made = compiler.compile_extra(cpu_target.typing_context, cpu_target.target_context, entry, types, None, flags, {})
    return made.fndesc.llvm_func_name, made.library._compiled_object


def _entry(function: Any, words: tuple[str, ...]) -> tuple[Any, tuple[Any, ...]]:
    """A function that makes a kernel's arrays of their addresses and lengths, and the types of its arguments."""
    from numba import types

    names, passed, kinds = [], [], []
    for at, word in enumerate(words):
        dtype, _, axes = word.rstrip("=").partition("[")
        lengths = [f"n{at}_{axis}" for axis in range(axes.count(":"))]
        names += [f"x{at}", *lengths]
        passed.append(f"array(x{at}, ({', '.join(lengths)},))" if axes else f"x{at}")
        one = getattr(types, dtype)
        kinds += [types.CPointer(one), *[types.int64] * len(lengths)] if axes else [one]
    space = {"array": _array(), "kernel": function}
    exec(f"def entry({', '.join(names)}): kernel({', '.join(passed)})", space)
    return space["entry"], tuple(kinds)


@cache
def _array() -> Any:
    """Make an array of its address and its lengths; numba's `carray` needs numba's runtime."""
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic
    from numba.np.arrayobj import make_array, populate_array

    @intrinsic  # type: ignore[untyped-decorator]
    def array(_: Any, address: Any, lengths: Any) -> Any:
        made = types.Array(address.dtype, lengths.count, "C")

        def code(context: Any, builder: Any, _: Any, given: Any) -> Any:
            out = make_array(made)(context, builder)
            size = context.get_abi_sizeof(context.get_data_type(address.dtype))
            shape, strides = cgutils.unpack_tuple(builder, given[1]), [context.get_constant(types.intp, size)]
            for length in reversed(shape[1:]):
                strides.insert(0, builder.mul(strides[0], length))
            data = builder.bitcast(given[0], out.data.type)
            populate_array(out, data=data, shape=shape, strides=strides, itemsize=strides[-1], meminfo=None)
            return out._getvalue()

        return made(address, lengths), code

    return array


def main() -> None:
    """The command."""
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("files", nargs="*", default=modules())
    asked.add_argument("--level", default=objects.level())
    asked.add_argument("--out", type=Path, default=objects.BESIDE)
    asked.add_argument("--unlinked", action="store_true", help="object files, no shared library")
    given = asked.parse_args()
    for name in [name for name in os.environ if name.startswith("NUMBA_")]:
        del os.environ[name]  # no setting of the user's gets into code that is kept
    if given.level in objects.LEVELS:
        os.environ.update(NUMBA_CPU_NAME=given.level, NUMBA_CPU_FEATURES="")
    os.environ.update(NUMBA_DISABLE_INTEL_SVML="1")
    os.umask(os.umask(0) | 0o022)  # nobody else may write code that is loaded
    task = partial(build, level=given.level, directory=given.out, linked=not given.unlinked)
    if len(given.files) == 1:
        print(task(given.files[0]))
        return
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        for path in pool.map(task, given.files):
            print(path)


if __name__ == "__main__":
    from bridge._kernels.build import main as main_of_module  # by the name that other processes import

    main_of_module()
