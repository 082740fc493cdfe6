"""torchtitan's checkpoints: one distributed checkpoint per step; reads the last.

A run's dump folder stands for its last step, too. Distributed checkpoints that other programs save of a `transformers`
model, in its own names, are read as well. The config is never guessed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from bridge.core.errors import SourceError
from bridge.core.remote.path import as_path
from bridge.core.text import listed, named
from bridge.core.values import Program
from bridge.sources.checkpoint import HfSource
from bridge.sources.config_json import settle_config
from bridge.sources.hf import foreign_directory, numbered_directories
from bridge.sources.side_files import SideFiles, divide_files
from bridge.sources.weights.unsupported import one_checkpoint, quantized

WRITTEN_BY = (
    Program(
        "torchtitan",
        "0.3.0 and 0.2.2",
        "tensors equal those of its own state-dict adapters, saved by torch 2.13",
        ("tests/sources/test_torchtitan.py", "tests/sources/weights/test_dcp.py"),
    ),
)
HEADS = ("lm_head.weight", "output.weight")
STEP = re.compile(r"step-(\d+)")
STEPS = "checkpoint"  # torchtitan's own name of the directory of steps, in a run's dump folder


def recognizes(model: object) -> bool:
    """Take a directory with a distributed checkpoint, with steps of a run that have one, or a run's dump folder."""
    root = foreign_directory(model)
    return root is not None and (_is_step(root) or bool(_steps(root)) or (root / STEPS).is_dir())


def open_model(model: str | Path, config: Any = None, tokenizer: Any = None) -> HfSource:
    """Open a step, or the last of a directory of them."""
    from bridge.core.files.archive import open_folder
    from bridge.sources.configs.derive import Declared
    from bridge.sources.dialects.hf_names import hugging_faces, unwrapped
    from bridge.sources.dialects.opening import Foreign, dialect_of, given_config, refused, source_of, training
    from bridge.sources.weights.distributed import distributed

    root = as_path(model)
    one_checkpoint(root)
    at, notes = (root, {}) if _is_step(root) else _last(root) if _steps(root) else _last_of_run(root / STEPS)
    folder = open_folder(at)
    container = distributed(folder)
    if container is None:
        raise SourceError(
            f"{at}: no distributed checkpoint (.metadata, *.distcp); give the directory of another step, or copy this "
            "one again"
        )
    given = given_config(folder, config)
    copied = divide_files(folder, container.files, ("config.json",))
    settled = {} if given is None else settle_config({"architectures": ["unknown"]}, given)
    if settled and (weights := unwrapped(str(model), settled, container)):
        if problems := quantized(None, settled, weights.specs):
            raise listed(str(model), problems)
        dropped = {**copied.dropped, **notes, **training(container), **weights.ignored}
        return HfSource(at, str(model), settled, weights, tokenizer, side_files=SideFiles(copied.files, dropped))
    if hugging_faces(container.specs):
        raise SourceError(
            f"{model}: its tensors have Hugging Face names ({named(container.specs)}), but nothing says of which "
            "model; put its config.json beside them, or give config="
        )
    if wrong := refused(container.specs, "torchtitan"):
        raise listed(str(model), wrong)
    # A head that the config ties to the embedding: one tensor is saved under both names.
    copies = [name for name in HEADS if name in container.specs and settled.get("tie_word_embeddings")]
    checkpoint = Foreign(
        at, str(model), dialect_of(str(at), container.specs), Declared(), lambda _: container, given,
        lambda _: copied, copies, notes,
    )  # fmt: skip
    return source_of(checkpoint, tokenizer)


def _is_step(root: Path) -> bool:
    return any(any(root.glob(pattern)) for pattern in (".metadata", "*.distcp", "__*.metadata"))


def _steps(root: Path) -> dict[int, Path]:
    return {step: path for step, path in numbered_directories(root, STEP).items() if _is_step(path)}


def _last_of_run(steps: Path) -> tuple[Path, dict[str, str]]:
    """As `_last`, for the directory of steps in a dump folder; the notes say which step is read."""
    one_checkpoint(steps)
    if not numbered_directories(steps, STEP):
        raise SourceError(f"{steps}: has no step-<N>: the run has saved none yet; give the dump folder of one that has")
    chosen, notes = _last(steps)
    return chosen, {f"{STEPS}/": f"{chosen.name} of it is read"} | {f"{STEPS}/{k}": why for k, why in notes.items()}


def _last(root: Path) -> tuple[Path, dict[str, str]]:
    """Return the last step with an index, whose save finished, and why the others are not read."""
    steps = _steps(root)
    whole = [step for step, path in steps.items() if (path / ".metadata").is_file()]
    if not whole:
        raise SourceError(f"{root}: no step has a .metadata: no save finished, or hidden files were not copied")
    chosen = steps[max(whole)]
    notes = {
        f"{path.name}/": f"another step; {chosen.name} is read" if step in whole else "its save did not finish"
        for step, path in steps.items()
        if path != chosen
    }
    return chosen, notes
