"""ModelOpt's exported checkpoint of a tiny model, and ours made from the same calibration, compared file by file."""

from __future__ import annotations

import json
import logging
import re
import tomllib
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

import bridge
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.scheme import Scheme
from tests import once
from tests.models.export_families import build
from tests.oracles.modelopt_oracle import Answer, ask

# What ModelOpt's export does not write: our own records, and what its user would copy.
OURS = ("bridge", "bridge.json", "report.json", "report.html", "README.md")
EXCEPTIONS = Path(__file__).with_name("exceptions.toml")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class TheirsRaises(Exception):
    """ModelOpt's export failed: `said` is its own error."""

    def __init__(self, error: Exception) -> None:
        super().__init__(f"theirs raises {type(error).__name__}: {error}")


def ask_modelopt(call: Callable[[], object]) -> None:
    """Run ModelOpt's export; what it raises itself becomes `TheirsRaises`, a wrong call of ours stays what it is."""
    try:
        with _quiet():
            call()
    except Exception as error:  # it fails in many ways; the list of exceptions says where
        if not any("modelopt" in Path(frame.filename).parts for frame in traceback.extract_tb(error.__traceback__)):
            raise
        raise TheirsRaises(error) from error


def exceptions(target: str) -> dict[str, dict[str, Any]]:
    """The one list of what we do not copy from ModelOpt, by name."""
    return dict(tomllib.loads(EXCEPTIONS.read_text())[target])


def scheme_of(name: str, kv: str | None) -> Scheme:
    """A scheme of ours; `int8_plain` is ModelOpt's INT8_DEFAULT: no smoothing."""
    if name != "int8_plain":
        return load_scheme(name, kv)
    return replace(load_scheme("int8", kv), name="int8_plain", algorithm="max", options=())


def save(model: Any, directory: Path, shard_size: str = "5GB") -> Path:
    """A checkpoint as transformers writes one that it has loaded, which is what a user starts from."""
    with _quiet(), TemporaryDirectory() as first:
        model.save_pretrained(first)
        load(Path(first)).save_pretrained(directory, max_shard_size=shard_size)
    return directory


def source(family: str, dtype: str) -> Path:
    """The checkpoint of a family of `tests.models.export_families`, written once a run; nothing may change it."""
    return once.directory(f"source-{family}-{dtype}", lambda part: save(build(family, DTYPES[dtype]), part))


def load(directory: Path) -> Any:
    """The model of a checkpoint, in the dtype that it is stored in."""
    config = json.loads((directory / "config.json").read_text())
    with _quiet():
        return getattr(transformers, config["architectures"][0]).from_pretrained(directory, dtype="auto").eval()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the prints, bars and warnings of ModelOpt and transformers off the terminal."""
    transformers.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        transformers.logging.enable_progress_bar()


def calibrated(
    directory: Path,
    scheme: str,
    kv: str | None,
    batches: list[Any],
    changes: Mapping[str, Mapping[str, Any]] | None = None,
) -> Answer:
    """ModelOpt's quantized model of a checkpoint, and the statistics of that run; `changes` as in `ask`."""

    def loop(quantized: Any) -> None:
        for batch in batches:
            quantized(batch)

    with _quiet(), torch.no_grad():
        return ask(load(directory), scheme, loop, kv, changes)


def export(answer: Answer, out: Path, dtype: torch.dtype | None, shard_size: str = "10GB") -> Path:
    """ModelOpt's own export; the answer's model is used up."""
    from modelopt.torch.export import export_hf_checkpoint

    ask_modelopt(lambda: export_hf_checkpoint(answer.model, dtype, export_dir=out, max_shard_size=shard_size))
    return out


def convert(
    directory: Path, scheme: str, kv: str | None, answer: Answer, out: Path, dtype: str | None, shard_size: str = "10GB"
) -> Path:
    """Ours, from the checkpoint on disk and the same calibration, with a scale a matrix as ModelOpt has it."""
    quant = scheme_of(scheme, kv)
    options = {"dtype": dtype, "shard_size": shard_size, "own_scales": True}
    bridge.convert(directory, "hf", quant, out, calib=answer.calibration, verify=False, **options)
    return out


def unexplained(lines: Iterable[str], entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """The differences that no exception allows, and the exceptions that allow none of them."""
    lines, entries = list(lines), list(entries)
    stale = [entry for entry in entries if not any(part in line for line in lines for part in entry["only"])]
    parts = [part for entry in entries for part in entry["only"]]
    wrong = [line for line in lines if not any(part in line for part in parts)]
    return wrong + [f"equal, though {entry['reason']}" for entry in stale]


WRITTEN_BY = re.compile(rb',\n    "written_by": "qbridge [^"]+"')


def content(file: Path) -> bytes:
    """The bytes of a file, without the entry by which hf_quant_config.json says who wrote it: ModelOpt has none."""
    return WRITTEN_BY.sub(b"", file.read_bytes())


def recast(directory: Path, before: torch.dtype, after: torch.dtype) -> None:
    """Round what ModelOpt leaves in the model's dtype, tensors and config, as `dtype` of target hf does."""
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as stored:
            names, metadata = list(stored.keys()), stored.metadata()
            tensors = {name: stored.get_tensor(name) for name in names}
        kept = ("weight_scale", "weight_scale_2", "weight_scale_inv", "input_scale", "k_scale", "v_scale")
        rounded = {
            name: tensor.to(after) if tensor.dtype == before and not name.endswith(kept) else tensor
            for name, tensor in tensors.items()
        }
        save_file(rounded, file, metadata)
    path, (old, new) = directory / "config.json", (str(one).removeprefix("torch.") for one in (before, after))
    path.write_text(path.read_text().replace(f'"dtype": "{old}"', f'"dtype": "{new}"'))


def differences(ours: Path, theirs: Path, renamed: Iterable[tuple[str, str]] = ()) -> list[str]:
    """Everything in which two checkpoints differ: files, bytes, and of tensors the names, dtypes, shapes and values.

    renamed: patterns of names that ModelOpt has wrong, and what they are; its tensors and JSON are read with these.
    """

    def right(text: str) -> str:
        for pattern, name in renamed:
            text = re.sub(pattern, name, text)
        return text

    mine = {path.name for path in ours.iterdir()} - set(OURS)
    other = {path.name for path in theirs.iterdir()}
    found = [f"{name}: only {'ours' if name in mine else 'theirs'}" for name in sorted(mine ^ other)]
    for name in sorted(mine & other):
        if content(ours / name) == content(theirs / name):
            continue
        if name.endswith(".safetensors"):
            found += [f"{name}: {what}" for what in _tensors(ours / name, theirs / name, right)] or [f"{name}: layout"]
        else:
            said = content(ours / name).decode(), right(content(theirs / name).decode())
            lines = _json(*map(json.loads, said)) or ["spelling"]
            found += [f"{name}: {what}" for what in lines if said[0] != said[1]]
    return found


def _tensors(ours: Path, theirs: Path, right: Callable[[str], str]) -> list[str]:
    found = []
    with safe_open(ours, "pt") as mine, safe_open(theirs, "pt") as other:
        a, b = set(mine.keys()), dict(zip(map(right, other.keys()), other.keys(), strict=True))
        found += [f"{name} only {'ours' if name in a else 'theirs'}" for name in sorted(a ^ b.keys())]
        for name in sorted(a & b.keys()):
            x, y = mine.get_tensor(name), other.get_tensor(b[name])
            if (x.dtype, x.shape) != (y.dtype, y.shape):
                found.append(f"{name} {x.dtype} {tuple(x.shape)}, theirs {y.dtype} {tuple(y.shape)}")
            elif x.contiguous().view(torch.uint8).ne(y.contiguous().view(torch.uint8)).any() if x.dim() else x != y:
                unequal = int((x.float() != y.float()).sum())
                found.append(f"{name} {unequal} of {x.numel()} values differ")
    return found


def _json(mine: Any, other: Any, at: str = "") -> list[str]:
    """In what two values differ, by the keys that lead there; of lists the members."""
    if mine == other:
        return []
    if isinstance(mine, dict) and isinstance(other, dict):
        keys = [key for key in sorted({*mine, *other}) if mine.get(key) != other.get(key)]
        return [line for key in keys for line in _json(mine.get(key), other.get(key), f"{at}.{key}" if at else key)]
    if isinstance(mine, list) and isinstance(other, list):
        only = [(item, "ours") for item in mine if item not in other]
        only += [(item, "theirs") for item in other if item not in mine]
        return [f"{at}: {item!r} only {whose}" for item, whose in only] or [f"{at}: another order"]
    return [f"{at}: {mine!r}, theirs {other!r}"]
