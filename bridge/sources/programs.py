"""Names by which a file runs programs or code where a loader obeys it; must never look one up.

Nothing that a file names is called here. A file with one of these is refused all the same: no training program writes
them, and the next loader may obey.
"""

from __future__ import annotations

_MODULES = (
    "os", "posix", "nt", "pty", "subprocess", "shutil", "sys", "importlib", "runpy", "code", "codeop", "ctypes",
    "webbrowser", "timeit", "pdb", "bdb", "commands",
)  # fmt: skip
_BUILTINS = ("eval", "exec", "compile", "__import__", "open", "input", "breakpoint")
REFUSAL = "by which a file runs programs; nothing was run. Load it nowhere, and get the checkpoint from who made it"


def runs_programs(name: str) -> bool:
    """Whether a dotted name runs what it is given.

    >>> runs_programs("posix.system"), runs_programs("builtins.eval"), runs_programs("argparse.Namespace")
    (True, True, False)
    """
    module, _, rest = name.partition(".")
    return rest in _BUILTINS if module in ("builtins", "__builtin__") else module in _MODULES
