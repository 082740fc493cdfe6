"""Meta's checkpoints: `params.json` and one `consolidated.NN.pth` per tensor parallel rank."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.core.errors import SourceError
from bridge.core.remote.path import as_path
from bridge.core.values import Program, TensorSpec
from bridge.sources.checkpoint import HfSource
from bridge.sources.hf import foreign_directory
from bridge.sources.side_files import divide_files
from bridge.sources.weights.ranks import Joined, open_ranks
from bridge.sources.weights.unsupported import one_checkpoint

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
    """Take a directory with `consolidated.*.pth`; a model of the hub may have them next to Hugging Face weights."""
    root = foreign_directory(model)
    return root is not None and any(root.glob("consolidated.*.pth"))


def open_model(model: str | Path, config: Any = None, tokenizer: Any = None) -> HfSource:
    """Open the directory; without params.json, config= gives what the tensors do not tell."""
    from bridge.core.files.archive import open_folder
    from bridge.sources.configs.derive import Declared
    from bridge.sources.configs.meta import declared_by_meta
    from bridge.sources.dialects.opening import CutOf, Foreign, given_config, source_of
    from bridge.sources.weights.distributed import json_object
    from bridge.tables.dialects.dialect import Cut

    root = as_path(model)
    one_checkpoint(root)
    folder = open_folder(root)
    ranks = open_ranks(folder)
    params = json_object(folder, PARAMS)
    declared = Declared() if params is None else declared_by_meta(params)

    specs = next((container.specs for container in ranks.values()), {})
    across = {EMBEDDING: Cut(1)} if _shared_along_in(specs) else {}

    def join(cut_of: CutOf) -> Joined:
        return Joined(str(model), ranks, lambda name: across.get(name) or cut_of(name))

    checkpoint = Foreign(
        root, str(model), "meta", declared, join, given_config(folder, config),
        lambda read: divide_files(folder, read.files, ("config.json", PARAMS)),
    )  # fmt: skip
    try:
        return source_of(checkpoint, tokenizer)
    except SourceError as error:
        count = _rank_count(params or {}, specs)
        if count > len(ranks):
            raise SourceError(
                f"{error}\n  the model seems to have {count} ranks, of which {len(ranks)} are there; copy the other "
                "consolidated.*.pth as well"
            ) from error
        raise


def _rank_count(params: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> int:
    """Compute the number of ranks from params.json and the first rank's share of wo's width; 0 if unknown."""
    share = specs[OUT].shape[-1] if OUT in specs and specs[OUT].shape else 0
    heads, dim = params.get("n_heads"), params.get("dim")
    if not (share and isinstance(heads, int) and isinstance(dim, int) and heads > 0):
        return 0
    size = params.get("head_dim", dim // heads)
    return heads * size // share if isinstance(size, int) else 0


def _shared_along_in(specs: Mapping[str, TensorSpec]) -> bool:
    """Whether ranks share the embedding along its width (Llama 1 and 2): it is then narrower than a norm."""
    return EMBEDDING in specs and "norm.weight" in specs and specs[EMBEDDING].shape[1:] != specs["norm.weight"].shape
