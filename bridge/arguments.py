"""What verbs of the command line take: arguments by one name and one help, and a flag for every option of a target."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from bridge.errors import UsageError

if TYPE_CHECKING:
    from bridge.terminal import Terminal

Model = Annotated[str, typer.Argument(metavar="MODEL", help="a directory or a hub id")]
Paths = Annotated[
    list[str] | None, typer.Argument(metavar="[PATH]...", help="written models, .onnx files, recipes, tables")
]
What = Annotated[
    str,
    typer.Argument(
        metavar="WHAT", help="schemes, targets or architectures; a scheme, table, written model or calibration"
    ),
]
Target = Annotated[str, typer.Option(help="what loads the result: see `qbridge show targets`")]
Quant = Annotated[str | None, typer.Option(help="a scheme (`qbridge show schemes`) or a recipe's path; none: plain")]
Kv = Annotated[str | None, typer.Option(help="the KV cache: fp8, int8 or nvfp4")]
Config = Annotated[str | None, typer.Option(help="JSON whose entries replace those of config.json")]
Tokenizer = Annotated[str | None, typer.Option(help="directory or hub id of the tokenizer; default: the model's")]
Device = Annotated[str | None, typer.Option(help="where calibration runs: cpu, cuda, cuda:1")]
Data = Annotated[str | None, typer.Option(help="text or JSONL file, dataset id; default: the embedded text")]
Json = Annotated[bool, typer.Option("--json", help="print JSON on stdout instead of tables")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="no progress, no tables")]
Debug = Annotated[bool, typer.Option("--debug", help="tracebacks, and what the frameworks say")]


def target_flags() -> dict[str, inspect.Parameter]:
    """A flag for every option of every target, by name; None means that it was not given."""
    from bridge.targets import load_target, target_names

    helps: dict[str, list[str]] = {}
    kinds: dict[str, type] = {}
    for name in target_names():
        options = load_target(name).Options
        types = get_type_hints(options)
        for entry in dataclasses.fields(options):
            said = entry.metadata.get("help", "")
            default = "" if entry.default is None else f"; default: {entry.default}".lower()
            helps.setdefault(entry.name, []).append(f"{said}{default} [{name}]")
            kinds[entry.name] = _kind(types[entry.name])
    return {name: _flag(name, kinds[name], "; ".join(said)) for name, said in helps.items()}


def _kind(annotation: Any) -> type:
    """`bool`, `int` or `str`, out of an annotation such as `int | None`."""
    said = (annotation, *get_args(annotation))
    return next(kind for kind in (bool, int, float, str) if kind in said)


def _flag(name: str, kind: type, help_: str) -> inspect.Parameter:
    dashed = name.replace("_", "-")
    names = f"--{dashed}/--no-{dashed}" if kind is bool else f"--{dashed}"
    annotation = Annotated[kind | None, typer.Option(names, help=help_, show_default=False)]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def takes_target_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `options` of a verb by the flags of all targets."""
    flags = target_flags()
    own = inspect.signature(verb, eval_str=True)

    def run(**given: Any) -> None:
        options = {name: given.pop(name) for name in flags}
        verb(**given, options={name: value for name, value in options.items() if value is not None})

    kept = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own.parameters.values() if p.name != "options"]
    signature = own.replace(parameters=[*kept, *flags.values()])
    run.__name__, run.__doc__ = verb.__name__, verb.__doc__
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return run


def byte_count(text: str | None, name: str = "--memory") -> int | None:
    """2GB -> 2_000_000_000, 512MiB -> 536_870_912, a bare number is bytes; `name` is who says so, for the error."""
    if text is None:
        return None
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(?:([kmgt])(i?)b?|b)?", text.strip().lower())
    if not found or not float(found[1]):
        raise UsageError(f"{name} {text!r} is no size; write 2GB, 512MiB or a number of bytes")
    power = " kmgt".index(found[2] or " ")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** power)


def print_json(terminal: Terminal, data: Any) -> None:
    terminal.print(json.dumps(data, indent=2, default=str))
