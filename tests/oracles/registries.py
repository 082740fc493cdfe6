"""Renew mappings/runtimes/registries: what vLLM, SGLang and transformers have a class for, read from their source.

python -m tests.oracles.registries vllm FOLDER        FOLDER has the package `vllm` (a wheel unpacked, a checkout)
python -m tests.oracles.registries sglang FOLDER
python -m tests.oracles.registries transformers       as it is installed, or in FOLDER

Nothing of them is imported: their files are parsed. Where code asks for the platform, the first branch counts, CUDA's.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from bridge.core.mappings import mappings

# Classes of unquantized matrices, whatever they are given; those that end so and are given no `quant_config` are, too.
FLOAT_ONLY = {"nn.Linear", "torch.nn.Linear", "GateLinear"}
MATRICES = ("Linear", "LMHead")
TOWER = re.compile(r"Vision|Visual|ViT|Audio|Siglip|CLIP|Pixtral")  # classes of images and sound
COMMON = ("self_attn", "mlp")  # modules that towers and text both have
# what loaders join in code: no table of theirs has it
JOINED = {"wk_weights_proj": ["wk", "weights_proj"]}
NUMBERS = ("start_layer", "end_layer")
VERSION = re.compile(r"^Version: (.+)$", re.MULTILINE)
OTHER_PLATFORM = re.compile(r"(?<!not current_platform\.is_)(rocm|xpu|cpu|hip|npu|tpu)")
# where classes of modules are defined
MODELS = re.compile(r"\.(models|layers\.(attention|mamba|mla))(\.|$)")
# of dictionaries of vLLM's registry: draft models
DRAFTS = "_SPECULATIVE_DECODING_MODELS"


@dataclass(frozen=True)
class Class:
    """A class of a program: the module that defines it, and its definition."""

    module: str
    node: ast.ClassDef

    @property
    def key(self) -> tuple[str, str]:
        return self.module, self.node.name


class Method:
    """What one method says: calls with the name that each result gets, and names of classes.

    `values`: names that are passed on or are defaults; `local`: what local names are set to; `returned`: names.
    `fused`: a module of several matrices -> their names in checkpoints.
    """

    def __init__(self, node: ast.FunctionDef) -> None:
        nodes = list(ast.walk(node))
        self.local: dict[str, list[str]] = {}
        self._nones: set[str] = set()  # local names that are None unless for one format
        self.fused: dict[str, list[str]] = {}
        named: dict[ast.Call, str] = {}
        nones: dict[str, list[bool]] = {}
        for inner in nodes:
            if not isinstance(inner, (ast.Assign, ast.AnnAssign)) or inner.value is None:
                continue
            self._stacked(inner)
            names = [name for target in _targets(inner) for name in _self_names(target) if name not in NUMBERS]
            if names:
                named |= {call: names[0] for call in ast.walk(inner.value) if isinstance(call, ast.Call)}
            for target in _targets(inner):
                if isinstance(target, ast.Name):
                    of = [n.id for n in ast.walk(inner.value) if isinstance(n, ast.Name)]
                    self.local.setdefault(target.id, []).extend(of)
                    nones.setdefault(target.id, []).append(self.is_none(inner.value, False))
        self._nones = {name for name, given in nones.items() if all(given)}
        calls = [call for call in nodes if isinstance(call, ast.Call)]
        self._made = {call: _called(call) for call in calls}
        self.calls = [(call, named.get(call) or _by_prefix(call)) for call in calls]
        passed = [inner.value for inner in nodes if isinstance(inner, ast.keyword)]
        passed += [*node.args.defaults, *node.args.kw_defaults]
        self.values = [value.id for value in passed if isinstance(value, ast.Name)]
        self.returned = [
            inner.value.id for inner in nodes if isinstance(inner, ast.Return) and isinstance(inner.value, ast.Name)
        ]

    def made(self, call: ast.Call) -> str:
        """What is called, as it is written."""
        return self._made[call]

    def is_none(self, value: ast.AST | None, without: bool) -> bool:
        """Whether `quant_config=value` gives none. `without`: the method itself has none."""
        if value is None or (isinstance(value, ast.Constant) and value.value is None):
            return True
        if isinstance(value, ast.IfExp) and "get_name() ==" in ast.unparse(value.test):
            return self.is_none(value.orelse, without)
        name = value.id if isinstance(value, ast.Name) else ""
        return name in self._nones or (without and name == "quant_config")

    def _stacked(self, node: ast.Assign | ast.AnnAssign) -> None:
        """`self.packed_modules_mapping["fused"] = [...]`, and `stacked_params_mapping = [("fused", "part", shard)]`."""
        target = _targets(node)[0]
        if isinstance(target, ast.Subscript) and "packed_modules_mapping" in ast.unparse(target.value):
            if isinstance(target.slice, ast.Constant) and (names := _strings(node.value)):
                self.fused[target.slice.value] = names
        elif (
            isinstance(target, ast.Name) and "stacked_params_mapping" in target.id and isinstance(node.value, ast.List)
        ):
            parts: dict[str, list[str]] = {}
            for row in node.value.elts:
                words = [w.value for w in row.elts if isinstance(w, ast.Constant)] if isinstance(row, ast.Tuple) else []
                if len(words) > 1 and all(isinstance(word, str) for word in words[:2]):
                    fused, part = (word.strip(".").removesuffix(".weight").rpartition(".")[2] for word in words[:2])
                    parts.setdefault(fused, []).append(part)
            for fused, names in parts.items():
                self.fused.setdefault(fused, names)


@dataclass
class Reading:
    """What the classes of one architecture say. `made`: "owner.name" -> whether each matrix there is unquantized."""

    made: dict[str, list[bool]] = field(default_factory=dict)
    fused: dict[str, list[str]] = field(default_factory=dict)
    seen: set[tuple[str, str, str, bool]] = field(default_factory=set)
    towers: int = 0

    def groups(self) -> list[str]:
        """The names that one matrix holds, in its order, as in `fused` of a runtime."""
        groups = {" ".join(dict.fromkeys(names)) for names in self.fused.values()}
        return sorted(words for words in groups if " " in words)

    def plain(self) -> list[str]:
        """Matrices that stay unquantized by their names in checkpoints, with the module that holds them."""
        kept = {name for name, made in self.made.items() if all(made)}
        parts: set[str] = set()
        for name in kept:
            owner, _, last = name.rpartition(".")
            parts |= {f"{owner}.{part}".strip(".") for part in self.fused.get(last, JOINED.get(last, [last]))}
        return sorted(parts)


class Program:
    """The source of a program, parsed where it is asked for. `root`: the folder that has its package."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.classes: dict[str, Class] = {}  # architecture -> its class
        self._parsed: dict[str, ast.Module | None] = {}
        self._found: dict[tuple[str, str], Class | None] = {}
        self._says: dict[ast.FunctionDef, Method] = {}

    def path(self, module: str) -> Path | None:
        """The file of a module, None for one of another package."""
        path = self.root.joinpath(*module.split("."))
        return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)

    def parsed(self, module: str) -> ast.Module | None:
        if module not in self._parsed:
            file = self.path(module)
            self._parsed[module] = ast.parse(file.read_text(encoding="utf-8")) if file else None
        return self._parsed[module]

    def find(self, module: str, name: str) -> Class | None:
        """The class that a name means in a module, through its imports; None if it is none of the program's."""
        if (module, name) not in self._found:
            self._found[module, name] = None  # imports may go in a circle
            self._found[module, name] = self._find(module, name)
        return self._found[module, name]

    def _find(self, module: str, name: str) -> Class | None:
        tree = self.parsed(module)
        if tree is None:
            return None
        for node in _first_branches(tree.body):
            if isinstance(node, ast.ClassDef) and node.name == name:
                return Class(module, node)
            elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
                if name in {target.id for target in node.targets if isinstance(target, ast.Name)}:
                    return self.find(module, node.value.id)
            elif isinstance(node, ast.ImportFrom):
                origin = next((alias.name for alias in node.names if (alias.asname or alias.name) == name), "")
                if origin and (found := self.find(self._absolute(module, node), origin)):
                    return found
        return None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        file = self.path(module)
        up = node.level - (file is not None and file.name == "__init__.py")
        parts = module.split(".")
        return ".".join([*parts[: len(parts) - up], *([node.module] if node.module else [])])

    def bases(self, found: Class) -> Iterator[Class]:
        """A class and those that it is made of, itself first."""
        yield found
        for base in found.node.bases:
            if isinstance(base, ast.Name) and (parent := self.find(found.module, base.id)) and parent.key != found.key:
                yield from self.bases(parent)

    def read(self, found: Class, into: Reading, owner: str = "", without: bool = False) -> None:
        """Follow the modules that a class makes. `owner`: its name in the model; `without`: it gets no quant_config."""
        if (*found.key, owner, without) in into.seen:
            return
        into.seen.add((*found.key, owner, without))
        tower = bool(TOWER.search(found.node.name)) and not found.node.name.endswith("Generation")
        into.towers += tower
        methods: set[str] = set()
        held = self._held(found)
        for part in self.bases(found):
            for node in part.node.body:
                if not isinstance(node, ast.FunctionDef):
                    for fused, names in _packed(node).items():
                        into.fused.setdefault(fused, names)
                    continue
                says = self.says(node)
                for fused, names in says.fused.items():
                    into.fused.setdefault(fused, names)
                if node.name == "__init__" and part is not found and not _calls_super(found.node):
                    continue
                if node.name not in methods or node.name == "__init__":
                    self._modules(part.module, says, held, into, owner, without)
                methods.add(node.name)
        into.towers -= tower

    def _held(self, found: Class) -> dict[str, list[Class]]:
        """Classes that a class has in attributes or returns from methods: `model_cls = Model`."""
        held: dict[str, list[Class]] = {}
        for part in self.bases(found):
            for node in part.node.body:
                if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Name):
                    names, key = [node.value.id], ast.unparse(_targets(node)[0])
                elif isinstance(node, ast.FunctionDef):
                    names, key = self.says(node).returned, node.name
                else:
                    continue
                if children := [child for name in names if (child := self._module(part.module, name))]:
                    held.setdefault(key, children)
        return held

    def says(self, method: ast.FunctionDef) -> Method:
        if method not in self._says:
            self._says[method] = Method(method)
        return self._says[method]

    def _modules(
        self, module: str, says: Method, held: Mapping[str, list[Class]], into: Reading, owner: str, without: bool
    ) -> None:
        for call, name in says.calls:
            made = says.made(call)
            given = {word.arg: word.value for word in call.keywords}
            if made in FLOAT_ONLY or made.rpartition(".")[2].endswith(MATRICES):
                if name and not (into.towers and owner in COMMON):
                    unquantized = made in FLOAT_ONLY or says.is_none(given.get("quant_config"), without)
                    if None in given and "quant_config" not in given:  # **words
                        unquantized = False
                    into.made.setdefault(f"{owner}.{name}".strip("."), []).append(unquantized)
                continue
            if made == "init_vllm_registered_model" and "architectures" in given:
                children = [self.classes[word] for word in _strings(given["architectures"]) if word in self.classes]
            else:
                children = self._meant(module, made, says, held)
            none = without or ("quant_config" in given and says.is_none(given["quant_config"], False))
            for child in children:
                self.read(child, into, name or owner, none)
        for value in says.values:  # layer_type=Layer
            if child := self._module(module, value):
                self.read(child, into, "layers", without)
        for name in sorted({name for names in says.local.values() for name in names}):
            for child in self._listed(module, name):
                self.read(child, into, "layers", without)

    def _listed(self, module: str, name: str) -> list[Class]:
        """The classes in a dictionary of a module, as of kinds of layers: `KINDS = {"M": MambaLayer}`."""
        tree = self.parsed(module)
        for node in tree.body if tree else []:
            if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not isinstance(node.value, ast.Dict):
                continue
            if name in {ast.unparse(target) for target in _targets(node)}:
                words = [value.id for value in node.value.values if isinstance(value, ast.Name)]
                return [child for word in words if (child := self._module(module, word))]
        return []

    def _meant(self, module: str, made: str, says: Method, held: Mapping[str, list[Class]]) -> list[Class]:
        """The classes that a call may make one of, by the text of what is called."""
        last = made.removeprefix("type(self).").removeprefix("self.").removeprefix("self.__class__.")
        if last in held:
            return held[last]
        names = says.local.get(last, [last])
        if isinstance(function := self._function(module, last), ast.FunctionDef):
            names = self.says(function).returned
        return [child for name in names if (child := self._module(module, name))]

    def _function(self, module: str, name: str) -> ast.FunctionDef | None:
        tree = self.parsed(module)
        body = tree.body if tree else []
        return next((node for node in body if isinstance(node, ast.FunctionDef) and node.name == name), None)

    def _module(self, module: str, name: str) -> Class | None:
        """The class of that name if it makes modules: one of the program's models."""
        found = self.find(module, name)
        return found if found and MODELS.search(found.module) else None

    def row(self, found: Class, draft: bool) -> str:
        """The row of an architecture: its file, and unless it is a draft, what is fused and what stays unquantized."""
        reading = Reading()
        if not draft:
            self.read(found, reading)
        file = self.path(found.module)
        assert file
        words = [f'file = "{file.relative_to(self.root).as_posix().partition("/")[2]}"']
        words += [
            f"{key} = {_list(names)}"
            for key, names in (("fused", reading.groups()), ("plain", reading.plain()))
            if names
        ]
        return f"{{ {', '.join(words)} }}"


def _first_branches(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a module, of `if` those for CUDA before the others, of `try` what is tried."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            branches = [node.body, node.orelse]
            for branch in reversed(branches) if OTHER_PLATFORM.search(ast.unparse(node.test)) else branches:
                yield from _first_branches(branch)
        elif isinstance(node, ast.Try):
            yield from _first_branches(node.body)


def _called(call: ast.Call) -> str:
    """What is called, as written; of `self._choose()(...)` what chooses."""
    inner = call.func
    chooses = isinstance(inner, ast.Call) and ast.unparse(inner.func) != "type"
    return ast.unparse(inner.func if chooses and isinstance(inner, ast.Call) else inner)


def _targets(node: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [node.target]


def _self_names(target: ast.AST) -> list[str]:
    return [
        inner.attr
        for inner in ast.walk(target)
        if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name) and inner.value.id == "self"
    ]


def _by_prefix(call: ast.Call) -> str:
    """The name of a module by `prefix=f"{prefix}.name"` or `prefix=add_prefix("name", prefix)`; "" without one."""
    value = next((word.value for word in call.keywords if word.arg == "prefix"), None)
    if isinstance(value, ast.JoinedStr) and value.values and isinstance(value.values[-1], ast.Constant):
        name = str(value.values[-1].value).rpartition(".")[2]
    elif isinstance(value, ast.Call):
        name = next((arg.value for arg in value.args if isinstance(arg, ast.Constant)), "")
        name = name.rpartition(".")[2] if isinstance(name, str) else ""
    else:
        return ""
    return name if name.isidentifier() else ""


def _calls_super(node: ast.ClassDef) -> bool:
    """Whether `__init__` of a class, if it has one, runs that of its base."""
    own = [n for n in node.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    return not own or any(
        isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__" and (call.args or call.keywords)
        for call in ast.walk(own[0])
    )


def _packed(node: ast.stmt) -> dict[str, list[str]]:
    """`packed_modules_mapping = {...}` of a class."""
    if not isinstance(node, (ast.Assign, ast.AnnAssign)) or not isinstance(node.value, ast.Dict):
        return {}
    if not any(ast.unparse(target) == "packed_modules_mapping" for target in _targets(node)):
        return {}
    rows = zip(node.value.keys, node.value.values, strict=True)
    return {key.value: names for key, value in rows if isinstance(key, ast.Constant) and (names := _strings(value))}


def _strings(node: ast.AST) -> list[str]:
    items = node.elts if isinstance(node, (ast.List, ast.Tuple)) else []
    return [item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)]


def _list(words: list[str]) -> str:
    return "[" + ", ".join(f'"{word}"' for word in words) + "]"


def vllm_classes(program: Program) -> tuple[dict[str, Class], set[str]]:
    """Architecture -> its class by `registry.py`, and the names of draft models."""
    tree = program.parsed("vllm.model_executor.models.registry")
    assert tree
    found: dict[str, Class] = {}
    drafts: set[str] = set()
    for node in tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Dict):
            continue
        kind = ast.unparse(node.targets[0])
        if not kind.endswith("_MODELS") or kind.startswith("_PREVIOUSLY"):
            continue
        for key, value in zip(node.value.keys, node.value.values, strict=True):
            names = _strings(value)
            if isinstance(key, ast.Constant) and len(names) == 2:
                module = names[0] if "." in names[0] else f"vllm.model_executor.models.{names[0]}"
                if class_ := program.find(module, names[1]):
                    found.setdefault(key.value, class_)
                    drafts |= {key.value} if kind == DRAFTS else set()
    return found, drafts


def sglang_classes(program: Program) -> tuple[dict[str, Class], set[str]]:
    """Architecture -> its class: what `EntryClass` of each file of models names."""
    found: dict[str, Class] = {}
    for file in sorted((program.root / "sglang/srt/models").glob("*.py")):
        module = f"sglang.srt.models.{file.stem}"
        tree = program.parsed(module)
        assert tree
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EntryClass":
                items = node.value.elts if isinstance(node.value, (ast.List, ast.Tuple)) else [node.value]
                for item in items:
                    if isinstance(item, ast.Name) and (class_ := program.find(module, item.id)):
                        found[item.id] = class_
    drafts = {name for name, class_ in found.items() if re.search(r"MTP|Mtp|NextN|Eagle|DFlash|DSpark", name)}
    return found, drafts


def listed_classes(root: Path) -> set[str]:
    """The classes that `modeling_auto.py` names."""
    tree = ast.parse((root / "transformers/models/auto/modeling_auto.py").read_text(encoding="utf-8"))
    named = {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return {name for name in named if re.fullmatch(r"[A-Za-z]\w*", name)}


def transformers_rows(root: Path) -> dict[str, str]:
    """Class -> its file, of all classes that `modeling_auto.py` names."""
    named = listed_classes(root)
    files = sorted((root / "transformers/models").glob("*/modeling_*.py"))
    rows = {}
    for file in files:
        for name in re.findall(r"^class (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            if name in named:
                rows[name] = f'{{ file = "{file.relative_to(root / "transformers").as_posix()}" }}'
    return rows


CLASSES = {"vllm": vllm_classes, "sglang": sglang_classes}


def render(name: str, root: Path) -> str:
    """The text of mappings/runtimes/registries/NAME.toml for the package in a folder."""
    info = next(iter(sorted(root.glob(f"{name}-*.dist-info/METADATA"))), None)
    version = VERSION.search(info.read_text(encoding="utf-8")) if info else None
    drafts: set[str] = set()
    if name == "transformers":
        rows = transformers_rows(root)
    else:
        program = Program(root)
        classes, drafts = CLASSES[name](program)
        program.classes = classes
        rows = {architecture: program.row(class_, architecture in drafts) for architecture, class_ in classes.items()}
    lines = [
        f"# Generated by `python -m tests.oracles.registries {name}`. The architectures that the program has a class",
        "# for; `fused`: modules that it holds as one matrix; `plain`: modules that it makes unquantized.",
        f'version = "{version[1] if version else ""}"',
        "",
    ]
    for section, wanted in (("classes", False), ("drafts", True)):
        lines += [f"[{section}]", *(f'"{a}" = {row}' for a, row in sorted(rows.items()) if (a in drafts) == wanted), ""]
    return "\n".join(lines).replace("\n[drafts]\n\n", "").rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", choices=("vllm", "sglang", "transformers"))
    parser.add_argument("folder", type=Path, nargs="?", help="has the program's package; without it, the installed one")
    given = parser.parse_args()
    root = given.folder
    if root is None:
        spec = find_spec(given.program)
        if spec is None or spec.origin is None:
            raise SystemExit(f"{given.program} is not installed: name the folder that has its package")
        root = Path(spec.origin).parents[1]
    target = mappings() / "runtimes/registries" / f"{given.program}.toml"
    target.write_text(render(given.program, root), encoding="utf-8")


if __name__ == "__main__":
    main()
