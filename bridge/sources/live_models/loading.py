"""Build `transformers` models and tokenizers; never run code from a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.core.errors import SourceError, UsageError, first_line
from bridge.core.output.temporary import temporary_directory
from bridge.core.remote.store import check_names
from bridge.core.text import named, nearest
from bridge.core.values import main_dtype
from bridge.sources.configs.diffusion import is_diffusion

if TYPE_CHECKING:
    from bridge.sources.source import Source


def model_class(config: Mapping[str, Any]) -> Any:
    """Return the class of transformers that `architectures` names first; SourceError without one."""
    import transformers

    name = config["architectures"][0]
    cls = getattr(transformers, name, None)
    if cls is None:
        known = [n for n in dir(transformers) if "For" in n or n.endswith("Model")]
        code = "; it comes with its own code (auto_map), which is not run" if config.get("auto_map") else ""
        _, found, close = nearest(name, known).partition("; ")
        raise SourceError(
            f"architecture {name} is not in transformers {transformers.__version__}{code}; "
            f"{close if found else 'none is near'}"
        )
    return cls


def model_config(config: Mapping[str, Any]) -> Any:
    """Build the config object from the content of a config.json."""
    cls = model_class(config).config_class
    if cls is None:
        raise SourceError(f"architecture {config['architectures'][0]} has no config class: give a model class")
    # JSON has no infinity: config.json has {"__float__": "Infinity"} instead.
    return cls.from_dict(cls._decode_special_floats(dict(config)))


def load_model(source: Source) -> Any:
    """Build the model from our own reads: the bytes that are converted, and no pickle outside our unpickler."""
    if is_diffusion(source.config):
        from bridge.sources.live_models import diffusion

        return diffusion.load_model(source)
    import torch
    import transformers

    cls, config = model_class(source.config), model_config(source.config)
    state = {name: as_tensor(source.read(name), spec.dtype) for name, spec in source.specs.items()}
    dtype = getattr(torch, main_dtype(source.specs.values()))  # the same as `dtype="auto"`
    try:
        with _quiet(transformers.logging):
            model, info = cls.from_pretrained(
                None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
            )
    except Exception as error:
        raise SourceError(f"{source.where}: transformers cannot build {cls.__name__}: {first_line(error)}") from error
    missing = set(info["missing_keys"])
    missing -= _filled(model, state) if missing else set()
    if missing:
        raise SourceError(
            f"{source.where}: {cls.__name__} needs {named(missing)}, which the checkpoint lacks; "
            "it would be left random: is `architectures` in config.json right?"
        )
    return model.eval()


def _filled(model: Any, state: Mapping[str, Any]) -> set[str]:
    """Fill stacks of experts from a state with modules of each, and return their names; transformers leaves them."""
    import torch

    from bridge.sources.live_models.checkpoint_names import live_names

    counts = Counter[str]()
    with torch.no_grad():
        for name, origin in live_names(model, state.keys()).items():
            if origin.ref and origin.ref.expert is not None:
                origin.ref.of(model.get_parameter(origin.ref.live)).copy_(state[name])
                counts[origin.ref.live] += state[name].numel()
    return {live for live, count in counts.items() if count == model.get_parameter(live).numel()}


def as_tensor(bits: Any, dtype: str) -> Any:
    """Return a torch tensor over the same bytes as a storage array."""
    import torch

    want = getattr(torch, dtype)
    tensor = torch.from_numpy(bits)
    return tensor if tensor.dtype == want else tensor.view(want)


def load_tokenizer(given: Any, root: Path | None, where: str) -> Any:
    """Return `given`, loaded first if it is a path or hub id, else the tokenizer in `root`."""
    if given is not None and not isinstance(given, str | Path):
        return given
    place = given if given is not None else root
    if place is None:
        raise UsageError(f"{where}: a model in memory has no tokenizer; give tokenizer=")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(place), trust_remote_code=False)
    except Exception as error:
        raise SourceError(
            f"{where}: no tokenizer could be loaded from {place}: {first_line(error)}; give tokenizer= (--tokenizer)"
        ) from error


def gathered_tokenizer(files: Mapping[str, Path | bytes], where: str) -> Any:
    """Return the tokenizer of files that are in several folders of the source or in an archive."""
    if "config.json" in files and len(files) == 1:
        raise SourceError(f"{where}: the checkpoint has no tokenizer; give tokenizer= (--tokenizer)")
    check_names(files, where)
    with temporary_directory() as folder:
        for name, content in files.items():
            data = content if isinstance(content, bytes) else content.read_bytes()
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
        try:
            return load_tokenizer(None, folder, where)
        except SourceError as error:  # the user does not know the temporary directory
            raise SourceError(str(error).replace(str(folder), where)) from error


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Keep transformers' warnings and progress bars off the terminal: those that matter become errors here."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
