"""Side files of a checkpoint: which are copied, and why others not.

Checkpoints in other dialects are training runs: only tokenizer and licence are copied. The report names every other
file with the reason.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from bridge.core.files.handles import why_not_copied
from bridge.core.files.span import Folder, Span
from bridge.core.output.names import GENERATION, REPAIR, STEM
from bridge.core.text import listed
from bridge.sources.weights.containers import training
from bridge.sources.weights.shards import Weights

# A file that ends like this has weights or training state; all other files of a Hugging Face directory are copied.
WEIGHT_ENDINGS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".onnx_data", ".onnx.data", ".gguf",
    ".ot", ".npz", ".npy", ".pkl", ".tflite", ".mlmodel", ".mlpackage", ".nemo", ".distcp", ".index.json", ".engine",
)  # fmt: skip
BOOKKEEPING = (".git", ".gitattributes", ".gitignore", ".cache", ".DS_Store", "__pycache__")

TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "tekken.json", "chat_template.jinja",
    "chat_template.json", "generation_config.json",
)  # fmt: skip
OWN_TOKENIZER = tuple(name for name in TOKENIZER if name != GENERATION)  # the same without settings of generation
LICENCE = re.compile(r"(LICEN[CS]E|NOTICE|USE_POLICY)([.-].*)?")
MAX_BYTES = 256 << 20  # of a file out of an archive; the largest tokenizers take some tens of megabytes
_HASH = re.compile(r"[0-9a-f]{32}_")  # NeMo 1 puts it before the names of artefacts
_RUN = "of the training run, not of the model"
_READ = "its place is taken by the config.json that is made of it"


@dataclass(frozen=True)
class SideFiles:
    """`files`: relative name -> file to copy, or its content. `dropped`: file -> why it is not copied."""

    files: Mapping[str, Path | bytes] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)


def divide_files(
    folder: Folder, used: Iterable[Span], read: Iterable[str], tokenizer: Mapping[str, str] | None = None
) -> SideFiles:
    """Divide the files of a checkpoint. `used`: files of weights; `read`: names of its own configuration.

    `tokenizer`: the tokenizer's files that the configuration names -> transformers' names for them.
    """
    weights, configuration = set(used), {*read, "metadata.json"}
    rest: dict[str, Span] = {}
    states: dict[str, list[int]] = {}
    for name, span in folder.files.items():
        if state := _state(name):
            states.setdefault(state, []).append(span.nbytes)
        elif span not in weights:
            rest[name] = span
    chosen = tokenizer or {name: plain_name(name) for name in _tokenizer({**rest, **folder.skipped})}
    lost = {name: why for name, why in folder.skipped.items() if name in chosen or LICENCE.fullmatch(name)}
    lost |= {name: why for name in chosen if name in rest and (why := why_not_copied(rest[name].path))}
    if lost:
        raise listed(folder.where, [f"{name}: {why}" for name, why in sorted(lost.items())])
    counts = Counter(chosen.values())
    copied: dict[str, Path | bytes] = {}
    dropped = dict(folder.skipped)
    dropped |= {name: f"training state, {sum(sizes)} bytes in {len(sizes)} files" for name, sizes in states.items()}
    for name, span in rest.items():
        plain = chosen.get(name, plain_name(name))
        if name in chosen and counts[plain] > 1:
            dropped[name] = f"one of {counts[plain]} that could be {plain}; give tokenizer="
        elif name in chosen or LICENCE.fullmatch(name):
            copied[plain] = span.content(MAX_BYTES) if span.offset else span.path
        elif plain in TOKENIZER:
            dropped[name] = f"another tokenizer's than {min(chosen)}"
        elif name in configuration or PurePosixPath(name).name in configuration:
            dropped[name] = _READ
        else:
            dropped[name] = _RUN
    return SideFiles(copied, dropped)


def plain_name(name: str) -> str:
    """Return the name of a file without its folder and without NeMo 1's prefix."""
    return _HASH.sub("", PurePosixPath(name).name)


def _state(name: str) -> str:
    """Return one name for all folders of training state like the folder of a file; "" if it is in none."""
    parts = PurePosixPath(name).parts
    folders = (f"{'/'.join((*parts[:at], word))}.*/" for at, part in enumerate(parts[:-1]) if (word := training(part)))
    return next(folders, "")


def _tokenizer(files: Iterable[str]) -> set[str]:
    """Return the tokenizer's files: those of the directory that has most of them, the upper one of two."""
    by_directory: dict[str, set[str]] = {}
    for name in files:
        path = PurePosixPath(name)
        if plain_name(name) in TOKENIZER:
            by_directory.setdefault(str(path.parent), set()).add(name)
    best = min(by_directory, key=lambda at: (-len(by_directory[at]), at.count("/"), at), default="")
    return by_directory.get(best, set())


def plain_side_files(root: Path, weights: Weights) -> SideFiles:
    """Divide the other files of a Hugging Face directory: all are copied but weights, models and linked directories.

    SourceError for a file that would be copied and cannot be.
    """
    copied: dict[str, Path] = {}
    dropped = dict(weights.ignored)
    stem, _, suffix = weights.files[0].name.rpartition(".")
    indexes = (f"{of}.{suffix}.index.json" for of in (stem.split("-")[0], "model", "pytorch_model"))
    used = {*(path.relative_to(root).as_posix() for path in weights.files), *indexes}
    for name, path in _files_below(root, used, dropped, whole=False):
        if name.endswith(WEIGHT_ENDINGS):
            dropped[name] = "weights or training state that the checkpoint's index does not name"
        elif name == REPAIR:
            dropped[name] = "says how the source was mended"
        else:
            copied[name] = path
    return SideFiles(copied_files(copied, str(root)), dropped)


def pipeline_side_files(root: Path, part: str) -> SideFiles:
    """Divide the files of a diffusers pipeline: all are copied but the config and the weights of `part`.

    Of another part that has safetensors, weights of variants and of other formats are left behind.
    """
    copied: dict[str, Path] = {}
    dropped: dict[str, str] = {}
    for name, path in _files_below(root, {f"{part}/config.json"}, dropped, whole=True):
        if not path.name.endswith(WEIGHT_ENDINGS):
            copied[name] = path
        elif name.startswith(f"{part}/"):
            if not re.fullmatch(rf"{STEM}(-\d+-of-\d+)?\.(safetensors|bin)(\.index\.json)?", path.name):
                dropped[name] = "other weights of the model that is converted"
        elif "/" not in name:
            dropped[name] = "weights that no part of the pipeline names"
        elif _plain_weights(path.name) or not any(_plain_weights(other.name) for other in path.parent.iterdir()):
            copied[name] = path
        else:
            dropped[name] = "a variant of weights that are copied, or of another format"
    return SideFiles(copied_files(copied, str(root)), dropped)


def copied_files(files: Mapping[str, Path], where: str) -> dict[str, Path | bytes]:
    """Return files that are to be copied; SourceError names every one that cannot be."""
    if lost := [f"{name}: {why}" for name, path in files.items() if (why := why_not_copied(path))]:
        raise listed(where, lost)
    return dict(files)


def _plain_weights(name: str) -> bool:
    """Whether a file has weights, or their index, in safetensors and is not a variant (`model.fp16.safetensors`)."""
    return re.fullmatch(r"[^.]+\.safetensors(\.index\.json)?", name) is not None


def _files_below(
    root: Path, omitted: Container[str], dropped: dict[str, str], whole: bool
) -> Iterator[tuple[str, Path]]:
    """Yield the files below a directory with their names there, and note what is dropped.

    `whole`: also those of models in subdirectories.
    """
    left = _entries(root, "")
    while left:  # a recursive inner function would keep the model alive until garbage is collected
        name, path = left.pop()
        if path.name in BOOKKEEPING or name in omitted:
            continue
        if not path.is_dir():
            yield name, path
        elif path.is_symlink():  # following one to a parent would never end
            dropped[name] = "a link to a directory"
        elif not whole and _has_model(path):
            dropped[name + "/"] = "another model in a subdirectory"
        else:
            left += _entries(path, name + "/")


def _has_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(any(folder.glob(name)) for name in ("*.safetensors", "*.bin"))


def _entries(folder: Path, prefix: str) -> list[tuple[str, Path]]:
    """Return the entries of a folder by name, the first one last."""
    return [(prefix + path.name, path) for path in sorted(folder.iterdir(), reverse=True)]
