"""Options that several verbs share, and flags for options of targets."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from bridge.cli.terminal import Terminal


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


Model = Annotated[str, typer.Argument(metavar="MODEL", help="a directory, a hub id or an address")]
Written = Annotated[str, typer.Argument(metavar="OUT", help="a directory that `convert` wrote, or its address")]
Target = Annotated[
    str, typer.Option(help="the format to write: see `qbridge show targets`", autocompletion=complete_target)
]
Runtime = Annotated[
    str | None,
    typer.Option(
        "--for",
        help="the program that will load it: vllm, sglang ... (`qbridge show runtimes`)",
        autocompletion=_complete_runtime,
    ),
]
Quant = Annotated[
    str | None,
    typer.Option(
        help="scheme name (`qbridge show schemes`), recipe file, or auto:4.8bits (chosen per layer); default: none",
        autocompletion=complete_scheme,
    ),
]
Planned = Annotated[
    str | None,
    typer.Option(
        help="scheme name (`qbridge show schemes`) or recipe file; default: none", autocompletion=complete_scheme
    ),
]
Scheme = Annotated[
    str, typer.Option(help="scheme name (`qbridge show schemes`) or recipe file", autocompletion=complete_scheme)
]
Kv = Annotated[str | None, typer.Option(help="the KV cache: fp8, int8 or nvfp4", autocompletion=_complete_kv)]
Config = Annotated[str | None, typer.Option(help="JSON file; its entries replace those of config.json")]
Tokenizer = Annotated[str | None, typer.Option(help="directory or hub id of the tokenizer; default: the model's")]
Memory = Annotated[str | None, typer.Option(help="bytes that the run may take, without those of imports: 2GB, 512MiB")]
Device = Annotated[str | None, typer.Option(help="where calibration runs: cpu, cuda, cuda:1")]
Compute = Annotated[str | None, typer.Option(help="fp32: calibrate in float32; default: the model's dtype")]
Data = Annotated[str | None, typer.Option(help="text or JSONL file, dataset id; default: the embedded text")]
Samples = Annotated[
    str | None, typer.Option(metavar="N|auto", help="number of calibration sequences; default: 32, 128 for SmoothQuant")
]
Sequence = Annotated[int | None, typer.Option(min=1, help="tokens per sequence; default: 128")]
Field = Annotated[str | None, typer.Option(help="key of a JSONL record that holds its text or chat")]
Json = Annotated[bool, typer.Option("--json", help="print JSON on stdout instead of tables")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="no progress, no result")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="every table of the report, not the verdict alone")]
Debug = Annotated[bool, typer.Option("--debug", help="show tracebacks and framework output")]


# The sections of the help of `convert` and `plan`; what is in none of them comes last.
SECTIONS = {
    "Model": ("model", "config", "tokenizer"),
    "Output": ("target", "runtime", "out", "overwrite", "no_resume"),
    "Quantization": ("quant", "kv", "calib", "data", "samples", "sequence", "field", "device", "compute"),
}


def count_or_auto(samples: str | None) -> Any:
    """The value of --samples: a number where it is one; the verbs refuse other words than "auto"."""
    return int(samples) if samples and samples.isdecimal() else samples


def epilog(example: str, exits: str = "") -> str:
    """The end of a verb's help: its exit codes, then an example."""
    return "\n\n".join([*([exits] if exits else []), f"Example: {example}"])


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
        typed = Annotated[option.kind | None, typer.Option(option.names, hidden=True)]  # type: ignore[name-defined]
        flags[option.name] = inspect.Parameter(option.name, kind, default=None, annotation=typed)
    return flags


class TargetCommand(TyperCommand):
    """A verb whose help has sections, the options of each target under a heading of their own."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        shown = {name: param for param in self.get_params(ctx) if (name := param.name) and not _is_hidden(param)}
        for title, names in SECTIONS.items():
            params = [shown.pop(name) for name in names if name in shown]
            _section(ctx, formatter, title, params)
        _section(ctx, formatter, "Run and print", list(shown.values()))
        for target, options in itertools.groupby(target_options(), lambda option: option.target):
            with formatter.section(f"Options of --target {target}"):
                formatter.write_dl([(_usage(option), option.help) for option in options])


def _is_hidden(param: Any) -> bool:
    return bool(getattr(param, "hidden", False))


def _section(ctx: Any, formatter: Any, title: str, params: list[Any]) -> None:
    if records := [record for param in params if (record := param.get_help_record(ctx))]:
        with formatter.section(title):
            formatter.write_dl(records)


def _usage(option: TargetOption) -> str:
    """`--shard-size <str>`, in the manner of the parser's own help."""
    if option.kind is bool:
        return f"--[no-]{option.name.replace('_', '-')}"
    return f"{option.names} <{option.kind.__name__}>"


def takes_target_options(verb: Callable[..., None]) -> Callable[..., None]:
    """Replace the parameter `options` of a verb by the flags of all targets."""
    flags = target_flags()
    own = inspect.signature(verb, eval_str=True)

    def run(**given: Any) -> None:
        options = {name: given.pop(name) for name in flags}
        verb(**given, options={name: value for name, value in options.items() if value is not None})

    others = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own.parameters.values() if p.name != "options"]
    signature = own.replace(parameters=[*others, *flags.values()])
    run.__name__, run.__doc__ = verb.__name__, verb.__doc__
    run.__signature__ = signature  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    return run


def print_json(terminal: Terminal, data: Any) -> None:
    terminal.print(json.dumps(data, indent=2, default=str))
