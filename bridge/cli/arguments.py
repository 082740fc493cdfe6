"""Options that several verbs share, and flags for options of targets."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_type_hints

import click
from click.shell_completion import CompletionItem

from bridge.cli.terminal import Terminal
from bridge.cli.verb import Argument, Option, verb
from bridge.core.errors import UsageError


def complete_target(begin: str) -> list[str]:
    """Targets, and the programs that stand for them, for the shell's completion."""
    from bridge.planning.contract_files import runtime_names
    from bridge.targets import ALIASES, target_names

    return [name for name in dict.fromkeys((*target_names(), *ALIASES, *runtime_names())) if name.startswith(begin)]


def _complete_runtime(begin: str) -> list[str]:
    from bridge.planning.contract_files import runtime_names

    return [name for name in runtime_names() if name.startswith(begin)]


def complete_scheme(begin: str) -> list[str]:
    from bridge.quant.schemes.catalog import scheme_names

    return [name for name in scheme_names() if name.startswith(begin)]


def _complete_kv(begin: str) -> list[str]:
    from bridge.quant.schemes.catalog import kv_names

    return [name for name in kv_names() if name.startswith(begin)]


Model = Annotated[str, Argument(metavar="MODEL", help="a directory, a hub id or an address")]
Written = Annotated[str, Argument(metavar="OUT", help="a directory that `convert` wrote, or its address")]
Target = Annotated[str, Option(help="the format to write: see `qbridge show targets`", complete=complete_target)]
Runtime = Annotated[
    str | None,
    Option(
        "--for",
        help="the program that will load it: vllm, sglang ... (`qbridge show runtimes`)",
        complete=_complete_runtime,
    ),
]
Quant = Annotated[
    str | None,
    Option(
        help="scheme name (`qbridge show schemes`), recipe file, or auto:4.8bits (chosen per layer); default: none",
        complete=complete_scheme,
    ),
]
Planned = Annotated[
    str | None,
    Option(help="scheme name (`qbridge show schemes`) or recipe file; default: none", complete=complete_scheme),
]
Scheme = Annotated[str, Option(help="scheme name (`qbridge show schemes`) or recipe file", complete=complete_scheme)]
Kv = Annotated[
    str | None,
    Option(help="the KV cache: fp8, int8, nvfp4; fp8_cast, nvfp4_cast need no calibration", complete=_complete_kv),
]
Config = Annotated[str | None, Option(help="JSON file; its entries replace those of config.json")]
Tokenizer = Annotated[str | None, Option(help="directory or hub id of the tokenizer; default: the model's")]
Base = Annotated[str | None, Option(help="the model under a LoRA adapter; default: the one that the adapter names")]
Adapter = Annotated[
    str | None,
    Option(
        metavar="merge|keep",
        help="MODEL is a LoRA adapter: merge it into its base (default), or write the base and keep it in OUT/adapter",
    ),
]
Memory = Annotated[str | None, Option(help="bytes that the run may take, without those of imports: 2GB, 512MiB")]
Device = Annotated[str | None, Option(help="where calibration runs: cpu, cuda, cuda:1")]
Compute = Annotated[str | None, Option(help="fp32: calibrate in float32; default: the model's dtype")]
Data = Annotated[str | None, Option(help="text or JSONL file, dataset id; default: the embedded text")]
Samples = Annotated[
    str | None, Option(metavar="N|auto", help="number of calibration sequences; default: 32, 128 for SmoothQuant")
]
Sequence = Annotated[int | None, Option(min=1, help="tokens per sequence; default: 128")]
Field = Annotated[str | None, Option(help="key of a JSONL record that holds its text or chat")]
Keep = Annotated[
    list[str] | None,
    Option(
        metavar="DIM=SIZE",
        help="size of a dim: ffn=75%, heads=24, hidden, kv_heads, layers, experts, moe_ffn, shared_ffn, vocab",
    ),
]
DropLayers = Annotated[str | None, Option(metavar="N,N", help="numbers of layers to leave out, from 0")]
Sparse = Annotated[str | None, Option(metavar="2:4", help="set two of every four weights to zero; all sizes stay")]
Json = Annotated[bool, Option("--json", help="print JSON on stdout instead of tables")]
Quiet = Annotated[bool, Option("--quiet", "-q", help="no progress, no result")]
Verbose = Annotated[bool, Option("--verbose", "-v", help="every table of the report, not the verdict alone")]
Debug = Annotated[bool, Option("--debug", help="show tracebacks and framework output")]


# The sections of the help of `convert` and `plan`; what is in none of them comes last.
SECTIONS = {
    "Model": ("model", "base", "adapter", "config", "tokenizer"),
    "Output": ("target", "runtime", "out", "overwrite", "no_resume"),
    "Quantization": ("quant", "kv", "calib", "data", "samples", "sequence", "field", "device", "compute"),
}


def count_or_auto(samples: str | None) -> Any:
    """The value of --samples: a number where it is one; the verbs refuse other words than "auto"."""
    return int(samples) if samples and samples.isdecimal() else samples


def sizes_of(keep: list[str] | None) -> dict[str, int | str] | None:
    """The dims and sizes of `--keep`; None without it."""
    sizes: dict[str, int | str] = {}
    for text in keep or []:
        dim, equals, size = text.partition("=")
        if not equals or not dim.strip() or not size.strip():
            raise UsageError(f"--keep {text}: give a dim and its size, as in ffn=75%")
        if dim.strip() in sizes:
            raise UsageError(f"--keep {text}: {dim.strip()} is given twice")
        sizes[dim.strip()] = size.strip()
    return sizes or None


def numbers_of(text: str | None) -> list[int] | None:
    """The layers of `--drop-layers`; None without it."""
    if text is None:
        return None
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--drop-layers {text}: give numbers with commas between them, as in 3,4") from None


@dataclasses.dataclass(frozen=True)
class TargetOption:
    """An option of one target, as its `Options` declares it."""

    target: str
    name: str
    kind: type
    help: str

    @property
    def names(self) -> str:
        dashed = self.name.replace("_", "-")
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
            found.append(TargetOption(target, entry.name, kind, text))
    return found


def target_flags() -> dict[str, inspect.Parameter]:
    """One flag for the options of all targets that share a name; None means not given."""
    flags, kind = {}, inspect.Parameter.KEYWORD_ONLY
    for option in target_options():
        # hidden: the help lists it under a heading for each target
        typed = Annotated[option.kind | None, Option(option.names, hidden=True)]  # type: ignore[name-defined]
        flags[option.name] = inspect.Parameter(option.name, kind, default=None, annotation=typed)
    return flags


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
    return f"{option.names} <{option.kind.__name__}>"


def target_verb(example: str, exits: str = "") -> Callable[[Callable[..., None]], click.Command]:
    """Make a command of a function whose parameter `options` takes the flags of all targets."""

    def make(function: Callable[..., None]) -> click.Command:
        flags = target_flags()
        own = inspect.signature(function, eval_str=True)

        def run(**given: Any) -> None:
            options = {name: given.pop(name) for name in flags}
            function(**given, options={name: value for name, value in options.items() if value is not None})

        keyword = inspect.Parameter.KEYWORD_ONLY
        named = [entry.replace(kind=keyword) for name, entry in own.parameters.items() if name != "options"]
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        run.__signature__ = own.replace(parameters=[*named, *flags.values()])  # type: ignore[attr-defined]
        return verb(example, exits, TargetCommand)(run)

    return make


def print_json(terminal: Terminal, data: Any) -> None:
    terminal.print(json.dumps(data, indent=2, default=str))
