"""What lies beside the weights of a checkpoint in another dialect: its tokenizer and licence are carried, nothing else.

Those checkpoints are training runs: most of their files mean nothing to who loads the model. Each is named in the
report with its reason.
"""

from __future__ import annotations

import re
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
WEIGHTS = ("model_weights", "weights")  # folders of an archive
NOT_WEIGHTS = (".metadata", "metadata.json", "common.pt")
_HASH = re.compile(r"[0-9a-f]{32}_")  # NeMo 1 puts it before the names of artefacts
_RUN = "of the training run, not of the model"
_READ = "its place is taken by the config.json that is made of it"


@dataclass(frozen=True)
class Beside:
    """Relative name -> file to carry, or its content; file -> why it is not carried."""

    files: Mapping[str, Path | bytes] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)


def beside(folder: Folder, used: Iterable[Path], read: Iterable[str]) -> Beside:
    """Divide the files of a checkpoint. `used`: files of weights; `read`: names of its own configuration."""
    weights, configuration = set(used), {*read, ".metadata", "metadata.json"}
    rest = {name: span for name, span in folder.files.items() if not _is_weights(name, span, weights)}
    chosen = _tokenizer(rest)
    carried: dict[str, Path | bytes] = {}
    dropped = dict(folder.skipped)
    for name, span in rest.items():
        plain = _HASH.sub("", PurePosixPath(name).name)
        if name in chosen or LICENCE.fullmatch(name):
            carried[plain] = span.content(MOST_BYTES) if span.offset else span.path
        elif plain in TOKENIZER:
            dropped[name] = f"another tokenizer's than {min(chosen)}"
        elif name in configuration or PurePosixPath(name).name in configuration:
            dropped[name] = _READ
        else:
            dropped[name] = _RUN
    return Beside(carried, dropped)


def _is_weights(name: str, span: Span, used: set[Path]) -> bool:
    """Whether a file is one of the weights, or of training state, of which the bytes are told together.

    Members of an archive have its path, so their names tell.
    """
    path = PurePosixPath(name)
    if any(training(part) for part in path.parts):
        return True
    if not span.offset:
        return span.path in used
    return path.name == "model_weights.ckpt" or (path.parts[0] in WEIGHTS and path.name not in NOT_WEIGHTS)


def _tokenizer(files: Mapping[str, Span]) -> set[str]:
    """Return the files of the tokenizer: those of the directory that has most of them, the upper one of two."""
    by_directory: dict[str, set[str]] = {}
    for name in files:
        path = PurePosixPath(name)
        if _HASH.sub("", path.name) in TOKENIZER:
            by_directory.setdefault(str(path.parent), set()).add(name)
    best = min(by_directory, key=lambda at: (-len(by_directory[at]), at.count("/"), at), default="")
    return by_directory.get(best, set())
