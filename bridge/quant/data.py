"""Calibration data: anything a user may have becomes batches of token ids, and others held out; never runs a model.

Rows are cut from the text at even distances, each between the special tokens that the tokenizer puts around a text, so
that a row looks like what the model is served. Every n-th row is held out: calibration never sees it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bridge.errors import BridgeError, CalibrationError, UsageError

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
        return _rows(_documents(data, source, samples or SAMPLES), source, str(data), samples, sequence)
    if callable(data) and not isinstance(data, Mapping) and not hasattr(data, "__iter__"):
        rest = _default(source, samples, sequence)
        return Data((), rest.held_out, _code_digest(data), 0, 0, forward_loop=data)
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
    return _rows([_DEFAULT.read_text(encoding="utf-8")], source, "the embedded text", samples, sequence)


def _documents(data: str | Path, source: Source, samples: int) -> list[str]:
    path = Path(data)
    if path.is_dir():
        raise CalibrationError(f"{path}: a directory; give a text or JSONL file")
    if not path.is_file():
        if isinstance(data, Path) or path.suffix in (".txt", ".jsonl", ".json", ".md", ".csv") or path.is_absolute():
            raise CalibrationError(f"{path}: no such calibration file")
        return _dataset(str(data), source, samples)
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
    return [_record(line, f"{path}:{n}", source) for n, line in enumerate(lines, 1) if line.strip()]


def _record(line: str, where: str, source: Source) -> str:
    try:
        record = json.loads(line)
    except ValueError as cause:
        raise CalibrationError(f"{where}: not JSON: {cause}") from cause
    return _text(record, where, source)


def _text(record: Any, where: str, source: Source) -> str:
    text = record.get("text") if isinstance(record, Mapping) else None
    if isinstance(text, str):
        return text
    messages = record.get("messages") if isinstance(record, Mapping) else None
    if not isinstance(messages, list):
        found = sorted(record) if isinstance(record, Mapping) else type(record).__name__
        raise CalibrationError(f'{where}: expected a field "text" (string) or "messages" (chat), found {found}')
    try:
        return str(source.load_tokenizer().apply_chat_template(messages, tokenize=False))
    except BridgeError:
        raise
    except Exception as cause:  # templates raise errors of their own
        raise CalibrationError(f"{where}: the tokenizer's chat template refused the messages: {cause}") from cause


def _dataset(name: str, source: Source, samples: int) -> list[str]:
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
    return [_text(row, f"{name}[{n}]", source) for n, row in enumerate(rows)]


def _rows(documents: Sequence[str], source: Source, where: str, samples: int | None, sequence: int | None) -> Data:
    """Cut token rows from the documents, joined, at even distances."""
    import torch

    if not any(document.strip() for document in documents):
        raise CalibrationError(f"{where}: the calibration text is empty")
    tokenizer = source.load_tokenizer()
    before, after = _specials(tokenizer)
    ids = tokenizer("\n\n".join(documents), add_special_tokens=False, verbose=False)["input_ids"]
    length = sequence or min(SEQUENCE, _positions(source.config) or SEQUENCE)
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
    vocabulary, positions = _vocabulary(source.config), _positions(source.config)
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
        if positions is not None and ids.shape[1] > positions:
            raise CalibrationError(f"{where}: rows of {ids.shape[1]} tokens, the model has {positions} positions")
    longest = max((b["input_ids"].shape[1] for b in batches if "input_ids" in b), default=0)
    return Data(batches, held_out, _digest(batches), sum(map(_size, batches)), int(longest))


def _digest(batches: Iterable[Mapping[str, Any]]) -> str:
    import torch

    digest = hashlib.sha256()
    for batch in batches:
        for name, tensor in sorted(batch.items()):
            digest.update(repr((name, str(tensor.dtype), tuple(tensor.shape))).encode())
            digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _code_digest(function: Any) -> str:
    code = getattr(function, "__code__", None)
    said = repr((code.co_code, [c for c in code.co_consts if isinstance(c, str | int | float)])) if code else ""
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return hashlib.sha256(f"forward_loop {name} {said}".encode()).hexdigest()


def _vocabulary(config: Mapping[str, Any]) -> int | None:
    return _number(config, "vocab_size")


def _positions(config: Mapping[str, Any]) -> int | None:
    return _number(config, "max_position_embeddings") or _number(config, "n_positions")


def _number(config: Mapping[str, Any], key: str) -> int | None:
    text = config.get("text_config")
    value = config.get(key) or (text.get(key) if isinstance(text, Mapping) else None)
    return value if type(value) is int else None
