"""Read calibration texts: a file, a dataset, or the embedded one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bridge.core.addresses import check_length
from bridge.core.errors import CalibrationError, UsageError, first_line
from bridge.core.parsing.limited import parse_json
from bridge.core.version import install

CHARACTERS = 4 << 20  # of a text file; rows are spread over these, so that a corpus is not read whole
_DEFAULT = Path(__file__).parent / "default_text.txt"


class Chat(str):
    """A formatted chat; `answers`: where what the assistant says begins and ends, empty if that is not known."""

    answers: tuple[tuple[int, int], ...] = ()


def documents(
    data: str | Path | None,
    load_tokenizer: Callable[[], Any],
    samples: int,
    field: str | None = None,
    characters: int = CHARACTERS,
) -> list[str]:
    """Return the texts of a file, of a dataset id or (None) the embedded one.

    A text file is one document, of which the first `characters` are read; enough of a dataset is read for `samples`
    rows; the tokenizer formats chats. `field`: the key of a record that holds its text, or its chat.
    """
    if data is None:
        return [_DEFAULT.read_text(encoding="utf-8")]
    check_length(data)
    path = Path(data)
    if path.is_dir():
        raise CalibrationError(f"{path}: a directory; give a text or JSONL file")
    if not path.is_file():
        if isinstance(data, Path) or path.suffix in (".txt", ".jsonl", ".json", ".md", ".csv") or path.is_absolute():
            raise CalibrationError(f"{path}: no such calibration file")
        return _dataset(str(data), load_tokenizer, samples, field)
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(characters)
    except UnicodeDecodeError as cause:
        raise CalibrationError(f"{path}: not UTF-8 text at byte {cause.start}") from cause
    except OSError as cause:
        raise CalibrationError(f"{path}: cannot be read: {cause.strerror}") from cause
    if path.suffix != ".jsonl":
        if field:
            raise UsageError(f"{path}: field={field!r} (--field) names a key of JSONL records, and this is plain text")
        return [text]
    # the last line may be cut by the read limit
    lines = text.splitlines() if len(text) < characters else text.splitlines()[:-1]
    records = [(f"{path}:{n}", line) for n, line in enumerate(lines, 1) if line.strip()]
    return [_text(_record(line, where), where, load_tokenizer, field) for where, line in records]


def _record(line: str, where: str) -> Any:
    try:
        return parse_json(line)
    except ValueError as cause:
        raise CalibrationError(f"{where}: not JSON: {cause}") from cause


def _text(record: Any, where: str, load_tokenizer: Callable[[], Any], field: str | None) -> str:
    fields = record if isinstance(record, Mapping) else {}
    text, messages = fields.get(field or "text"), fields.get(field or "messages")
    if isinstance(text, str):
        return text
    if field and field in fields and not isinstance(messages, list):
        kind = type(messages).__name__
        raise CalibrationError(f"{where}: field {field!r} holds a {kind}; expected a text, or the messages of a chat")
    if not isinstance(messages, list):
        has = ", ".join(map(str, sorted(fields))) if isinstance(record, Mapping) else type(record).__name__
        wanted = f"{field!r}" if field else "'text' (a string) or 'messages' (a chat)"
        raise CalibrationError(
            f"{where}: expected a field {wanted}; the record has {has}. Name the field with field= (--field)"
        )
    tokenizer = load_tokenizer()
    if not getattr(tokenizer, "chat_template", None):
        raise CalibrationError(
            f"{where}: the tokenizer has no chat template to format messages with; give records with text, or a "
            "tokenizer that has one (tokenizer=, --tokenizer)"
        )
    try:
        chat = Chat(tokenizer.apply_chat_template(messages, tokenize=False))
    except Exception as cause:  # templates raise errors of their own
        raise CalibrationError(f"{where}: the tokenizer's chat template refused the messages: {cause}") from cause
    chat.answers = _answers(tokenizer, messages, chat)
    return chat


def _answers(tokenizer: Any, messages: Sequence[Mapping[str, Any]], chat: str) -> tuple[tuple[int, int], ...]:
    """Where the answers are in a chat, by formatting what comes before each; () where that is not how it begins."""
    spans = []
    for at, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        try:
            before = tokenizer.apply_chat_template(messages[:at], tokenize=False, add_generation_prompt=True)
            after = tokenizer.apply_chat_template(messages[: at + 1], tokenize=False)
        except Exception:  # a template that takes no such part of a chat
            return ()
        if not (chat.startswith(after) and after.startswith(before)):
            return ()
        spans.append((len(before), len(after)))
    return tuple(spans)


def _dataset(name: str, load_tokenizer: Callable[[], Any], samples: int, field: str | None) -> list[str]:
    try:
        from datasets import load_dataset
    except ImportError as cause:
        raise CalibrationError(
            f"{name}: no such file, and reading it as a dataset id needs {install('calibrate')}"
        ) from cause
    repo, _, config = name.partition(":")
    try:
        rows = load_dataset(repo, config or None, split=f"train[:{samples * 64}]")
    except Exception as cause:  # hub, cache and parsing errors have no common base
        raise CalibrationError(
            f"{name}: not a file, and loading it as a dataset failed: {first_line(cause)}; without network give a "
            'text file, or fetch the dataset into the cache first ("org/name" or "org/name:configuration")'
        ) from cause
    return [_text(row, f"{name}[{n}]", load_tokenizer, field) for n, row in enumerate(rows)]
