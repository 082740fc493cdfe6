"""Calibration data: anything a user may have becomes batches of token ids, and others held out; never runs a model.

Rows are cut from the text at even distances, each between the special tokens that the tokenizer puts around a text, so
that a row looks like what the model is served. Every n-th row is held out: calibration never sees it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import CellType
from typing import TYPE_CHECKING, Any

from bridge.errors import BridgeError, CalibrationError, UsageError
from bridge.json_data import parse_json
from bridge.paths import check_length

if TYPE_CHECKING:
    from bridge.sources import Source

# On a 22 M encoder three times as many changed embeddings by less than 0.001: FP8 0.9979 twice, INT8 (alpha 0.7)
# 0.9953 to 0.9947.
SAMPLES = 32
SEQUENCE = 128  # a wrong RoPE permute shows after some twenty positions, so held-out rows must be longer
HELD_OUT = 8  # one row is held out for every so many that calibrate
BATCH = 8
_READ = 4 << 20  # characters of a text file: rows are spread over these, a corpus need not be read whole
_DEFAULT = Path(__file__).parent / "default_text.txt"


@dataclass(frozen=True)
class Data:
    """Batches to calibrate with and batches held out, as {name: torch tensor}; `digest` covers the former.

    `missing` says why there are none although none were asked for; a scheme that needs no statistics can do without.
    `forward_loop` is the user's own: it runs the model, and `batches` is empty.
    """

    batches: tuple[dict[str, Any], ...]
    held_out: tuple[dict[str, Any], ...]
    digest: str
    samples: int
    sequence: int
    missing: str = ""
    forward_loop: Callable[[Any], Any] | None = None


def prepare(data: Any, source: Source, *, samples: int | None = None, sequence: int | None = None) -> Data:
    """Make `Data` of None (the embedded text), a text or JSONL file, a `datasets` id, batches, a DataLoader, texts, or
    a `forward_loop(model)`.

    >>> prepare("corpus.txt", open_source("examples/models/tiny-llama")).samples  # doctest: +SKIP
    32
    """
    for name, value in (("samples", samples), ("sequence", sequence)):
        if value is not None and (type(value) is not int or value < 1):
            raise UsageError(f"{name}={value!r}; expected a positive whole number")
    if data is None:
        return _default(source, samples, sequence)
    if isinstance(data, str | Path):
        texts = documents(data, source.load_tokenizer, samples or SAMPLES)
        return _rows(texts, source, str(data), samples, sequence)
    if callable(data) and not isinstance(data, Mapping) and not hasattr(data, "__iter__"):
        try:
            held_out = _default(source, samples, sequence).held_out
        except CalibrationError:  # a text that this model cannot read is nothing that the user gave
            held_out = ()
        return Data((), held_out, _code_digest(data), 0, 0, forward_loop=data)
    items = [data] if isinstance(data, Mapping) or hasattr(data, "dtype") else data
    if not isinstance(items, Iterable):
        raise CalibrationError(
            f"cannot calibrate with {type(data).__name__}; give a text or JSONL file, a dataset id, texts, batches, a "
            "DataLoader, or a forward_loop(model)"
        )
    return _given(items, source, samples, sequence)


def _default(source: Source, samples: int | None, sequence: int | None) -> Data:
    if _vocabulary(source.config) is None:
        why = "this model reads no text, so the embedded default text cannot calibrate it"
        hint = 'give batches of real inputs, for images [{"pixel_values": tensor}, ...]'
        return Data((), (), "", 0, 0, missing=f"{why}; {hint}")
    try:
        source.load_tokenizer()
    except BridgeError as error:
        return Data((), (), "", 0, 0, missing=f"{error}; or give batches of token ids as calibration data")
    return _rows(documents(None, source.load_tokenizer, 1), source, "the embedded text", samples, sequence)


def documents(data: str | Path | None, load_tokenizer: Callable[[], Any], samples: int) -> list[str]:
    """Return the texts of a file, of a dataset id or (None) the embedded one.

    A text file is one document, of a dataset enough are read for `samples` rows; the tokenizer spells chats.
    """
    if data is None:
        return [_DEFAULT.read_text(encoding="utf-8")]
    check_length(data)
    path = Path(data)
    if path.is_dir():
        raise CalibrationError(f"{path}: a directory; give a text or JSONL file")
    if not path.is_file():
        if isinstance(data, Path) or path.suffix in (".txt", ".jsonl", ".json", ".md", ".csv") or path.is_absolute():
            raise CalibrationError(f"{path}: no such calibration file")
        return _dataset(str(data), load_tokenizer, samples)
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_READ)
    except UnicodeDecodeError as cause:
        raise CalibrationError(f"{path}: not UTF-8 text at byte {cause.start}") from cause
    except OSError as cause:
        raise CalibrationError(f"{path}: cannot be read: {cause.strerror}") from cause
    if path.suffix != ".jsonl":
        return [text]
    # the last line may be cut by the read limit
    lines = text.splitlines() if len(text) < _READ else text.splitlines()[:-1]
    return [_record(line, f"{path}:{n}", load_tokenizer) for n, line in enumerate(lines, 1) if line.strip()]


def _record(line: str, where: str, load_tokenizer: Callable[[], Any]) -> str:
    try:
        record = parse_json(line)
    except ValueError as cause:
        raise CalibrationError(f"{where}: not JSON: {cause}") from cause
    return _text(record, where, load_tokenizer)


def _text(record: Any, where: str, load_tokenizer: Callable[[], Any]) -> str:
    text = record.get("text") if isinstance(record, Mapping) else None
    if isinstance(text, str):
        return text
    messages = record.get("messages") if isinstance(record, Mapping) else None
    if not isinstance(messages, list):
        found = sorted(record) if isinstance(record, Mapping) else type(record).__name__
        raise CalibrationError(f'{where}: expected a field "text" (string) or "messages" (chat), found {found}')
    try:
        return str(load_tokenizer().apply_chat_template(messages, tokenize=False))
    except BridgeError:
        raise
    except Exception as cause:  # templates raise errors of their own
        raise CalibrationError(f"{where}: the tokenizer's chat template refused the messages: {cause}") from cause


def _dataset(name: str, load_tokenizer: Callable[[], Any], samples: int) -> list[str]:
    try:
        from datasets import load_dataset
    except ImportError as cause:
        raise CalibrationError(
            f"{name}: no such file, and reading it as a dataset id needs `pip install 'qbridge[calibrate]'`"
        ) from cause
    repo, _, config = name.partition(":")
    try:
        rows = load_dataset(repo, config or None, split=f"train[:{samples * 64}]")
    except Exception as cause:  # hub, cache and parsing errors have no common base
        lines = str(cause).strip().splitlines() or [type(cause).__name__]
        raise CalibrationError(
            f"{name}: neither a file nor a dataset that can be loaded here: {lines[0][:300]}; without network give a "
            'text file, or fetch the dataset into the cache first ("org/name" or "org/name:configuration")'
        ) from cause
    return [_text(row, f"{name}[{n}]", load_tokenizer) for n, row in enumerate(rows)]


def _rows(documents: Sequence[str], source: Source, where: str, samples: int | None, sequence: int | None) -> Data:
    """Cut token rows from the documents, joined, at even distances."""
    import torch

    if not any(document.strip() for document in documents):
        raise CalibrationError(f"{where}: the calibration text is empty")
    tokenizer = source.load_tokenizer()
    before, after = _specials(tokenizer)
    ids = tokenizer("\n\n".join(documents), add_special_tokens=False, verbose=False)["input_ids"]
    length = sequence or min(SEQUENCE, positions(source.config) or SEQUENCE)
    content = length - len(before) - len(after)
    if content < 1:
        raise CalibrationError(f"sequence={length} leaves no room beside {len(before) + len(after)} special tokens")
    held = -(-(samples or SAMPLES) // HELD_OUT)
    wanted, have = (samples or SAMPLES) + held, len(ids) // content
    if not ids:
        raise CalibrationError(
            f"{where}: the tokenizer of {source.where} makes no tokens of it; does the model's directory hold the "
            "tokenizer's files? Give tokenizer=, or batches of token ids as calibration data"
        )
    if have < 2:
        raise CalibrationError(
            f"{where}: {len(ids)} tokens are shorter than a batch: one row of {length} to calibrate and one to "
            f"hold out take {2 * content}; give more text, or a smaller sequence="
        )
    count = min(wanted, have)
    starts = [at * have // count * content for at in range(count)]
    rows = [[*before, *ids[start : start + content], *after] for start in starts]
    every = HELD_OUT + 1 if count > HELD_OUT else count
    kept = [row for at, row in enumerate(rows) if (at + 1) % every]
    out = [row for at, row in enumerate(rows) if not (at + 1) % every]
    if samples and have < wanted:
        raise CalibrationError(
            f"{where}: {have} rows of {length} tokens, samples={samples} and {held} to hold out need {wanted}"
        )

    def batches(some: list[list[int]]) -> tuple[dict[str, Any], ...]:
        made = []
        for part in _batched(some, BATCH):
            tensor = torch.tensor(part, dtype=torch.int64)
            made.append({"input_ids": tensor, "attention_mask": torch.ones_like(tensor)})
        return tuple(made)

    return _checked(batches(kept), batches(out), source, where)


def _batched(rows: list[list[int]], size: int) -> Iterator[list[list[int]]]:
    for at in range(0, len(rows), size):
        yield rows[at : at + size]


def _specials(tokenizer: Any) -> tuple[list[int], list[int]]:
    # what the tokenizer puts before and after a text: BOS, or [CLS] and [SEP]
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = list(tokenizer("a")["input_ids"])
    for at in range(len(full) - len(bare) + 1):
        if full[at : at + len(bare)] == list(bare):
            return full[:at], full[at + len(bare) :]
    return [], []


def _given(items: Iterable[Any], source: Source, samples: int | None, sequence: int | None) -> Data:
    import torch

    taken: list[dict[str, Any]] = []
    texts: list[str] = []
    rows = 0
    for at, item in enumerate(items):
        if isinstance(item, str):
            texts.append(item)
            continue
        batch = _batch(item, f"batch {at} of the calibration data", torch)
        taken.append(batch)
        rows += _size(batch)
        if rows >= (samples or 1024) + 1:  # a generator need not end
            break
    if texts and not taken:
        return _rows(texts, source, "the calibration texts", samples, sequence)
    if texts or not taken:
        what = "mixes texts and batches" if texts else "is empty"
        raise CalibrationError(f"the calibration data {what}; give texts, or batches of tensors")
    if len(taken) > 1:
        held = max(1, len(taken) // (HELD_OUT + 1))
        kept, out = taken[:-held], taken[-held:]
    else:
        size = _size(taken[0])
        if size < 2:
            raise CalibrationError("one sample cannot both calibrate and be held out; give at least two")
        cut = size - max(1, size // (HELD_OUT + 1))
        kept = [{key: value[:cut] for key, value in taken[0].items()}]
        out = [{key: value[cut:] for key, value in taken[0].items()}]
    return _checked(tuple(kept), tuple(out), source, "the calibration data")


def _batch(item: Any, where: str, torch: Any) -> dict[str, Any]:
    """One batch as {name: tensor}; a bare tensor is ids where it holds integers, pixels otherwise."""
    if isinstance(item, tuple) and item and not isinstance(item[0], int):
        item = item[0]  # (inputs, labels) of a DataLoader
    if isinstance(item, Mapping):
        found = {str(k): v for k, v in item.items() if v is not None and k not in ("labels", "label")}
        if not found:
            raise CalibrationError(f"{where}: holds nothing but labels")
        return {key: _tensor(value, f"{where}, {key}", torch) for key, value in found.items()}
    tensor = _tensor(item, where, torch)
    if tensor.is_floating_point():
        return {"pixel_values": tensor if tensor.ndim == 4 else tensor[None]}
    tensor = tensor if tensor.ndim == 2 else tensor[None]
    return {"input_ids": tensor, "attention_mask": torch.ones_like(tensor)}


def _tensor(value: Any, where: str, torch: Any) -> Any:
    try:
        return value.detach().cpu() if isinstance(value, torch.Tensor) else torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as cause:
        kind = type(value).__name__
        raise CalibrationError(f"{where}: {kind} cannot be made a tensor ({cause}); pad rows to one length") from cause


def _size(batch: Mapping[str, Any]) -> int:
    first = next(iter(batch.values()))
    return int(first.shape[0]) if first.ndim else 1


def _checked(
    batches: tuple[dict[str, Any], ...], held_out: tuple[dict[str, Any], ...], source: Source, where: str
) -> Data:
    vocabulary, longest = _vocabulary(source.config), positions(source.config)
    for batch in (*batches, *held_out):
        for name, tensor in batch.items():
            if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                raise CalibrationError(f"{where}: {name} holds NaN or infinity")
        ids = batch.get("input_ids")
        if ids is None:
            continue
        if ids.ndim != 2 or ids.is_floating_point() or not ids.numel():
            raise CalibrationError(f"{where}: input_ids {ids.dtype} {tuple(ids.shape)}; expected ids [batch, sequence]")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or (vocabulary is not None and high >= vocabulary):
            raise CalibrationError(
                f"{where}: ids reach from {low} to {high}, the model's vocabulary ends at {vocabulary}: "
                "is it the tokenizer of this model?"
            )
        if longest is not None and ids.shape[1] > longest:
            raise CalibrationError(f"{where}: rows of {ids.shape[1]} tokens, the model has {longest} positions")
    length = max((b["input_ids"].shape[1] for b in batches if "input_ids" in b), default=0)
    return Data(batches, held_out, _digest(batches), sum(map(_size, batches)), int(length))


def _digest(batches: Iterable[Mapping[str, Any]]) -> str:
    import torch

    digest = hashlib.sha256()
    for batch in batches:
        for name, tensor in sorted(batch.items()):
            digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _code_digest(function: Any) -> str:
    digest = hashlib.sha256(b"forward_loop")
    for part in _held(function, set()):
        digest.update(part)
    return digest.hexdigest()


def _held(value: Any, seen: set[int]) -> Iterator[bytes]:
    """What tells two loops apart: code, and the words, numbers and tensors it closes over; of the rest the type."""
    import numpy as np
    import torch

    if isinstance(value, str | bytes | int | float | Path | None):
        yield repr(value).encode()
        return
    kind = type(value)
    yield f" {getattr(value, '__qualname__', kind.__qualname__)} ".encode()
    if id(value) in seen:  # a function may close over itself
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield _digest([{"": value.detach().cpu()}]).encode()
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"{value.dtype} {value.shape} ".encode() + value.tobytes()
    elif isinstance(value, Mapping):
        yield from _each([*value.keys(), *value.values()], seen)
    elif isinstance(value, list | tuple):
        yield from _each(value, seen)
    elif code := getattr(value, "__code__", None):
        yield repr((code.co_code, [c for c in code.co_consts if isinstance(c, str | int | float)])).encode()
        cells = getattr(value, "__closure__", None) or ()
        held = [cell.cell_contents for cell in cells if cell != CellType()]
        yield from _each([*held, *(getattr(value, "__defaults__", None) or ())], seen)
    elif isinstance(value, partial):
        yield from _each([value.func, value.args, value.keywords], seen)
    elif isinstance(value, torch.utils.data.DataLoader):
        yield from _held(value.dataset, seen)
    elif isinstance(value, torch.utils.data.TensorDataset):
        yield from _each(value.tensors, seen)


def _each(values: Iterable[Any], seen: set[int]) -> Iterator[bytes]:
    for value in values:
        yield from _held(value, seen)


def _vocabulary(config: Mapping[str, Any]) -> int | None:
    return _number(config, "vocab_size")


def positions(config: Mapping[str, Any]) -> int | None:
    """How many positions the model has, where its config says so."""
    return _number(config, "max_position_embeddings") or _number(config, "n_positions")


def _number(config: Mapping[str, Any], key: str) -> int | None:
    text = config.get("text_config")
    value = config.get(key) or (text.get(key) if isinstance(text, Mapping) else None)
    return value if type(value) is int else None
