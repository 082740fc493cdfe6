"""Two answers side by side, and a conversation with a model."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bridge.core.errors import UsageError, printable

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bridge.api.generation import Generation
    from bridge.cli.terminal import Terminal

YOU = "you> "
WIDEST = 160  # letters of two columns


def columns(answers: Mapping[str, Generation]) -> RenderableType:
    """The texts of several models, a column each, and below each its speeds."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), width=min(shutil.get_terminal_size().columns, WIDEST))
    for name in answers:
        table.add_column(Text(printable(name)), ratio=1, overflow="fold")
    table.add_row(*(Text(printable(answer.text.strip("\n"))) for answer in answers.values()))
    table.add_row(*(Text(str(answer), style="dim") for answer in answers.values()))
    return table


def talk(terminal: Terminal, out: str, *, system: str | None, beside: str | None, **given: Any) -> None:
    """Answer each line of standard input; all that was said before stands in the prompt. An empty line ends it."""
    from bridge.api.run import chat_of, settings_of
    from bridge.api.speaker import Speaker

    if beside is not None:
        raise UsageError("a conversation is with one model; give a text, or leave out --with")
    if given["image"] or given["audio"]:
        raise UsageError("a conversation is of texts; give a text, or leave out --image and --audio")
    settings = settings_of(YOU, given["tokens"], given["temperature"], given["seed"])
    speaker = Speaker(out)
    said = chat_of(None, system)
    while text := _line(terminal):
        said.append({"role": "user", "content": text})
        answer = speaker.answer(speaker.words.chat(said), settings, stream=terminal.write)
        said.append({"role": "assistant", "content": answer.text})
        terminal.print(f"\n{answer}" if terminal.verbose else "")


def _line(terminal: Terminal) -> str:
    """The next line that the user writes; "" at the end."""
    if sys.stdin.isatty():
        terminal.write(YOU)
    return sys.stdin.readline().strip()
