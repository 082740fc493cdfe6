"""Commands from functions: a parameter's annotation is its argument or flag.

Typer reads the same annotations and imports pydantic to do it: 0.2 s of every command, where click takes 0.05 s.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

import click
from click.shell_completion import CompletionItem


class Word(click.types.StringParamType):
    """A text; the shell completes it as a file, which most texts may name."""

    name = "text"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


EXITS = "Exit codes: 0 done, 1 failed, 2 usage, 3 written but parity failed."
TYPES = {str: Word(), int: click.INT, float: click.FLOAT, Path: click.Path(path_type=Path)}


class Declared:
    """What an annotation adds to the type: `Annotated[int, Option("--count", help="how many", min=1)]`."""

    def __init__(
        self,
        *names: str,
        help: str = "",
        metavar: str | None = None,
        min: int | None = None,
        hidden: bool = False,
        complete: Callable[[str], list[str]] | None = None,
    ) -> None:
        self.names, self.help, self.metavar = names, help, metavar
        self.min, self.hidden, self.complete = min, hidden, complete


class Option(Declared):
    """A flag; without names it is called like the parameter."""


class Argument(Declared):
    """A word without a flag, by position."""


def verb(
    example: str, exits: str = "", cls: type[click.Command] = click.Command
) -> Callable[[Callable[..., None]], click.Command]:
    """Make a command of a function; its help ends with its exit codes and an example."""

    def make(function: Callable[..., None]) -> click.Command:
        epilog = "\n\n".join([*([exits] if exits else []), f"Example: {example}"])
        params = [_param(one) for one in inspect.signature(function, eval_str=True).parameters.values()]
        return cls(function.__name__, callback=function, params=params, help=inspect.getdoc(function), epilog=epilog)

    return make


class Group(click.Group):
    """Verbs in their own order, where click would sort them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def _param(parameter: inspect.Parameter) -> click.Parameter:
    """The argument or flag of one parameter."""
    annotation, declared = get_args(parameter.annotation)
    kind, several = _kind(annotation)
    required = parameter.default is inspect.Parameter.empty
    more: dict[str, Any] = {"help": declared.help, "required": required}
    if not required:
        more["default"] = parameter.default
    if kind is not bool:
        more["type"] = TYPES[kind] if declared.min is None else click.IntRange(min=declared.min)
    if several:
        more["callback"] = lambda _ctx, _param, values: list(values) or None
    if (complete := declared.complete) is not None:
        more["shell_complete"] = lambda _ctx, _param, begin: complete(begin) or [CompletionItem(begin, type="file")]
    if isinstance(declared, Argument):
        return click.Argument([parameter.name], metavar=declared.metavar, nargs=-1 if several else 1, **more)
    names = declared.names or (f"--{parameter.name.replace('_', '-')}",)
    metavar = declared.metavar or (None if kind is bool else f"<{kind.__name__.lower()}>")
    return click.Option(
        [parameter.name, *names], is_flag=kind is bool, multiple=several, metavar=metavar, hidden=declared.hidden,
        show_default=bool(parameter.default) and not required, **more,
    )  # fmt: skip


def _kind(annotation: Any) -> tuple[type, bool]:
    """The type of one word, and whether there may be several: `list[str] | None` has words of `str`."""
    single = get_args(annotation)[0] if isinstance(annotation, UnionType) else annotation
    return (get_args(single)[0], True) if get_origin(single) is list else (single, False)
