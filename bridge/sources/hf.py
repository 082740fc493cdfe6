"""Hugging Face checkpoints, local or on the hub, read without a framework."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from bridge.core.errors import SourceError, collected
from bridge.core.output.names import STEM
from bridge.core.remote.path import as_path, remote
from bridge.core.text import listed
from bridge.core.values import Program
from bridge.sources import hub
from bridge.sources.adapted.opening import is_adapter
from bridge.sources.checkpoint import HfSource
from bridge.sources.config_json import config_file, settle_config
from bridge.sources.configs.diffusion import denoiser_of, is_diffusion, with_architecture
from bridge.sources.dialects.hf_names import dialect_files, respelled
from bridge.sources.quantized.fields import MODELOPT_FILE, sections
from bridge.sources.source import Source
from bridge.sources.weights.containers import Container
from bridge.sources.weights.shards import Weights, find_weights
from bridge.sources.weights.unsupported import diffusion_weights, other_dialect, quantized

WRITTEN_BY = (
    Program(
        "transformers (`save_pretrained`), and checkpoints as the hub has them",
        "5.20 and later; safetensors, and `.bin` of torch 1.6 and later",
        "tensors equal those of the safetensors library and of transformers' own loading",
        (
            "tests/sources/test_hf.py",
            "tests/core/test_torch_file.py",
            "tests/sources/live_models/test_checkpoint_names.py",
        ),
    ),
    Program(
        "ModelOpt (unified checkpoints)",
        "0.47",
        "dequantized as ModelOpt dequantizes, and answering as the model that was exported",
        ("tests/sources/quantized/test_checkpoint.py", "tests/targets/hf/test_passthrough.py"),
    ),
    Program(
        "llm-compressor (compressed-tensors)",
        "compressed-tensors 0.20",
        "dequantized as transformers decompresses",
        ("tests/sources/quantized/test_checkpoint.py",),
    ),
    Program(
        "peft (LoRA, rsLoRA and DoRA adapters)",
        "0.21",
        "merged tensors equal those of `merge_and_unload` and `save_pretrained` to the bit, from a directory or memory",
        ("tests/sources/adapted/test_merged.py",),
    ),
    Program(
        "diffusers (`save_pretrained` of models and pipelines)",
        "0.42",
        "tiny models of six classes give the files of ModelOpt's export, and pipelines load again",
        ("tests/sources/test_diffusion.py", "tests/targets/hf/test_diffusion.py"),
    ),
    Program(
        "DeepSeek's FP8 blocks, gpt-oss' MXFP4",
        "as published",
        "dequantized as transformers dequantizes, on tiny models of these formats; the published ones were not tried",
        ("tests/sources/quantized/test_checkpoint.py", "tests/sources/quantized/test_gpt_oss.py"),
    ),
)


def recognizes(model: object) -> bool:
    """Take every string and path: this kind comes last, and says why something is not a checkpoint."""
    return as_path(model) is not None


def open_model(model: str | Path, config: Any = None, tokenizer: Any = None) -> Source:
    """Open a directory or a hub id; checks everything that headers and config can tell."""
    root = as_path(model)
    if not root.exists():
        root = hub.snapshot(model)
        if is_adapter(root):
            from bridge.sources.opening import open_adapted  # which imports this module by its name

            return open_adapted(model, config, tokenizer, root=root)
    if root.is_file():
        raise SourceError(f"{model}: a file; give the directory that holds it and config.json")
    if not remote(root) and not os.access(root, os.R_OK | os.X_OK):
        raise SourceError(f"{model}: this user may not read the directory; check its permissions")
    where = str(model)
    top, folder = root, denoiser_of(root)
    root = top / folder if folder else top
    problems: list[str] = []
    settled: dict[str, Any] = {}
    with collected(problems, where):
        stated = config_file(root)
        settled = settle_config(with_architecture(stated) if stated and is_diffusion(stated) else stated, config)
    weights, parts = _weights(root, STEM if is_diffusion(settled) else "")
    if not weights.files and not weights.problems:
        raise listed(where, _nothing_here(root, problems, is_diffusion(settled)))
    problems += weights.problems
    stored = None
    if any(sections(settled)) or (root / MODELOPT_FILE).is_file():
        from bridge.sources.quantized.checkpoint import dequantized  # loads a reader for each writer

        with collected(problems, where):
            stored = dequantized(root, settled, weights)
    if problems and stored is None:
        raise listed(where, problems)
    if stored is None:
        problems += quantized(root, settled, weights.specs)
    else:
        problems += stored.tensors.problems or quantized(None, stored.config, stored.weights.specs)
        settled, weights = stored.config, stored.weights
    if problems:
        raise listed(where, problems)
    if stored is None and not is_diffusion(settled):
        weights = respelled(where, settled, weights, parts)
    return HfSource(top, where, settled, weights, tokenizer, stored, folder=folder)


def foreign_directory(model: object) -> Path | None:
    """Return a directory whose file names are not those of a Hugging Face checkpoint; None for anything else."""
    root = as_path(model)
    if root is None or not root.is_dir():
        return None
    patterns = ("model*.safetensors", "pytorch_model*.bin")
    return None if (root / "config.json").is_file() and any(any(root.glob(name)) for name in patterns) else root


def numbered_directories(root: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    """Return the directories whose names match, by the number that is the pattern's first group."""
    matches = {path: pattern.fullmatch(path.name) for path in root.iterdir() if path.is_dir()}
    return {int(match[1]): path for path, match in sorted(matches.items()) if match}


def _weights(root: Path, stem: str = "") -> tuple[Weights, Container | None]:
    """Find the weights of a directory, and the container if torch's HuggingFaceStorageWriter saved parts of tensors."""
    if stem:
        return find_weights(root, stem=stem) or Weights(), None
    if not any(root.glob("shard-*.safetensors")) or any(root.glob("model*.safetensors")):
        return find_weights(root) or find_weights(root, dialect_files()) or Weights(), None
    from bridge.core.files.archive import open_folder
    from bridge.sources.dialects.tensors import unchanged
    from bridge.sources.weights.dcp_safetensors import ShardedSafetensors

    parts = ShardedSafetensors(open_folder(root))
    return unchanged(parts), parts


def _nothing_here(root: Path, problems: list[str], diffusion: bool = False) -> list[str]:
    """Explain a directory without weights; a missing config is not a separate problem in a known other format."""
    if known := diffusion_weights(root) if diffusion else other_dialect(root):
        return [known]
    if not any(root.iterdir()):
        return ["an empty directory; give one with config.json and *.safetensors"]
    return [*problems, "no weights: neither *.safetensors nor pytorch_model*.bin"]
