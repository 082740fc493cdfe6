"""torchtitan's checkpoints: a distributed checkpoint a step, of which the last is read; never guesses the config.

What other programs save of a `transformers` model to one, in its own names, is read as well.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import SourceError
from bridge.remote.place import as_path
from bridge.sources.hf import HfSource, holds_weights, settle_config
from bridge.sources.refuse import one_checkpoint, quantized
from bridge.sources.shards import listed, named
from bridge.values import Program

if TYPE_CHECKING:
    from bridge.sources.native import Container

WRITTEN_BY = (
    Program(
        "torchtitan",
        "0.3.0 and 0.2.2",
        "tensors equal those of its own state-dict adapters, saved by torch 2.13",
        ("tests/sources/test_torchtitan.py", "tests/sources/test_dcp.py"),
    ),
)
HEADS = ("lm_head.weight", "output.weight")
STEP = re.compile(r"step-(\d+)")


def recognizes(model: object) -> bool:
    """Take a directory with a distributed checkpoint, or with steps of a run that have one."""
    root = as_path(model)
    if root is None:
        return False
    return root.is_dir() and not holds_weights(root) and (_is_step(root) or bool(_steps(root)))


def open_model(model: str | Path, config: Any = None, tokenizer: Any = None) -> HfSource:
    """Open a step, or the last of a directory of them."""
    from bridge.sources.archive import open_folder
    from bridge.sources.beside import Beside, beside
    from bridge.sources.foreign_config import Told
    from bridge.sources.foreign_source import Foreign, dialect_of, given_config, source_of, training
    from bridge.sources.spelling import hugging_faces, unwrapped
    from bridge.sources.weights_folder import distributed

    root = as_path(model)
    assert root is not None, "recognizes() was asked"
    one_checkpoint(root)
    at, notes = (root, {}) if _is_step(root) else _last(root)
    folder = open_folder(at)
    container = distributed(folder)
    if container is None:
        what = "no distributed checkpoint (.metadata, *.distcp)"
        raise SourceError(f"{at}: {what}; give the directory of another step, or copy this one again")
    given = given_config(folder, config)
    carried = beside(folder, container.files, ("config.json",))
    settled = {} if given is None else settle_config({"architectures": ["unknown"]}, given)
    if settled and (weights := unwrapped(str(model), settled, container)):
        if problems := quantized(None, settled, weights.specs):
            raise listed(str(model), problems)
        dropped = {**carried.dropped, **notes, **training(container), **weights.ignored}
        return HfSource(at, str(model), settled, weights, tokenizer, beside=Beside(carried.files, dropped))
    if hugging_faces(container.specs):
        raise SourceError(
            f"{model}: its tensors bear names of Hugging Face's ({named(container.specs)}), and nothing says of which "
            "model; put its config.json beside them, or give config="
        )
    found = Foreign(
        at, str(model), dialect_of(str(at), container.specs), Told(), lambda _: container, given,
        lambda _: carried, _copies(settled, container), notes,
    )  # fmt: skip
    return source_of(found, tokenizer)


def _copies(config: Mapping[str, Any], container: Container) -> list[str]:
    """Return the head of a model whose config ties it to the embedding: one tensor is saved under both names."""
    return [name for name in HEADS if name in container.specs and config.get("tie_word_embeddings")]


def _is_step(root: Path) -> bool:
    return any(any(root.glob(pattern)) for pattern in (".metadata", "*.distcp", "__*.metadata"))


def _steps(root: Path) -> dict[int, Path]:
    found = {path: STEP.fullmatch(path.name) for path in root.iterdir() if path.is_dir()}
    return {int(match[1]): path for path, match in sorted(found.items()) if match and _is_step(path)}


def _last(root: Path) -> tuple[Path, dict[str, str]]:
    """Return the last step whose save finished, which the index marks, and why the others are not read."""
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
