"""Which test files a change can reach: those whose imports, names of modules or files lead to what changed.

    pytest --changed            # what changed since HEAD; what HEAD changed if the tree is clean

`make check` uses it; CI runs everything. Edges are imports (also inside functions and for types only), strings that
name a module or file of the tree (lazy names, processes that tests start), and names of modules that are begun
(`f"bridge.targets.{name}"`), where only those count that a string of the tests goes on with. What reads the other
files is guessed by the folders that tests name.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).parent.parent
CODE = ("bridge", "kernels", "tests", "docs", "examples", "benchmarks")
EVERYTHING = ("pyproject.toml", "Makefile", "tests/conftest.py", "tests/constraints.txt")
PACKAGE = "bridge/__init__.py"
PROSE = ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "NOTICE", ".gitignore")
LONGEST = 120  # characters of a string that may be a name
TABLES, READS_TABLES = "mappings/", "bridge/core/mappings.py"


@dataclass(frozen=True)
class Facts:
    """What a file says: files that it names, how it begins the names of modules, and its strings, cut at slashes."""

    names: frozenset[str]
    begins: frozenset[str]
    strings: frozenset[str]


class Tree:
    """Imports of a checkout: file -> the files that it names, paths relative to `root` with slashes."""

    def __init__(self, root: Path = ROOT) -> None:
        self.files = {
            path.relative_to(root).as_posix(): path for folder in CODE for path in (root / folder).rglob("*.py")
        }
        self.modules = {_module(file): file for file in self.files}
        self._facts: dict[str, Facts] = {}

    @cached_property
    def lazy(self) -> dict[str, set[str]]:
        """Public name of the package -> the files behind it: `bridge.convert` reaches not all that `bridge` names."""
        names: dict[str, set[str]] = {}
        if PACKAGE in self.files:
            for node in ast.walk(ast.parse(self.files[PACKAGE].read_text())):
                if isinstance(node, ast.Dict):
                    for key, value in zip(node.keys, node.values, strict=True):
                        if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                            names[str(key.value)] = set(self._module_files(str(value.value)))
        return names

    def closure(self, file: str) -> set[str]:
        """All that a file leads to, itself included. Where a module is chosen by name, those that tests name."""
        seen, waiting, begins, words = {file}, [file], set[str](), set[str]()
        while waiting:
            facts = self.facts(at := waiting.pop())
            begins |= facts.begins
            words |= facts.strings if at.startswith("tests/") else set()
            found = set(facts.names) if at != PACKAGE else set()
            if not waiting:
                found |= self._chosen(begins, words)
            waiting += found - seen
            seen |= found
        return seen

    def reached(self, changed: Iterable[str]) -> set[str] | None:
        """The test files that a change of these files can reach; None if that is every one."""
        changed = {path for path in changed if path not in PROSE}
        code = changed & {*self.files}
        if changed & {*EVERYTHING, PACKAGE} or any(path.endswith(".py") for path in changed - code):
            return None  # what is removed is named by nobody any more
        tests = (file for file in self.files if file.startswith("tests/") and Path(file).name.startswith("test_"))
        reached = set()
        for test in tests:
            closure = self.closure(test)
            if closure & code or any(self._reads(closure, path) for path in changed - code):
                reached.add(test)
        return reached

    def facts(self, file: str) -> Facts:
        """The facts of a file, read once."""
        if file not in self._facts:
            names, begins, strings = set[str](), set[str](), set[str]()
            for node in ast.walk(ast.parse(self.files[file].read_text())):
                if isinstance(node, ast.Import):
                    names.update(*(self._module_files(alias.name) for alias in node.names))
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    for alias in node.names:
                        names.update(self._module_files(f"{node.module}.{alias.name}"))
                        names |= self.lazy.get(alias.name, set()) if node.module == "bridge" else set()
                elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "bridge":
                    names |= self.lazy.get(node.attr, set())
                elif isinstance(node, ast.JoinedStr) and node.values and isinstance(node.values[0], ast.Constant):
                    begins.add(str(node.values[0].value))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < LONGEST:
                    strings.update(node.value.split("/"))
                    names.update(self._named(node.value))
            begins = {word for word in begins if word.split(".")[0] in CODE and word.endswith(".")}
            if file.startswith(("bridge/", "kernels/")):  # a target names the test of its parity
                names = {name for name in names if name.startswith(("bridge/", "kernels/"))}
            self._facts[file] = Facts(frozenset(names - {file}), frozenset(begins), frozenset(strings))
        return self._facts[file]

    def _chosen(self, begins: set[str], words: set[str]) -> set[str]:
        """Files of modules that begin so and go on with a word of the tests."""
        return {
            file
            for module, file in self.modules.items()
            for begin in begins
            if module.startswith(begin) and module[len(begin) :].split(".")[0] in words
        }

    def _reads(self, closure: set[str], path: str) -> bool:
        """Whether files of a test's closure may read a file that is not Python."""
        if path.startswith(TABLES):
            return READS_TABLES in closure
        folder, name = PurePosixPath(path).parent.as_posix(), PurePosixPath(path).name
        if path.startswith(("tests/", "bridge/", "kernels/")):
            return any(file.startswith(f"{folder}/") or name in self.facts(file).strings for file in closure)
        top = PurePosixPath(path).parts[0]
        return any(top in self.facts(file).strings for file in closure if file.startswith("tests/"))

    def _module_files(self, module: str) -> Iterator[str]:
        """The file of a module and those of the packages around it; kernels lie beside the package in a checkout."""
        if module.startswith("bridge._kernels"):
            module = module.replace("bridge._kernels", "kernels", 1)
        parts = module.split(".")
        for end in range(1, len(parts) + 1):
            if file := self.modules.get(".".join(parts[:end])):
                yield file

    def _named(self, word: str) -> Iterator[str]:
        if word in self.files:
            yield word
        elif word.split(".")[0] in CODE and "." in word and word in self.modules:
            yield from self._module_files(word)


def _module(file: str) -> str:
    parts = PurePosixPath(file).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def changed_files(root: Path = ROOT) -> set[str]:
    """Files that differ from HEAD, new ones included; those that HEAD changed if there are none."""

    def git(*arguments: str) -> set[str]:
        run = subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True)
        return {*run.stdout.split("\0")} - {""}

    return (
        git("diff", "--name-only", "-z", "HEAD") | git("ls-files", "--others", "--exclude-standard", "-z")
        or git("diff", "--name-only", "-z", "HEAD~1", "HEAD")
    )  # fmt: skip


class Changed:
    """Collects only the test files that the change can reach; the others are not imported."""

    def __init__(self) -> None:
        self.files = changed_files()
        self.reached = Tree().reached(self.files)

    def pytest_report_header(self) -> str:
        what = "every test file" if self.reached is None else f"{len(self.reached)} test files"
        return f"{len(self.files)} changed files reach {what}"

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        if self.reached is None or collection_path.suffix != ".py":
            return None
        return collection_path.relative_to(ROOT).as_posix() not in self.reached or None


def register(config: pytest.Config) -> None:
    """Select by what changed if `--changed` asks for it."""
    if config.getoption("changed"):
        config.pluginmanager.register(Changed(), "changed")
