"""Commands from functions and from rows of the table of flags.

Typer would read annotations, and imports pydantic to do it: 0.2 s of every command, where click takes 0.05 s.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from bridge.cli.flags import REQUIRED, Flag, flag_of
from bridge.cli.terminal import session


class Word(click.types.StringParamType):
    """A text; the shell completes it as a file, which most texts may name."""

    name = "text"

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        return [CompletionItem(incomplete, type="file")]


EXITS = "Exit codes: 0 done, 1 failed, 2 usage, 3 written but parity failed."
TYPES = {str: Word(), int: click.INT, float: click.FLOAT, Path: click.Path(path_type=Path)}
PRINTING = ("json", "quiet", "verbose")  # these flags are fields of `Terminal`
Words = Mapping[str, Any]
Command = Callable[[], click.Command]


def no_bars(words: Words) -> bool:
    """Show no progress: the verb is short, or prints its own."""
    return True


def shared(words: Words) -> bool:
    """Whether another process of the same run prints the results, as `torchrun` starts them."""
    from bridge.calibration.walk.workers.processes import launched

    return launched()[0] > 0


def verb(
    example: str,
    flags: str,
    *,
    exits: str = "",
    group: str = "",
    for_target: bool = False,
    quiet: Callable[[Words], bool] = lambda words: bool(words.get("quiet")),
    silent: Callable[[Words], bool] = lambda words: False,
) -> Callable[[Callable[..., None]], Command]:
    """Declare a verb: a function of the terminal and of what `flags`, names of rows, give.

    The help is the function's docstring, its exit codes and an example. `for_target`: it takes the options of targets,
    too. `quiet` and `silent` are arguments of `session`. The command is made when it is asked for, since targets are
    loaded for their options.
    """

    def declare(function: Callable[..., None]) -> Command:
        name = function.__name__
        rows = {row: flag_of(f"{group}.{name}".lstrip("."), row) for row in flags.split()}

        def run(**words: Any) -> None:
            with session(debug=words.pop("debug"), quiet=quiet(words), silent=silent(words)) as terminal:
                printing = {row: words.pop(row) for row in PRINTING if row in words}
                given = {row: _value(flag, words.pop(row)) for row, flag in rows.items() if row in words}
                options = {row: value for row, value in words.items() if value is not None}  # of the target
                function(replace(terminal, **printing), **given, **options)

        @functools.cache
        def command() -> click.Command:
            epilog = "\n\n".join([*([exits] if exits else []), f"Example: {example}"])
            kind: type[click.Command] = click.Command
            params = [parameter(row, flag) for row, flag in rows.items()]
            if for_target:
                from bridge.cli.target_options import TargetCommand, target_flags

                kind = TargetCommand
                params += target_flags()
            return kind(name, callback=run, params=params, help=inspect.getdoc(function), epilog=epilog)

        return command

    return declare


class Group(click.Group):
    """Verbs in their own order, where click would sort them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


def parameter(name: str, flag: Flag, hidden: bool = False) -> click.Parameter:
    """Make click's argument or option of a row."""
    required = flag.default is REQUIRED
    inverted = flag.kind is bool and flag.default is True
    more: dict[str, Any] = {"help": flag.help, "required": required}
    if not required:
        more["default"] = False if inverted else flag.default
    if flag.kind is not bool:
        more["type"] = TYPES[flag.kind] if flag.min is None else click.IntRange(min=flag.min)
    if flag.complete is not None:
        more["shell_complete"] = functools.partial(_offered, flag.complete)
    if flag.argument:
        return click.Argument([name], metavar=flag.metavar, nargs=-1 if flag.several else 1, **more)
    more |= {"flag_value": "true"} if flag.alone else {}
    names = ([flag.names.partition("/")[0]] if flag.alone else flag.names.split()) or [
        f"--{'no-' if inverted else ''}{name.replace('_', '-')}"
    ]
    metavar = flag.metavar or (None if flag.kind is bool else f"<{flag.kind.__name__.lower()}>")
    return click.Option(
        [name, *names], is_flag=flag.kind is bool, multiple=flag.several, metavar=metavar, hidden=hidden,
        show_default=bool(more.get("default")), **more,
    )  # fmt: skip


def _offered(complete: Callable[[str], list[Any]], ctx: click.Context, param: click.Parameter, begin: str) -> list[Any]:
    """What the shell offers: known names that begin so, else files."""
    return complete(begin) or [CompletionItem(begin, type="file")]


def _value(flag: Flag, value: Any) -> Any:
    """What the verb gets of a parsed word."""
    if flag.kind is bool and flag.default is True:
        return not value
    if flag.several:
        value = list(value) or None
    return value if flag.read is None or value is None else flag.read(value)
