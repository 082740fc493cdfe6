"""The page of the command line, from the parser: every verb, its arguments and its flags."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import click

from bridge.cli.main import app
from docs.generate.matrix import table


def reference() -> str:
    """A section a verb, in the order of `qbridge --help`."""
    return "\n\n".join(_section(path, command) for path, command in verbs(app, ("qbridge",)))


def verbs(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(words, command) of every verb below a group of verbs."""
    context = click.Context(command)
    for name in command.list_commands(context):
        found = command.get_command(context, name)
        if isinstance(found, click.Group):
            yield from verbs(found, (*path, name))
        else:
            yield (*path, name), found


def _section(path: tuple[str, ...], command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    own = [option for option in options if not option.hidden]  # the options of targets are hidden
    usage = " ".join([*path, *(_metavar(argument) for argument in arguments), "[OPTIONS]"])
    parts = [f"## `{' '.join(path)}`", inspect.cleandoc(command.help or ""), f"```text\n{usage}\n```"]
    if arguments:
        parts.append(table(["argument", "what it is"], [[f"`{_metavar(a)}`", _escaped(a.help)] for a in arguments]))
    parts.append(
        table(["flag", "what it is for {: .wide }"], [[_names(option), _escaped(option.help)] for option in own])
    )
    if len(own) < len(options):
        parts.append("Each option of the target is a flag too: see [Targets](../targets/index.md).")
    exits, _, example = (command.epilog or "").rpartition("Example: ")
    parts += [exits.strip()] if exits else []
    return "\n\n".join([*parts, *([f"```text\n{example}\n```"] if example else [])])


def _metavar(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _names(option: Any) -> str:
    """`--out VALUE`, `-q`, and what turns a flag off."""
    value = "" if option.is_flag else " VALUE"
    names = ", ".join(f"`{name}{value}`" for name in [*option.opts, *option.secondary_opts])
    return f"{names}, required" if option.required else names


def _escaped(text: str | None) -> str:
    return (text or "").replace("|", "\\|")
