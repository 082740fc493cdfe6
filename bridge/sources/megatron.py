"""Megatron's checkpoints, as Megatron-Bridge, NeMo 2, NeMo 1 and Megatron-LM lay them out; unpacks and runs nothing.

A run's directory stands for the iteration that its own note names. Weights are a distributed checkpoint, or a file a
rank; the configuration is whichever of `WRITERS` is there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import SourceError
from bridge.remote.place import as_path
from bridge.sources.hf import HfSource, holds_weights
from bridge.sources.ranks import RUN
from bridge.sources.refuse import one_checkpoint
from bridge.values import Program

if TYPE_CHECKING:
    from bridge.sources.foreign_config import Told
    from bridge.sources.foreign_source import Join
    from bridge.sources.span import Folder

WRITTEN_BY = (
    Program(
        "Megatron-Core and Megatron-LM",
        "0.16.1",
        "checkpoints of its own `dist_checkpointing.save`, and of torch's ranks; transformers answers from them as "
        "megatron-core's own forward does",
        ("tests/sources/test_megatron.py", "tests/sources/test_dcp_megatron.py"),
    ),
    Program(
        "Megatron-Bridge",
        "0.3.1",
        "tensors equal those of its own export to Hugging Face",
        ("tests/sources/test_megatron.py", "tests/sources/test_foreign_config.py"),
    ),
    Program(
        "NeMo 1 (`.nemo`) and NeMo 2",
        "layouts of 2023 to 2025",
        "laid out by the tests as NeMo's code of September 2025 lays them out, with tensors of megatron-core; NeMo "
        "itself was not run",
        ("tests/sources/test_megatron.py", "tests/sources/test_archive.py"),
    ),
)
ARCHIVE = ".nemo"
LATEST = "latest_checkpointed_iteration.txt"
RELEASE = "release"  # what stands for an iteration where a checkpoint was converted, not trained
ITERATION = re.compile(r"iter_(\d+)")
HEAD = re.compile(r"(?:module\.|model\.)*output_layer\.weight")
RANKS = ("mp_rank_*", "tp_rank_*")
CONFIGS = ("run_config.yaml", "context/model.yaml", "model_config.yaml")
# What only these checkpoints have, in their directory or in one of a run's iterations.
MARKS = (*CONFIGS, "context/io.json", "common.pt", "model_weights", "model_weights.ckpt", *RANKS)


def recognizes(model: object) -> bool:
    """Take an archive, or a directory with a mark of Megatron's; weights of Hugging Face in it come first."""
    root = as_path(model)
    if root is None:
        return False
    if root.is_file():
        return root.name.endswith(ARCHIVE)
    return root.is_dir() and not holds_weights(root) and (_is_run(root) or _is_marked(root) or bool(_archives(root)))


def open_model(model: str | Path, config: Any = None, tokenizer: Any = None) -> HfSource:
    """Open an archive, an iteration, or the iteration that a run's directory names."""
    from bridge.sources.archive import open_folder
    from bridge.sources.beside import beside
    from bridge.sources.foreign_source import Foreign, given_config, source_of

    path = as_path(model)
    assert path is not None, "recognizes() was asked"
    root, notes = _chosen(path)
    folder = open_folder(root)
    told, read, named = _told(folder, tokenizer is None)
    join, copies = _tensors(folder, told)
    found = Foreign(
        root, str(model), "megatron", told, join, given_config(folder, config),
        lambda container: beside(folder, container.files, ("config.json", *read), named), copies,
        notes | _unread(folder),
    )  # fmt: skip
    return source_of(found, tokenizer)


def _is_run(root: Path) -> bool:
    return (root / LATEST).is_file() or bool(_iterations(root))


def _is_marked(root: Path) -> bool:
    return any(any(root.glob(mark)) for mark in MARKS)


def _archives(root: Path) -> list[Path]:
    return sorted(root.glob(f"*{ARCHIVE}"))


def _iterations(root: Path) -> dict[int, Path]:
    found = {path: ITERATION.fullmatch(path.name) for path in root.iterdir() if path.is_dir()}
    return {int(match[1]): path for path, match in sorted(found.items()) if match}


def _chosen(root: Path) -> tuple[Path, dict[str, str]]:
    """Return what is to be opened, and why the rest is not."""
    if root.name == "weights" and (root.parent / "context").is_dir():
        root = root.parent  # of NeMo 2, whose configuration lies beside
    one_checkpoint(root)
    if root.is_file() or _is_marked(root):
        return root, {}
    if not _is_run(root):
        archives = _archives(root)
        if len(archives) > 1:
            raise SourceError(f"{root}: {len(archives)} archives; give one: {', '.join(a.name for a in archives[:8])}")
        return archives[0], {}
    if (root / RELEASE).is_dir() and _note(root) == RELEASE:
        return root / RELEASE, {}
    every = _iterations(root)
    number = _latest(root, every)
    if number not in every:
        has = ", ".join(path.name for path in every.values()) or "none"
        raise SourceError(f"{root}: {LATEST} says iteration {number}, but the iterations here are: {has}; give one")
    chosen = every[number]
    return chosen, {
        f"{path.name}/": f"another iteration; {chosen.name} is read" for path in every.values() if path != chosen
    }


def _latest(root: Path, every: Mapping[int, Path]) -> int:
    """The iteration that the run's note names; the highest where there is no note."""
    text = _note(root)
    if text is None:
        return max(every)
    if not text.isdecimal():
        raise SourceError(
            f"{root / LATEST}: {text!r} is no iteration; give the directory of one: {root}/iter_0000100, say"
        )
    return int(text)


def _note(root: Path) -> str | None:
    if not (root / LATEST).is_file():
        return None
    with (root / LATEST).open("rb") as file:
        return file.read(64).decode(errors="replace").strip()


def _told(folder: Folder, asked: bool) -> tuple[Told, tuple[str, ...], dict[str, str]]:
    """Return what the configuration says, the file that says it, and the tokenizer's files by it; nothing without one.

    `asked`: that tokenizer is needed.
    """
    from bridge.sources.artefacts import named_tokenizer
    from bridge.sources.foreign_config import Told, megatron_told, read_yaml
    from bridge.sources.foreign_config.yaml_data import MOST_BYTES

    for name in CONFIGS:
        if name in folder.files:
            span = folder.files[name]
            raw = read_yaml(span.content(MOST_BYTES), span.name)
            return megatron_told(name, raw), (name,), named_tokenizer(name, raw, folder, asked)
    for name, state in _states(folder):
        arguments = state.get("args") if isinstance(state, dict) else None
        if isinstance(arguments, Mapping):
            if name == RUN:
                _refuse_ranks(folder, arguments)
            return megatron_told("common.pt: args", arguments, f"{name}: args"), (name,), {}
    return Told(), (), {}


def _refuse_ranks(folder: Folder, arguments: Mapping[str, Any]) -> None:
    """SourceError where the files are not those of the run: experts' ranks have names like those of stages."""
    from bridge.sources.ranks import rank_files, refuse_absent

    experts, *counts = (arguments.get(f"{axis}_model_parallel_size") for axis in ("expert", "pipeline", "tensor"))
    if experts not in (None, 1):
        raise SourceError(
            f"{RUN}: args.expert_model_parallel_size = {str(experts)[:20]}: files of several expert ranks are not "
            "read; load the checkpoint with Megatron-LM and save it with --ckpt-format torch_dist"
        )
    stages, tensors = (count if type(count) is int else 1 for count in counts)
    where = f"{folder.where}: args say {stages} pipeline stages of {tensors} tensor parallel ranks"
    refuse_absent(where, rank_files(folder), stages, tensors)


def _unread(folder: Folder) -> dict[str, str]:
    """What is wrong with a state that nothing is taken from: whoever loads the checkpoint elsewhere must know."""
    from bridge.sources.weights_folder import PLACES, common_state

    notes = {}
    for place in PLACES:
        try:
            common_state(folder.below(place))
        except SourceError as error:
            notes[f"{place}common.pt"] = str(error)
    return notes


def _states(folder: Folder) -> Iterator[tuple[str, Any]]:
    """Yield what Megatron-LM saves beside the tensors, as inert data, and its file's name."""
    from bridge.sources.ranks import rank_files
    from bridge.sources.records import inert
    from bridge.sources.torch_zip import open_saved
    from bridge.sources.weights_folder import PLACES, common_state

    for place in PLACES:
        saved = common_state(folder.below(place))
        if saved:
            yield f"{place}common.pt", saved.value
    for span in rank_files(folder).values():
        if span.path.name == RUN:
            try:
                yield RUN, open_saved(span, inert()).value
            except SourceError as error:
                raise SourceError(f"{span.name}: {error}") from error
            return


def _tensors(folder: Folder, told: Told) -> tuple[Join, list[str]]:
    """Return the tensors, and the copy of the embedding that the last stage of a tied model has for its head."""
    from bridge.sources.foreign_source import joined
    from bridge.sources.ranks import open_ranks, rank_files
    from bridge.sources.weights_folder import distributed

    container, files = distributed(folder), rank_files(folder)
    if container is not None and files:
        raise SourceError(
            f"{folder.where}: holds a distributed checkpoint and files of ranks, among them "
            f"{next(iter(files.values())).name}, so which count is unclear; move the others away"
        )
    if container is not None:
        return lambda _: container, []
    ranks = open_ranks(folder)
    if not ranks:
        raise SourceError(
            f"{folder.where}: no weights: neither a distributed checkpoint (.metadata, *.distcp) nor files of ranks "
            "(model_weights.ckpt, model_optim_rng.pt)"
        )
    tied = told.terms.get("tied")
    heads = {name: None for rank in ranks.values() for name in rank.specs if HEAD.fullmatch(name)}
    return joined(folder.where, ranks), list(heads if tied and tied.value else ())
