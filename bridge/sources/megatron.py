"""Megatron checkpoints of Megatron-Bridge, NeMo 2, NeMo 1 and Megatron-LM.

A run's directory stands for the iteration that its own note names. Weights are a distributed checkpoint, or one file
per rank; the configuration is whichever of `WRITERS` is there. Nothing is unpacked or run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.core.errors import SourceError, located
from bridge.core.files.span import Folder
from bridge.core.remote.path import as_path
from bridge.core.values import Program
from bridge.sources.checkpoint import HfSource
from bridge.sources.hf import foreign_directory, numbered_directories
from bridge.sources.side_files import divide_files
from bridge.sources.weights.ranks import RUN, open_ranks, rank_files, refuse_absent
from bridge.sources.weights.unsupported import one_checkpoint

if TYPE_CHECKING:
    from bridge.sources.configs.derive import Declared
    from bridge.sources.dialects.opening import Join

WRITTEN_BY = (
    Program(
        "Megatron-Core and Megatron-LM",
        "0.16.1",
        "checkpoints of its own `dist_checkpointing.save`, and of torch's ranks; transformers answers from them as "
        "megatron-core's own forward does",
        ("tests/sources/test_megatron.py", "tests/sources/weights/test_dcp_megatron.py"),
    ),
    Program(
        "Megatron-Bridge",
        "0.3.1",
        "tensors equal those of its own export to Hugging Face",
        ("tests/sources/test_megatron.py", "tests/sources/configs/test_configs.py"),
    ),
    Program(
        "NeMo 1 (`.nemo`) and NeMo 2",
        "layouts of 2023 to 2025",
        "laid out by the tests as NeMo's code of September 2025 lays them out, with tensors of megatron-core; NeMo "
        "itself was not run",
        ("tests/sources/test_megatron.py", "tests/core/test_archive.py"),
    ),
)
ARCHIVE = ".nemo"
LATEST = "latest_checkpointed_iteration.txt"
RELEASE = "release"  # in place of an iteration, if a checkpoint was converted, not trained
ITERATION = re.compile(r"iter_(\d+)")
HEAD = re.compile(r"(?:module\.|model\.)*output_layer\.weight")
RANKS = ("mp_rank_*", "tp_rank_*")
CONFIGS = ("run_config.yaml", "context/model.yaml", "model_config.yaml")
# Files that only these checkpoints have, in their directory or in one of a run's iterations.
MARKS = (*CONFIGS, "context/io.json", "common.pt", "model_weights", "model_weights.ckpt", *RANKS)


def recognizes(model: object) -> bool:
    """Take an archive, or a directory with a mark of Megatron's; Hugging Face weights in it come first."""
    path = as_path(model)
    if path is not None and path.is_file():
        return path.name.endswith(ARCHIVE)
    root = foreign_directory(model)
    return root is not None and (_is_run(root) or _is_marked(root) or bool(_archives(root)))


def open_model(model: str | Path, config: Any = None, tokenizer: Any = None) -> HfSource:
    """Open an archive, an iteration, or the iteration that a run's directory names."""
    from bridge.core.files.archive import open_folder
    from bridge.sources.dialects.opening import Foreign, given_config, source_of

    root, notes = _choose(as_path(model))
    folder = open_folder(root)
    declared, read, named = _configuration(folder, tokenizer is None)
    join, copies = _tensors(folder, declared)
    checkpoint = Foreign(
        root, str(model), "megatron", declared, join, given_config(folder, config),
        lambda container: divide_files(folder, container.files, ("config.json", *read), named), copies,
        notes | _unreadable_states(folder),
    )  # fmt: skip
    return source_of(checkpoint, tokenizer)


def _is_run(root: Path) -> bool:
    return (root / LATEST).is_file() or bool(numbered_directories(root, ITERATION))


def _is_marked(root: Path) -> bool:
    return any(any(root.glob(mark)) for mark in MARKS)


def _archives(root: Path) -> list[Path]:
    return sorted(root.glob(f"*{ARCHIVE}"))


def _choose(root: Path) -> tuple[Path, dict[str, str]]:
    """Choose what to open, and return with it why the rest is not read."""
    if root.name == "weights" and (root.parent / "context").is_dir():
        root = root.parent  # NeMo 2's, with the configuration
    one_checkpoint(root)
    if root.is_file() or _is_marked(root):
        return root, {}
    if not _is_run(root):
        archives = _archives(root)
        if len(archives) > 1:
            raise SourceError(f"{root}: {len(archives)} archives; give one: {', '.join(a.name for a in archives[:8])}")
        return archives[0], {}
    note = _note(root)
    if (root / RELEASE).is_dir() and note == RELEASE:
        return root / RELEASE, {}
    if note is not None and not note.isdecimal():
        raise SourceError(
            f"{root / LATEST}: {note!r} is not an iteration; give the directory of one: {root}/iter_0000100, say"
        )
    every = numbered_directories(root, ITERATION)
    number = max(every) if note is None else int(note)
    if number not in every:
        has = ", ".join(path.name for path in every.values()) or "none"
        raise SourceError(f"{root}: {LATEST} says iteration {number}, but the iterations here are: {has}; give one")
    chosen = every[number]
    return chosen, {
        f"{path.name}/": f"another iteration; {chosen.name} is read" for path in every.values() if path != chosen
    }


def _note(root: Path) -> str | None:
    """Return the name of the run's latest iteration, as its note has it; None without a note."""
    if not (root / LATEST).is_file():
        return None
    with (root / LATEST).open("rb") as file:
        return file.read(64).decode(errors="replace").strip()


def _configuration(folder: Folder, needs_tokenizer: bool) -> tuple[Declared, tuple[str, ...], dict[str, str]]:
    """Read the configuration; return its values, its file, and the tokenizer's files that it names."""
    from bridge.sources.configs.derive import Declared
    from bridge.sources.configs.tokenizer_files import named_tokenizer
    from bridge.sources.configs.writers import declared_by_megatron
    from bridge.sources.configs.yaml_data import MAX_BYTES, read_yaml

    for name in CONFIGS:
        if name in folder.files:
            span = folder.files[name]
            raw = read_yaml(span.content(MAX_BYTES), span.name)
            return declared_by_megatron(name, raw), (name,), named_tokenizer(name, raw, folder, needs_tokenizer)
    for name, state in _states(folder):
        arguments = state.get("args") if isinstance(state, dict) else None
        if isinstance(arguments, Mapping):
            if name == RUN:
                _refuse_ranks(folder, arguments)
            return declared_by_megatron("common.pt: args", arguments, f"{name}: args"), (name,), {}
    return Declared(), (), {}


def _refuse_ranks(folder: Folder, arguments: Mapping[str, Any]) -> None:
    """SourceError if the files are not those of the run: experts' ranks have names like those of stages."""
    experts, *counts = (arguments.get(f"{axis}_model_parallel_size") for axis in ("expert", "pipeline", "tensor"))
    if experts not in (None, 1):
        raise SourceError(
            f"{RUN}: args.expert_model_parallel_size = {str(experts)[:20]}: files of several expert ranks are not "
            "supported; load the checkpoint with Megatron-LM and save it with --ckpt-format torch_dist"
        )
    stages, tensors = (count if type(count) is int else 1 for count in counts)
    where = f"{folder.where}: args say {stages} pipeline stages of {tensors} tensor parallel ranks"
    refuse_absent(where, rank_files(folder), stages, tensors)


def _unreadable_states(folder: Folder) -> dict[str, str]:
    """Return problems of states that are not used here: other programs that load the checkpoint will meet them."""
    from bridge.sources.weights.distributed import PLACES, common_state

    notes = {}
    for place in PLACES:
        try:
            common_state(folder.below(place))
        except SourceError as error:
            notes[f"{place}common.pt"] = str(error)
    return notes


def _states(folder: Folder) -> Iterator[tuple[str, Any]]:
    """Yield each file of Megatron-LM's state and its content, as inert data."""
    from bridge.sources.weights.distributed import PLACES, common_state

    for place in PLACES:
        saved = common_state(folder.below(place))
        if saved:
            yield f"{place}common.pt", saved.value
    for span in rank_files(folder).values():
        if span.path.name == RUN:
            with located(span.name):
                from bridge.core.formats.inert_pickle import inert
                from bridge.core.formats.torch_file import open_saved

                state = open_saved(span, inert()).value
            yield RUN, state
            return


def _tensors(folder: Folder, declared: Declared) -> tuple[Join, list[str]]:
    """Return the tensors, and the copy of the embedding that the last stage of a tied model has as its head."""
    from bridge.sources.dialects.opening import joined
    from bridge.sources.weights.distributed import distributed

    container, files = distributed(folder), rank_files(folder)
    if container is not None and files:
        raise SourceError(
            f"{folder.where}: holds a distributed checkpoint and files of ranks, among them "
            f"{next(iter(files.values())).name}; which to read is unclear; move the others away"
        )
    if container is not None:
        return lambda _: container, []
    ranks = open_ranks(folder)
    if not ranks:
        raise SourceError(
            f"{folder.where}: no weights: neither a distributed checkpoint (.metadata, *.distcp) nor files of ranks "
            "(model_weights.ckpt, model_optim_rng.pt)"
        )
    tied = declared.terms.get("tied")
    heads = {name: None for rank in ranks.values() for name in rank.specs if HEAD.fullmatch(name)}
    return joined(folder.where, ranks), list(heads if tied and tied.value else ())
