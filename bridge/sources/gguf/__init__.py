"""GGUF files, as llama.cpp loads them, as a source.

Tensors get Hugging Face's names; config.json and tokenizer are made of the file's keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bridge.core.remote.path import as_path
from bridge.core.values import Program, main_dtype
from bridge.sources.checkpoint import HfSource
from bridge.sources.gguf.files import ENDING
from bridge.sources.hf import foreign_directory

WRITTEN_BY = (
    Program(
        "llama.cpp (GGUF files, and those that target gguf writes)",
        "GGUF 2 and 3",
        "values are those of gguf-py to the bit, log probabilities those of llama.cpp, tokens those of its tokenizer",
        ("tests/sources/gguf/test_opening.py", "tests/sources/gguf/test_smollm2.py", "tests/quant/test_ggml_values.py"),
    ),
)


def recognizes(model: object) -> bool:
    """Take a file whose name ends in `.gguf`, and a directory of such files without Hugging Face weights."""
    path = as_path(model)
    if path is not None and path.name.endswith(ENDING):
        return path.is_file()
    root = foreign_directory(model)
    return root is not None and any(root.glob(f"*{ENDING}"))


def open_model(model: str | Path, config: Any = None, tokenizer: Any = None) -> HfSource:
    """Open the file, all parts of a split one, or the one model of a directory."""
    from bridge.core.formats.gguf import COMPUTED
    from bridge.sources.config_json import changed_config
    from bridge.sources.configs.facts import Given
    from bridge.sources.dialects.opening import Foreign, source_of
    from bridge.sources.gguf.config import architecture_of, declared_by_gguf, drafts_of, switched, windows_without_use
    from bridge.sources.gguf.container import GgufTensors
    from bridge.sources.gguf.files import open_files
    from bridge.sources.gguf.tokenizer import tokenizer_files
    from bridge.sources.side_files import SideFiles
    from bridge.sources.weights.unsupported import one_checkpoint

    path, where = as_path(model), str(model)
    if path.is_dir():
        one_checkpoint(path)
    files = open_files(path)
    metadata, container = files[0].metadata, GgufTensors(files)
    given = {} if config is None else changed_config({"architectures": [""]}, config)
    named = (given.get("architectures") or [""])[0]
    architecture = architecture_of(where, metadata, container.specs, named or None)
    factors = next((file.read(name) for file in files for name in COMPUTED if name in file.specs), None)
    declared = declared_by_gguf(metadata, container.specs, architecture, factors)
    drafts = drafts_of(metadata, container.specs, declared)
    own: dict[str, Any] = {"architectures": [architecture], "dtype": main_dtype(container.specs.values())}
    own |= switched(metadata, architecture)
    own |= {"num_nextn_predict_layers": len({*drafts.values()})} if drafts else {}
    entries = Given({**own, **given, "architectures": [architecture]}, own.keys() - given.keys())
    made = SideFiles(tokenizer_files(where, metadata) if tokenizer is None else {})
    notes = windows_without_use(metadata, architecture)
    checkpoint = Foreign(
        path, where, "gguf", declared, lambda _: container, entries, lambda _: made, notes=notes, drafts=drafts
    )
    return source_of(checkpoint, tokenizer)
