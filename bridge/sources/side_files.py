"""What lies beside the weights of a checkpoint in another dialect: its tokenizer and licence are carried, nothing else.

Those checkpoints are training runs: most of their files mean nothing to who loads the model. Each is named in the
report with its reason.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from bridge.sources.dcp_metadata import training
from bridge.sources.span import Folder, Span

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "tekken.json", "chat_template.jinja",
    "chat_template.json", "generation_config.json",
)  # fmt: skip
LICENCE = re.compile(r"(LICEN[CS]E|NOTICE|USE_POLICY)([.-].*)?")
MOST_BYTES = 256 << 20  # of a file out of an archive; the largest tokenizers take some tens of megabytes
_HASH = re.compile(r"[0-9a-f]{32}_")  # NeMo 1 puts it before the names of artefacts
_RUN = "of the training run, not of the model"
_READ = "its place is taken by the config.json that is made of it"


@dataclass(frozen=True)
class Beside:
    """Relative name -> file to carry, or its content; file -> why it is not carried."""

    files: Mapping[str, Path | bytes] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)


def beside(
    folder: Folder, used: Iterable[Span], read: Iterable[str], tokenizer: Mapping[str, str] | None = None
) -> Beside:
    """Divide the files of a checkpoint. `used`: files of weights; `read`: names of its own configuration.

    `tokenizer`: the files that the configuration names as such -> what transformers calls them.
    """
    weights, configuration = set(used), {*read, "metadata.json"}
    rest: dict[str, Span] = {}
    states: dict[str, list[int]] = {}
    for name, span in folder.files.items():
        if state := _state(name):
            states.setdefault(state, []).append(span.nbytes)
        elif span not in weights:
            rest[name] = span
    chosen = tokenizer or {name: plain_name(name) for name in _tokenizer(rest)}
    counts = Counter(chosen.values())
    carried: dict[str, Path | bytes] = {}
    dropped = dict(folder.skipped)
    dropped |= {name: f"training state, {sum(sizes)} bytes in {len(sizes)} files" for name, sizes in states.items()}
    for name, span in rest.items():
        plain = chosen.get(name, plain_name(name))
        if name in chosen and counts[plain] > 1:
            dropped[name] = f"one of {counts[plain]} that could be {plain}; give tokenizer="
        elif name in chosen or LICENCE.fullmatch(name):
            carried[plain] = span.content(MOST_BYTES) if span.offset else span.path
        elif plain in TOKENIZER:
            dropped[name] = f"another tokenizer's than {min(chosen)}"
        elif name in configuration or PurePosixPath(name).name in configuration:
            dropped[name] = _READ
        else:
            dropped[name] = _RUN
    return Beside(carried, dropped)


def plain_name(name: str) -> str:
    """Return the name of a file without its folder, and without what NeMo 1 puts before it."""
    return _HASH.sub("", PurePosixPath(name).name)


def _state(name: str) -> str:
    """Return the name for all folders of training state like the one that a file lies in, "" where it lies in none."""
    parts = PurePosixPath(name).parts
    found = (f"{'/'.join((*parts[:at], word))}.*/" for at, part in enumerate(parts[:-1]) if (word := training(part)))
    return next(found, "")


def _tokenizer(files: Mapping[str, Span]) -> set[str]:
    """Return the files of the tokenizer: those of the directory that has most of them, the upper one of two."""
    by_directory: dict[str, set[str]] = {}
    for name in files:
        path = PurePosixPath(name)
        if plain_name(name) in TOKENIZER:
            by_directory.setdefault(str(path.parent), set()).add(name)
    best = min(by_directory, key=lambda at: (-len(by_directory[at]), at.count("/"), at), default="")
    return by_directory.get(best, set())
