"""The entry of the command line: verbs that are imported when called."""

from __future__ import annotations

import importlib
from typing import Any, cast

import click

from bridge.cli.terminal import guarded, open_streams
from bridge.cli.verb import Group
from bridge.core.machine import collect_seldom, keep_pages
from bridge.core.version import __version__

# The first sentence of each verb's help, so that `qbridge --help` imports none of them.
VERBS = {
    "convert": "Convert a model to the target's format.",
    "plan": "Print what `convert` would write, from headers alone.",
    "calibrate": "Run a model once and save its statistics.",
    "verify": "Compare a written model with its source and run it.",
    "run": "Continue a text with a model, talk with it, or run a chain.",
    "engine": "Build TensorRT engines of a written model, without a GPU.",
    "check": "Check tables and schemes, or the files in PATH.",
    "repair": "Mend a checkpoint that another program wrote.",
    "show": "Show a scheme, table, written model or calibration.",
    "sensitivity": "Rank layers by the cost of quantizing each one alone.",
    "inspect": "Show where a model loses most, layer by layer.",
    "prune": "Write a model with fewer channels, heads or layers.",
    "search": "Find the pruned sizes that cost least within a budget.",
    "distill": "Train a model to answer as another one does.",
    "batch": "Convert every row of a manifest, several at once.",
    "cache": "List the graphs, structures and kernels that are kept.",
    "golden": "Record and check regression snapshots.",
}
OWN_MODULE = ("check", "show", "batch", "cache", "golden")  # the other verbs are in `bridge.cli.verbs`


class Verbs(Group):
    """The verbs, imported one at a time."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(f"bridge.cli.{cmd_name if cmd_name in OWN_MODULE else 'verbs'}")
        command: click.Command = getattr(module, cmd_name)()
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


app = Verbs(
    "qbridge",
    commands=cast(Any, dict.fromkeys(VERBS)),  # names, which messages offer
    help="Convert and quantize trained models for inference runtimes.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)
click.version_option(__version__, message="qbridge %(version)s", help="print the version and exit")(app)


def main() -> None:
    """Run the verb; `bridge.__main__` is the entry point of the console command."""
    open_streams()
    with guarded():
        keep_pages()
        collect_seldom()
        app()
