"""Flags for the options of targets, and the help that shows them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, get_args, get_type_hints

import click
from click.shell_completion import CompletionItem

from bridge.cli.flags import Flag
from bridge.cli.verb import parameter
from bridge.core.errors import UsageError

TARGET = "bridge.target"  # in click's `meta`: the target that the words name
# The sections of the help; what is in none of them comes last.
SECTIONS = {
    "Model": ("model", "student", "base", "adapter", "config", "tokenizer"),
    "Output": ("target", "runtime", "out", "overwrite", "resume"),
    "Quantization": (
        "quant",
        "kv",
        "group",
        "zero_points",
        "rotate",
        "calib",
        "data",
        "samples",
        "sequence",
        "field",
        "device",
        "compute",
    ),
}


def target_options() -> dict[str, dict[str, Flag]]:
    """The options of every target, as its `Options` declares them."""
    from bridge.targets import load_target, target_names

    found = {}
    for target in target_names():
        options = load_target(target).Options
        types = get_type_hints(options)
        found[target] = {entry.name: _flag(entry, types[entry.name]) for entry in dataclasses.fields(options)}
    return found


def _flag(entry: dataclasses.Field[Any], type_: Any) -> Flag:
    default = str(entry.default).lower() if isinstance(entry.default, bool) else entry.default
    text = entry.metadata.get("help", "") + ("" if default is None else f"; default: {default}")
    words = entry.metadata.get("words")
    complete = words and (lambda begin: [word for word in words if word.startswith(begin)])
    kinds = (type_, *get_args(type_))  # of `int | None`, for example
    kind = next(kind for kind in (bool, int, float, str) if kind in kinds)
    dashed = entry.name.replace("_", "-")
    if bool in kinds and len(kinds) > 2:
        return Flag(text, str, names=f"--{dashed}" + (f"/--no-{dashed}" if entry.default is True else ""), alone=True)
    names = f"--{dashed}/--no-{dashed}" if kind is bool else f"--{dashed}"
    return Flag(text, kind, names=names, complete=complete)


def target_flags() -> list[click.Parameter]:
    """One flag for the options of all targets that share a name; hidden, since the help lists it by target."""
    flags = {name: flag for options in target_options().values() for name, flag in options.items()}
    return [parameter(name, flag, hidden=True) for name, flag in flags.items()]


def _target_of(name: str | None) -> str | None:
    """The target that a name or an alias stands for; None, as without a name, if it is unknown."""
    from bridge.targets import load_target

    try:
        return None if name is None else load_target(name).name
    except UsageError:
        return None


def _named_target(args: Sequence[str]) -> str | None:
    """The target that words of a command name, by the name of a program too; None if none does."""
    from bridge.planning.contract_files import find_runtime

    words = [word for arg in args for word in arg.split("=", 1)]
    name = next((after for word, after in pairwise(words) if word == "--target"), None)
    program = None if name is None else find_runtime(name)
    return _target_of(name) or (program.contracts[0].target if program else None)


class TargetCommand(click.Command):
    """A verb whose help has sections, and the options of the target that is named."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """`--no-NAME` of an option that also takes a word is `--NAME=false`: click has no such pair.

        The target is noted before: --help comes first, wherever it stands.
        """
        ctx.meta[TARGET] = _named_target(args)
        flags = [flag for options in target_options().values() for flag in options.values() if flag.alone]
        pairs = {no: yes for yes, slash, no in (flag.names.partition("/") for flag in flags) if slash}
        return super().parse_args(ctx, [f"{pairs[arg]}=false" if arg in pairs else arg for arg in args])

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The flags of the chosen target, or of all, beside what the help lists without a heading."""
        offered = super().shell_complete(ctx, incomplete)
        if not incomplete.startswith("-"):
            return offered
        chosen = _target_of(ctx.params.get("target"))
        flags = [
            flag
            for target, options in target_options().items()
            for flag in options.values()
            if chosen in (None, target)
        ]
        helps = {name: flag.help for flag in flags for name in flag.names.split("/")}
        return offered + [CompletionItem(name, help=helps[name]) for name in helps if name.startswith(incomplete)]

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Arguments stand in the sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        params = {param.name: param for param in self.get_params(ctx)}
        shown = {name: param for name, param in params.items() if not getattr(param, "hidden", False)}
        for title, names in SECTIONS.items():
            _section(ctx, formatter, title, [shown.pop(name) for name in names if name in shown])
        _section(ctx, formatter, "Run and print", list(shown.values()))
        known = target_options()
        target = ctx.meta.get(TARGET)
        if target is None:
            given = ", ".join(f"--target {name}" for name, options in known.items() if options)
            with formatter.section("Options of one target"):
                formatter.write_text(f"`qbridge {ctx.info_name} --target hf --help` has them: {given}")
        elif known[target]:
            with formatter.section(f"Options of --target {target}"):
                formatter.write_dl([(_usage(flag), flag.help) for flag in known[target].values()])


def _section(ctx: click.Context, formatter: click.HelpFormatter, title: str, params: list[click.Parameter]) -> None:
    if records := [record for param in params if (record := param.get_help_record(ctx))]:
        with formatter.section(title):
            formatter.write_dl(records)


def _usage(flag: Flag) -> str:
    """`--shard-size <str>`, in the manner of the parser's own help."""
    if flag.kind is bool:
        return f"--[no-]{flag.names.partition('/')[0].removeprefix('--')}"
    word = f"<{flag.kind.__name__}>"
    name, _, negated = flag.names.partition("/")
    return f"{name} {f'[{word}]' if flag.alone else word}" + (f", {negated}" if negated else "")
