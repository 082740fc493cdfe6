"""Flags for the options of targets, and the help that shows them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import get_args, get_type_hints

import click
from click.shell_completion import CompletionItem

from bridge.cli.flags import Flag
from bridge.cli.verb import parameter
from bridge.core.errors import UsageError

# The sections of the help; what is in none of them comes last.
SECTIONS = {
    "Model": ("model", "student", "base", "adapter", "config", "tokenizer"),
    "Output": ("target", "runtime", "out", "overwrite", "resume"),
    "Quantization": ("quant", "kv", "calib", "data", "samples", "sequence", "field", "device", "compute"),
}


@dataclasses.dataclass(frozen=True)
class TargetOption:
    """An option of one target, as its `Options` declares it."""

    target: str
    name: str
    kind: type
    help: str
    optional_word: bool = False
    """Whether the flag may stand alone: `--engine`, `--engine rtx4090`."""

    @property
    def names(self) -> str:
        dashed = self.name.replace("_", "-")
        if self.optional_word:
            return f"--{dashed}"
        return f"--{dashed}/--no-{dashed}" if self.kind is bool else f"--{dashed}"


def target_options() -> list[TargetOption]:
    """Every option of every target, by target."""
    from bridge.targets import load_target, target_names

    found = []
    for target in target_names():
        options = load_target(target).Options
        types = get_type_hints(options)
        for entry in dataclasses.fields(options):
            text = entry.metadata.get("help", "")
            default = str(entry.default).lower() if isinstance(entry.default, bool) else entry.default
            text += "" if default is None else f"; default: {default}"
            kinds = (types[entry.name], *get_args(types[entry.name]))  # of `int | None`, for example
            kind = next(kind for kind in (bool, int, float, str) if kind in kinds)
            optional = bool in kinds and str in kinds
            found.append(TargetOption(target, entry.name, str if optional else kind, text, optional))
    return found


def target_flags() -> list[click.Parameter]:
    """One flag for the options of all targets that share a name; hidden, since the help lists it by target."""
    options = {option.name: option for option in target_options()}
    flags = {name: Flag("", option.kind, names=option.names) for name, option in options.items()}
    return [parameter(name, flag, hidden=True, alone=options[name].optional_word) for name, flag in flags.items()]


def _target_of(name: str | None) -> str | None:
    """The target that a name or an alias stands for; None, as without a name, if it is unknown."""
    from bridge.targets import load_target

    try:
        return None if name is None else load_target(name).name
    except UsageError:
        return None


class TargetCommand(click.Command):
    """A verb whose help has sections, the options of each target under a heading of their own."""

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The flags of the chosen target, or of all, beside what the help lists without a heading."""
        offered = super().shell_complete(ctx, incomplete)
        if not incomplete.startswith("-"):
            return offered
        chosen = _target_of(ctx.params.get("target"))
        options = [option for option in target_options() if chosen in (None, option.target)]
        flags = {name: option.help for option in options for name in option.names.split("/")}
        return offered + [CompletionItem(name, help=flags[name]) for name in flags if name.startswith(incomplete)]

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Arguments stand in the sections."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        params = {param.name: param for param in self.get_params(ctx)}
        shown = {name: param for name, param in params.items() if not getattr(param, "hidden", False)}
        for title, names in SECTIONS.items():
            _section(ctx, formatter, title, [shown.pop(name) for name in names if name in shown])
        _section(ctx, formatter, "Run and print", list(shown.values()))
        for target, options in itertools.groupby(target_options(), lambda option: option.target):
            with formatter.section(f"Options of --target {target}"):
                formatter.write_dl([(_usage(option), option.help) for option in options])


def _section(ctx: click.Context, formatter: click.HelpFormatter, title: str, params: list[click.Parameter]) -> None:
    if records := [record for param in params if (record := param.get_help_record(ctx))]:
        with formatter.section(title):
            formatter.write_dl(records)


def _usage(option: TargetOption) -> str:
    """`--shard-size <str>`, in the manner of the parser's own help."""
    if option.kind is bool:
        return f"--[no-]{option.name.replace('_', '-')}"
    word = f"<{option.kind.__name__}>"
    return f"{option.names} {f'[{word}]' if option.optional_word else word}"
