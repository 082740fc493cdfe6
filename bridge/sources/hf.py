"""Hugging Face checkpoints on disk or on the hub; never imports a framework to read config, headers or tensors."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bridge.errors import SourceError, UsageError
from bridge.json_data import load_json
from bridge.remote.place import as_path, remote
from bridge.sources import hub, loading
from bridge.sources.beside import Beside
from bridge.sources.quantized import MODELOPT_FILE, Quantized, dequantized
from bridge.sources.refuse import other_dialect, quantized
from bridge.sources.shards import Weights, find_weights, listed
from bridge.sources.spelling import dialect_files, respelled
from bridge.values import Program, TensorSpec

WRITTEN_BY = (
    Program(
        "transformers (`save_pretrained`), and checkpoints as the hub has them",
        "5.20 and later; safetensors, and `.bin` of torch 1.6 and later",
        "tensors equal those of the safetensors library and of transformers' own loading",
        ("tests/sources/test_hf.py", "tests/sources/test_torch_zip.py", "tests/sources/test_live.py"),
    ),
    Program(
        "ModelOpt (unified checkpoints)",
        "0.47",
        "dequantized as ModelOpt dequantizes, and answering as the model that was exported",
        ("tests/sources/test_quantized.py", "tests/targets/test_carried.py"),
    ),
    Program(
        "llm-compressor (compressed-tensors)",
        "compressed-tensors 0.20",
        "dequantized as transformers decompresses",
        ("tests/sources/test_quantized.py",),
    ),
    Program(
        "DeepSeek's FP8 blocks, gpt-oss' MXFP4",
        "as published",
        "dequantized as transformers dequantizes, on tiny models of these formats; the published ones were not tried",
        ("tests/sources/test_quantized.py", "tests/sources/test_mxfp4.py"),
    ),
)

if TYPE_CHECKING:
    from bridge.quant.calibration import Calibration
    from bridge.sources.native import Container
    from bridge.sources.quantizers import Statistics

# A file that ends like this holds weights, or a training state; everything else beside the weights is carried along.
WEIGHT_ENDINGS = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".onnx_data", ".onnx.data", ".gguf",
    ".ot", ".npz", ".npy", ".pkl", ".tflite", ".mlmodel", ".mlpackage", ".nemo", ".distcp", ".index.json", ".engine",
)  # fmt: skip
BOOKKEEPING = (".git", ".gitattributes", ".gitignore", ".cache", ".DS_Store", "__pycache__")


class HfSource:
    """A directory with config.json and weights as `save_pretrained` or the hub lay them out.

    A checkpoint of another dialect is one too, whose tensors show themselves in these names. `beside` then says what is
    carried along, `statistics` reads what ModelOpt's quantizers saw, where they were saved.
    """

    def __init__(
        self,
        root: Path,
        where: str,
        config: dict[str, Any],
        weights: Weights,
        tokenizer: Any = None,
        found: Quantized | None = None,
        beside: Beside | None = None,
        statistics: Statistics | None = None,
    ) -> None:
        self.root = root
        self.where = where
        here = Path(where)
        self.name = (here.resolve().name if here.exists() else where.split("/")[-1]).split("@")[0].removesuffix(".nemo")
        self.config: Mapping[str, Any] = config
        self.specs: Mapping[str, TensorSpec] = weights.specs
        self.dialect = weights.dialect
        self._weights = weights
        self._tokenizer = tokenizer
        self.quantized = found
        self._beside = beside
        self._statistics = statistics
        self.side_files, self.dropped = (
            _beside(root, weights) if beside is None else ({**beside.files}, {**beside.dropped})
        )
        if found and self.side_files.pop(MODELOPT_FILE, None):
            self.dropped[MODELOPT_FILE] = "says how the source is quantized, which the output says for itself"
        if beside is not None or self.config != _config_file(root):
            self.side_files["config.json"] = (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()

    @property
    def can_run(self) -> bool:
        """Whether torch and transformers are installed; looks for them without importing them."""
        return find_spec("torch") is not None and find_spec("transformers") is not None

    def read(self, name: str) -> np.ndarray:
        """Return the storage array of one tensor."""
        return self._weights.holder[name].read(name)

    def read_rows(self, name: str, begin: int, end: int, out: np.ndarray | None = None) -> np.ndarray:
        """Return rows of one tensor, in `out` where it is given."""
        return self._weights.holder[name].read_rows(name, begin, end, out)

    def place(self, name: str) -> tuple[str, int]:
        """File and offset of one tensor."""
        shard = self._weights.holder[name]
        return shard.path.name, shard.offset(name)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of config, headers, layout, and each weight file's size and time of change; reads no weight."""
        digest = hashlib.sha256(json.dumps(self.config, sort_keys=True, default=str).encode())
        for spec in self.specs.values():
            digest.update(repr((spec.name, spec.shape, spec.dtype)).encode())
        for path in self._weights.files:
            stat = path.stat()
            digest.update(repr((path.relative_to(self.root).as_posix(), stat.st_size, stat.st_mtime_ns)).encode())
        digest.update(self._weights.layout.encode())
        return digest.hexdigest()

    @cached_property
    def calibration(self) -> Calibration | None:
        """What the model's quantizers saw where it comes from, if that lies in the checkpoint."""
        return self._statistics.read() if self._statistics else None

    def load_model(self) -> Any:
        """Build the `transformers` model with these weights, in the dtype they are stored in, in eval mode."""
        return loading.load_model(self)

    def load_tokenizer(self) -> Any:
        """Return the given tokenizer, else the one beside the weights."""
        if self._tokenizer is None and (self._beside is not None or remote(self.root)):
            return loading.gathered_tokenizer(self.side_files, self.where)
        return loading.load_tokenizer(self._tokenizer, self.root, self.where)


def recognizes(model: object) -> bool:
    """Take every string and path: this kind is asked last, and says what is wrong with what is no checkpoint."""
    return as_path(model) is not None


def open_model(model: str | Path, config: Any = None, tokenizer: Any = None) -> HfSource:
    """Open a directory or a hub id; everything that headers and config can tell is checked here."""
    root = as_path(model)
    assert root is not None, "recognizes() was asked"
    if not root.exists():
        root = hub.snapshot(model)
    if root.is_file():
        raise SourceError(f"{model}: a file; give the directory that holds it together with config.json")
    if not remote(root) and not os.access(root, os.R_OK | os.X_OK):
        raise SourceError(f"{model}: the directory may not be read by this user")
    where = str(model)
    problems: list[str] = []
    found: dict[str, Any] = {}
    try:
        found = settle_config(_config_file(root), config)
    except SourceError as error:
        problems.append(str(error))
    weights, parts = _weights(root)
    if not weights.files and not weights.problems:
        raise listed(where, _nothing_here(root, problems))
    problems += weights.problems
    known = None
    try:
        known = dequantized(root, found, weights)
    except SourceError as error:
        problems.append(str(error))
    if problems and known is None:
        raise listed(where, problems)
    if known is None:
        problems += quantized(root, found, weights.specs)
    else:
        problems += known.taken.problems or quantized(None, known.config, known.weights.specs)
        found, weights = known.config, known.weights
    if problems:
        raise listed(where, problems)
    if known is None:
        weights = respelled(where, found, weights, parts)
    return HfSource(root, where, found, weights, tokenizer, known)


def holds_weights(root: Path) -> bool:
    """Whether a directory is this kind's, whatever else lies in it: the names of its files tell."""
    return (root / "config.json").is_file() and any(
        any(root.glob(pattern)) for pattern in ("model*.safetensors", "pytorch_model*.bin")
    )


def _weights(root: Path) -> tuple[Weights, Container | None]:
    """Find the weights of a directory, and the container that they are, where a file holds parts of a tensor.

    torch's HuggingFaceStorageWriter leaves such files of several ranks, as torchtitan uses it.
    """
    if not any(root.glob("shard-*.safetensors")) or any(root.glob("model*.safetensors")):
        return find_weights(root) or find_weights(root, dialect_files()) or Weights(), None
    from bridge.sources.archive import open_folder
    from bridge.sources.dcp_safetensors import ShardedSafetensors
    from bridge.sources.foreign import unchanged

    parts = ShardedSafetensors(open_folder(root))
    return unchanged(parts), parts


def _nothing_here(root: Path, problems: list[str]) -> list[str]:
    """Explain a directory without weights; its missing config is no separate problem where it is something else."""
    known = other_dialect(root)
    if known:
        return [known]
    if not any(root.iterdir()):
        return ["an empty directory; give one with config.json and *.safetensors"]
    return [*problems, "no weights: neither *.safetensors nor pytorch_model*.bin"]


def settle_config(found: dict[str, Any] | None, given: Any) -> dict[str, Any]:
    """Return the model's config, changed or replaced by what the caller gave; `architectures` must come out of it."""
    if isinstance(given, str | Path):
        found = {**(found or {}), **read_json(Path(given), f"config={given}")}
    elif isinstance(given, Mapping):
        found = {**(found or {}), **given}
    elif hasattr(given, "to_dict"):
        whole = given.to_dict()
        found = {**whole, "architectures": whole.get("architectures") or (found or {}).get("architectures")}
    elif given is not None:
        raise UsageError(f"config= takes a dict, a config object or a path, not {type(given).__name__}")
    if found is None:
        raise SourceError("config.json is missing; put it beside the weights, or give config=")
    names = found.get("architectures")
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        example = f" (model_type is {found['model_type']!r})" if found.get("model_type") else ""
        raise SourceError(
            f"config.json has no architectures{example}: which model class it is cannot be told; "
            'give config={"architectures": ["LlamaForCausalLM"]} with the class it was saved from'
        )
    return found


def _config_file(root: Path) -> dict[str, Any] | None:
    path = root / "config.json"
    return read_json(path) if path.is_file() else None


def read_json(path: Path, where: str = "") -> dict[str, Any]:
    """Return the JSON object that a file holds; SourceError where it holds none. `where`: what a message calls it."""
    try:
        found = load_json(path)
    except (ValueError, OSError) as error:
        raise SourceError(f"{where or path.name}: cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise SourceError(f"{where or path.name}: must hold a JSON object, not {type(found).__name__}")
    return found


def _beside(root: Path, weights: Weights) -> tuple[dict[str, Path | bytes], dict[str, str]]:
    """Divide everything beside the weights into files to carry and files to drop, each with its reason."""
    carried: dict[str, Path | bytes] = {}
    dropped = dict(weights.ignored)
    used = {path.name for path in weights.files}
    open_ = _entries(root, "")
    while open_:  # no function in here that calls itself: it would keep the model alive until garbage is collected
        name, path = open_.pop()
        if path.name in BOOKKEEPING or name in used or name == _index_of(weights):
            continue
        if path.is_symlink() and not path.is_file():  # followed, a link to a parent would never end
            dropped[name] = "a link to a directory, or to nothing"
        elif path.is_dir():
            if (path / "config.json").is_file() and (any(path.glob("*.safetensors")) or any(path.glob("*.bin"))):
                dropped[name + "/"] = "another model in a subdirectory"
            else:
                open_ += _entries(path, name + "/")
        elif name.endswith(WEIGHT_ENDINGS):
            dropped[name] = "weights or training state that the checkpoint's index does not name"
        else:
            carried[name] = path
    return carried, dropped


def _entries(folder: Path, prefix: str) -> list[tuple[str, Path]]:
    """What lies in a folder, by name, the first one last."""
    return [(prefix + path.name, path) for path in sorted(folder.iterdir(), reverse=True)]


def _index_of(weights: Weights) -> str:
    stem, _, suffix = weights.files[0].name.rpartition(".")
    return f"{stem.split('-')[0]}.{suffix}.index.json"
