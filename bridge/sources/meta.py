"""Meta's checkpoints: `params.json` and a `consolidated.NN.pth` for every rank of tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import SourceError
from bridge.remote.place import as_path
from bridge.sources.hf import HfSource, holds_weights
from bridge.sources.refuse import one_checkpoint
from bridge.values import Program

if TYPE_CHECKING:
    from bridge.sources.native import Container
    from bridge.sources.ranks import Rank

WRITTEN_BY = (
    Program(
        "Meta's Llama 1 to 3 (`consolidated.*.pth`)",
        "as published",
        "shards cut as Meta's model parallelism cuts them become what the conversion script of transformers 4.45.2 "
        "makes of them; the published ones were not tried",
        ("tests/sources/test_meta.py",),
    ),
)
PARAMS = "params.json"
EMBEDDING, OUT = "tok_embeddings.weight", "layers.0.attention.wo.weight"


def recognizes(model: object) -> bool:
    """Take a directory with `consolidated.*.pth`; beside weights of Hugging Face, which a hub's model may have, not."""
    root = as_path(model)
    if root is None:
        return False
    return root.is_dir() and not holds_weights(root) and any(root.glob("consolidated.*.pth"))


def open_model(model: str | Path, config: Any = None, tokenizer: Any = None) -> HfSource:
    """Open the directory; without params.json, config= says what the tensors do not."""
    from bridge.sources.archive import open_folder
    from bridge.sources.beside import beside
    from bridge.sources.foreign_config import Told, meta_told
    from bridge.sources.foreign_source import CutOf, Foreign, given_config, source_of
    from bridge.sources.ranks import Cut, Joined, open_ranks
    from bridge.sources.weights_folder import json_object

    root = as_path(model)
    assert root is not None, "recognizes() was asked"
    one_checkpoint(root)
    folder = open_folder(root)
    ranks = open_ranks(folder)
    params = json_object(folder, PARAMS)
    told = Told() if params is None else meta_told(params)

    def join(cut_of: CutOf) -> Container:
        def known(name: str) -> Cut | None:
            return Cut(1) if name == EMBEDDING and _shared_along_in(ranks) else cut_of(name)

        return Joined(str(model), ranks, known)

    found = Foreign(
        root, str(model), "meta", told, join, given_config(folder, config),
        lambda read: beside(folder, read.files, ("config.json", PARAMS)),
    )  # fmt: skip
    try:
        return source_of(found, tokenizer)
    except SourceError as error:
        count = _cut_into(params or {}, ranks)
        if count > len(ranks):
            raise SourceError(
                f"{error}\n  it looks like {count} ranks' model, of which {len(ranks)} lie there; copy the other "
                "consolidated.*.pth as well"
            ) from error
        raise


def _cut_into(params: Mapping[str, Any], ranks: Mapping[Rank, Container]) -> int:
    """How many ranks share the model by its params.json and the first of them, which has its part of wo's width."""
    specs = next(iter(ranks.values())).specs
    share = specs[OUT].shape[-1] if OUT in specs and specs[OUT].shape else 0
    heads, dim = params.get("n_heads"), params.get("dim")
    if not (share and isinstance(heads, int) and isinstance(dim, int) and heads > 0):
        return 0
    size = params.get("head_dim", dim // heads)
    return heads * size // share if isinstance(size, int) else 0


def _shared_along_in(ranks: Mapping[Rank, Container]) -> bool:
    """Tell Llama 1 and 2, whose ranks share the embedding along its width: a norm, which is whole, has more than it."""
    specs = next(iter(ranks.values())).specs
    return EMBEDDING in specs and "norm.weight" in specs and specs[EMBEDDING].shape[1:] != specs["norm.weight"].shape
