"""Builds `transformers` models and tokenizers for calibration and verification; never runs code from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.dtypes import DTYPES
from bridge.errors import SourceError, UsageError, nearest
from bridge.remote.place import check_names
from bridge.scratch import scratch
from bridge.sources.shards import named

if TYPE_CHECKING:
    from bridge.sources.hf import HfSource


def model_class(config: Mapping[str, Any]) -> Any:
    """Return the class of transformers that `architectures` names first; SourceError where there is none."""
    import transformers

    name = config["architectures"][0]
    found = getattr(transformers, name, None)
    if found is None:
        known = [n for n in dir(transformers) if "For" in n or n.endswith("Model")]
        code = "; it comes with its own code (auto_map), which is not run" if config.get("auto_map") else ""
        close = nearest(name, known).rpartition("; ")[2] if nearest(name, known).count("; ") else "none is near"
        raise SourceError(f"architecture {name} is not in transformers {transformers.__version__}{code}; {close}")
    return found


def model_config(config: Mapping[str, Any]) -> Any:
    """Return the config object of a config.json's content."""
    cls = model_class(config).config_class
    if cls is None:
        raise SourceError(f"architecture {config['architectures'][0]} has no config class: give a model class")
    # An infinity is no JSON: config.json has {"__float__": "Infinity"} in its place.
    return cls.from_dict(cls._decode_special_floats(dict(config)))


def load_model(source: HfSource) -> Any:
    """Build the model from our own reads: the same bytes that are converted, and no pickle outside our unpickler."""
    import torch
    import transformers

    cls, config = model_class(source.config), model_config(source.config)
    state = {name: as_tensor(source.read(name), spec.dtype) for name, spec in source.specs.items()}
    try:
        with _quiet(transformers.logging):
            model, info = cls.from_pretrained(
                None, config=config, state_dict=state, dtype=_main_dtype(source, torch), output_loading_info=True
            )
    except Exception as error:
        raise SourceError(f"{source.where}: transformers cannot build {cls.__name__}: {_first(error)}") from error
    if info["missing_keys"]:
        raise SourceError(
            f"{source.where}: {cls.__name__} needs {named(info['missing_keys'])}, which the checkpoint lacks; "
            "it would be left random: is `architectures` in config.json right?"
        )
    return model.eval()


def as_tensor(bits: Any, dtype: str) -> Any:
    """Return a torch tensor over the same bytes as a storage array."""
    import torch

    want = getattr(torch, dtype)
    tensor = torch.from_numpy(bits)
    return tensor if tensor.dtype == want else tensor.view(want)


def _main_dtype(source: HfSource, torch: Any) -> Any:
    """Return the floating dtype that most of the weights have, as `dtype="auto"` would find it."""
    sizes: dict[str, int] = {}
    for spec in source.specs.values():
        if DTYPES[spec.dtype].floating:
            sizes[spec.dtype] = sizes.get(spec.dtype, 0) + spec.size
    return getattr(torch, max(sizes, key=lambda name: sizes[name])) if sizes else torch.float32


def load_tokenizer(given: Any, root: Path | None, where: str) -> Any:
    """Return `given`, loaded first if it is a path or hub id, else the tokenizer beside the weights."""
    if given is not None and not isinstance(given, str | Path):
        return given
    place = given if given is not None else root
    if place is None:
        raise UsageError(f"{where}: a model in memory brings no tokenizer; give tokenizer=")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(place), trust_remote_code=False)
    except Exception as error:
        raise SourceError(
            f"{where}: no tokenizer could be loaded from {place}: {_first(error)}; give tokenizer="
        ) from error


def gathered_tokenizer(files: Mapping[str, Path | bytes], where: str) -> Any:
    """Return the tokenizer that these files make up, which lie apart in the source, or in an archive."""
    if "config.json" in files and len(files) == 1:
        raise SourceError(f"{where}: no tokenizer lies in the checkpoint; give tokenizer=")
    check_names(files, where)
    with scratch() as folder:
        for name, content in files.items():
            data = content if isinstance(content, bytes) else content.read_bytes()
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        try:
            return load_tokenizer(None, folder, where)
        except SourceError as error:  # where it was gathered is nothing that the user knows
            raise SourceError(str(error).replace(str(folder), where)) from error


def _first(error: Exception) -> str:
    """Return the first line of an error's text: transformers' messages run to pages."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Keep transformers' warnings and bars off the terminal: what matters of them becomes an error here."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
