"""Turn calibration data of any form into batches of token ids.

Rows are cut from the text at even distances and get the tokenizer's special tokens, so that a row looks like a served
input. Every n-th row is held out: calibration never sees it. No model is run.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import CellType
from typing import TYPE_CHECKING, Any, cast

from bridge.calibration.documents import CHARACTERS, documents
from bridge.core.errors import BridgeError, CalibrationError, UsageError
from bridge.core.text import number
from bridge.sources.configs.diffusion import is_diffusion
from bridge.sources.source import Source

if TYPE_CHECKING:
    from bridge.sources.checkpoint import HfSource

# On a 22 M encoder three times as many samples changed embeddings by less than 0.001: FP8 0.9979 both times, INT8
# (alpha 0.7) 0.9953 to 0.9947. `bridge.calibration.amount` has what algorithms need beyond it.
SAMPLES = 32
SEQUENCE = 128  # a wrong RoPE permute shows after some twenty positions, so held-out rows must be longer
AUTO = "auto"  # `samples`: see `bridge.calibration.automatic`
MOST_SAMPLES = 512  # rows that "auto" chooses at most
PROMPTED = 8  # prompts that calibrate a denoiser, which sees each of them at every step
FP32 = "fp32"  # `compute`: see `bridge.calibration.compute`
HELD_OUT = 8  # one row is held out for every so many that calibrate
BATCH = 8


def check_compute(compute: str | None) -> None:
    """UsageError for another dtype to calibrate in than fp32, or None for the model's own."""
    if compute not in (None, FP32):
        raise UsageError(f"compute={compute!r} (--compute) is unknown; known: fp32; without it, the model's own dtype")


@dataclass(frozen=True)
class Data:
    """Batches to calibrate with and held-out batches, as {name: torch tensor}; `digest` covers the former.

    `name`: what they are made of, in words. `missing`: why the default text gives no batches; a scheme without
    statistics needs none. `forward_loop`: the user's own loop, which runs the model; `batches` is then empty.
    `warnings`: what a user should know before calibrating.
    `cut`: with samples="auto", the same text cut into another number of rows; `chosen`: why it has this number.
    """

    batches: tuple[dict[str, Any], ...] = ()
    held_out: tuple[dict[str, Any], ...] = ()
    digest: str = ""
    samples: int = 0
    sequence: int = 0
    missing: str = ""
    forward_loop: Callable[[Any], Any] | None = None
    warnings: tuple[str, ...] = ()
    cut: Callable[[int], Data] | None = None
    chosen: str = ""
    name: str = ""


@dataclass(frozen=True)
class Sampling:
    """How rows are cut from texts: their number, their tokens, and the field of a JSONL file that holds the text.

    `samples`: a number or "auto"; `default`: the number if it is None. `characters`: of a text file, read at most.
    """

    samples: int | str | None = None
    sequence: int | None = None
    field: str | None = None
    default: int = SAMPLES
    characters: int = CHARACTERS

    def __post_init__(self) -> None:
        for name, value in (("samples", self.samples), ("sequence", self.sequence)):
            auto = name == "samples" and value == AUTO
            if value is not None and not auto and (type(value) is not int or value < 1):
                or_auto = ', or "auto"' if name == "samples" else ""
                raise UsageError(f"{name}={value!r}; expected a positive whole number{or_auto}")

    @property
    def rows(self) -> int:
        """The number of rows to calibrate with."""
        return self.samples if isinstance(self.samples, int) else self.default


DEFAULT = Sampling()


def prepare(data: Any, source: Source, sampling: Sampling = DEFAULT) -> Data:
    """Make `Data` of None (the embedded text), a text or JSONL file, a `datasets` id, batches, a DataLoader, texts, or
    a `forward_loop(model)`.

    >>> prepare("corpus.txt", open_source("examples/models/tiny-llama")).samples  # doctest: +SKIP
    32
    """
    if is_diffusion(source.config) and (data is None or isinstance(data, str | Path) or _are_texts(data)):
        return _prompted(data, source, sampling)
    if sampling.samples == AUTO:
        return _automatic(data, source, sampling)
    if data is None:
        if sampling.field:
            raise UsageError(
                f"field={sampling.field!r} (--field) names a key of JSONL records; give them: data= (--data)"
            )
        return _default(source, sampling)
    if isinstance(data, str | Path):
        texts = documents(data, source.load_tokenizer, sampling.rows, sampling.field, sampling.characters)
        return _rows(texts, source, str(data), sampling)
    if sampling.field:
        raise UsageError(f"field={sampling.field!r} (--field) names a key of JSONL records, and data= holds none")
    if callable(data) and not isinstance(data, Mapping) and not hasattr(data, "__iter__"):
        try:
            own = _default(source, sampling)
        except CalibrationError as error:  # the user did not give the text that this model cannot read
            own = Data(missing=f"a forward_loop was given, and {error}")
        return Data(held_out=own.held_out, digest=_code_digest(data), missing=own.missing, forward_loop=data)
    items = [data] if isinstance(data, Mapping) or hasattr(data, "dtype") else data
    if not isinstance(items, Iterable):
        raise CalibrationError(
            f"cannot calibrate with {type(data).__name__}; give a text or JSONL file, a dataset id, texts, batches, a "
            "DataLoader, or a forward_loop(model)"
        )
    return _given(items, source, sampling)


def _are_texts(data: Any) -> bool:
    return isinstance(data, list | tuple) and bool(data) and all(isinstance(item, str) for item in data)


def _prompted(data: Any, source: Source, sampling: Sampling) -> Data:
    """Run the pipeline of `source` on prompts (None: the embedded ones) and take its denoiser's inputs as batches."""
    from bridge.sources.live_models.prompts import PROMPTS, STEPS, recorded

    if not getattr(source, "folder", ""):
        why = f"{source.config['architectures'][0]} alone takes no prompts; give the directory of its pipeline, or "
        missing = f"{why}batches of its inputs in Python: data=[{{'hidden_states': ..., 'timestep': ...}}, ...]"
        if data is None:
            return Data(missing=missing)
        raise CalibrationError(missing)
    if isinstance(data, str | Path):
        texts = documents(data, source.load_tokenizer, sampling.rows, sampling.field, sampling.characters)
        prompts = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    else:
        prompts = PROMPTS if data is None else list(data)
    if len(prompts) < 2:
        raise CalibrationError("one prompt cannot both calibrate and be held out; give two or more, one a line")
    asked = sampling.samples if isinstance(sampling.samples, int) else PROMPTED
    *chosen, held = prompts[: asked + 1]
    *kept, out = recorded(cast("HfSource", source), [*chosen, held])
    batches = tuple(batch for steps in kept for batch in steps)
    made = _checked(batches, (out[len(out) // 2],), source, "the prompts")
    return replace(made, samples=len(chosen), name=f"{number(len(chosen), 'prompt')} of {STEPS} steps each")


def _automatic(data: Any, source: Source, sampling: Sampling) -> Data:
    """Return the most rows that may be chosen, which are cut again when the number is known."""
    texts = isinstance(data, list | tuple) and all(isinstance(item, str) for item in data)
    if not (data is None or isinstance(data, str | Path) or texts):
        kind = type(data).__name__
        raise UsageError(
            f'samples="auto" chooses how many rows are cut from text; this {kind} is used as it is: leave out samples='
        )

    def cut(rows: int) -> Data:
        return prepare(data, source, replace(sampling, samples=rows))

    most = cut(MOST_SAMPLES)
    if not most.batches:
        return most
    digest = hashlib.sha256(f"{AUTO} {most.digest}".encode()).hexdigest()
    return replace(most, digest=digest, warnings=(), cut=cut)


def _default(source: Source, sampling: Sampling) -> Data:
    if _number(source.config, "vocab_size") is None:
        why = "this model reads no text, so the embedded default text cannot calibrate it"
        hint = (
            'give batches of real inputs in Python, for images data=[{"pixel_values": tensor}, ...], or a saved --calib'
        )
        return Data(missing=f"{why}; {hint}")
    try:
        source.load_tokenizer()
    except BridgeError as error:
        return Data(missing=f"{error}; or give batches of token ids as calibration data")
    data = _rows(documents(None, source.load_tokenizer, 1), source, "the embedded text", sampling)
    tokens = f"{data.samples * data.sequence:,} tokens"
    text = f"the data are {tokens} of Python's documentation; text like yours is better: data= (--data FILE)"
    return replace(data, warnings=(*data.warnings, text))


def _rows(texts: Sequence[str], source: Source, where: str, sampling: Sampling) -> Data:
    """Join the texts and cut token rows at even distances."""
    import torch

    if not any(text.strip() for text in texts):
        raise CalibrationError(f"{where}: the calibration text is empty")
    tokenizer = source.load_tokenizer()
    before, after = _specials(tokenizer)
    ids = tokenizer("\n\n".join(texts), add_special_tokens=False, verbose=False)["input_ids"]
    length = sampling.sequence or min(SEQUENCE, positions(source.config) or SEQUENCE)
    content = length - len(before) - len(after)
    if content < 1:
        raise CalibrationError(f"sequence={length} leaves no room for text: {len(before) + len(after)} special tokens")
    asked = sampling.rows
    wanted, have = asked + -(-asked // HELD_OUT), len(ids) // content
    if not ids:
        raise CalibrationError(
            f"{where}: the tokenizer of {source.where} makes no tokens of it; does the model's directory hold the "
            "tokenizer's files? Give tokenizer=, or batches of token ids as calibration data"
        )
    if have < 2:
        raise CalibrationError(
            f"{where}: {number(len(ids), 'token')}, too few for a batch: one row of {length} to calibrate and one to "
            f"hold out take {2 * content}; give more text, or a smaller sequence= (--sequence)"
        )
    count = min(wanted, have)
    starts = [at * have // count * content for at in range(count)]
    rows = [[*before, *ids[start : start + content], *after] for start in starts]
    every = HELD_OUT + 1 if count > HELD_OUT else count
    kept = [row for at, row in enumerate(rows) if (at + 1) % every]
    out = [row for at, row in enumerate(rows) if not (at + 1) % every]
    fewer = (
        f"{where} has {have} rows of {length} tokens: {len(kept)} to calibrate with and {len(out)} to compare; {asked} "
        "were wanted: give more text, or a smaller samples= (--samples) or sequence= (--sequence)"
    )

    def batches(some: list[list[int]]) -> tuple[dict[str, Any], ...]:
        parts = (torch.tensor(some[at : at + BATCH], dtype=torch.int64) for at in range(0, len(some), BATCH))
        return tuple(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), **decoder_inputs(ids, source.config)}
            for ids in parts
        )

    data = _checked(batches(kept), batches(out), source, where)
    return replace(data, warnings=(fewer,)) if have < wanted else data


def decoder_inputs(ids: Any, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs of a decoder that writes `ids`: its start token and all but the last; {} without a decoder."""
    from bridge.sources.live_models.loading import model_class

    if not config.get("is_encoder_decoder"):
        return {}
    if "decoder_input_ids" not in inspect.signature(model_class(config).forward).parameters:
        return {}  # the encoder of T5 alone is `is_encoder_decoder`, too
    shifted = ids.roll(1, -1)
    keys = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    shifted[:, 0] = next((value for value in map(config.get, keys) if type(value) is int), 0)
    return {"decoder_input_ids": shifted}


def _specials(tokenizer: Any) -> tuple[list[int], list[int]]:
    # what the tokenizer puts before and after a text: BOS, or [CLS] and [SEP]
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = list(tokenizer("a")["input_ids"])
    for at in range(len(full) - len(bare) + 1):
        if full[at : at + len(bare)] == list(bare):
            return full[:at], full[at + len(bare) :]
    return [], []


def _given(items: Iterable[Any], source: Source, sampling: Sampling) -> Data:
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
        if rows >= (sampling.rows if sampling.samples else 1024) + 1:  # a generator need not end
            break
    if texts and not taken:
        return _rows(texts, source, "the calibration texts", sampling)
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
    return replace(_checked(tuple(kept), tuple(out), source, "the calibration data"), name="batches of the caller")


def _batch(item: Any, where: str, torch: Any) -> dict[str, Any]:
    """Return one batch as {name: tensor}; a bare tensor is ids if it has integers, pixels otherwise."""
    if isinstance(item, tuple) and item and not isinstance(item[0], int):
        item = item[0]  # (inputs, labels) of a DataLoader
    if isinstance(item, Mapping):
        inputs = {str(k): v for k, v in item.items() if v is not None and k not in ("labels", "label")}
        if not inputs:
            raise CalibrationError(f"{where}: {'has only labels' if item else 'is empty'}; give batches with inputs")
        batch = {key: _tensor(value, f"{where}, {key}", torch) for key, value in inputs.items()}
        if single := [key for key, tensor in batch.items() if not tensor.ndim]:
            raise CalibrationError(
                f"{where}, {single[0]}: a single number; give the tensors of one run by the names of the model's "
                'inputs, rows first, as in {"input_ids": ids}'
            )
        _check_mask(batch, where)
        return batch
    tensor = _tensor(item, where, torch)
    if tensor.is_floating_point():
        return {"pixel_values": tensor if tensor.ndim == 4 else tensor[None]}
    tensor = tensor if tensor.ndim == 2 else tensor[None]
    return {"input_ids": tensor, "attention_mask": torch.ones_like(tensor)}


def _check_mask(batch: Mapping[str, Any], where: str) -> None:
    """CalibrationError for a mask of tokens that is not one number for each id; masks with more axes pass."""
    ids, mask = batch.get("input_ids"), batch.get("attention_mask")
    if ids is None or mask is None or ids.ndim != 2 or mask.ndim > 2 or mask.shape == ids.shape:
        return
    raise CalibrationError(
        f"{where}: attention_mask {tuple(mask.shape)} does not match input_ids {tuple(ids.shape)}, and says of each "
        "token whether it is read; give it the shape of input_ids, or leave it out if no row is padded"
    )


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
    vocabulary, longest = _number(source.config, "vocab_size"), positions(source.config)
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
    return Data(batches, held_out, _digest(batches), sum(map(_size, batches)), int(length), name=where)


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
    for part in _content(function, set()):
        digest.update(part)
    return digest.hexdigest()


def _content(value: Any, seen: set[int]) -> Iterator[bytes]:
    """Yield what distinguishes two loops: code, and the text, numbers and tensors in closures; else the type."""
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
    inner: Iterable[Any] = ()
    if isinstance(value, torch.Tensor):
        yield _digest([{"": value.detach().cpu()}]).encode()
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        yield f"{value.dtype} {value.shape} ".encode() + value.tobytes()
    elif isinstance(value, Mapping):
        inner = [*value.keys(), *value.values()]
    elif isinstance(value, list | tuple):
        inner = value
    elif code := getattr(value, "__code__", None):
        yield repr((code.co_code, [c for c in code.co_consts if isinstance(c, str | int | float)])).encode()
        cells = getattr(value, "__closure__", None) or ()
        contents = [cell.cell_contents for cell in cells if cell != CellType()]
        inner = [*contents, *(getattr(value, "__defaults__", None) or ())]
    elif isinstance(value, partial):
        inner = [value.func, value.args, value.keywords]
    elif isinstance(value, torch.utils.data.DataLoader):
        inner = [value.dataset]
    elif isinstance(value, torch.utils.data.TensorDataset):
        inner = value.tensors
    for part in inner:
        yield from _content(part, seen)


def positions(config: Mapping[str, Any]) -> int | None:
    """Return the number of positions in the model's config, None if it has none."""
    return _number(config, "max_position_embeddings") or _number(config, "n_positions")


def _number(config: Mapping[str, Any], key: str) -> int | None:
    text = config.get("text_config")
    value = config.get(key) or (text.get(key) if isinstance(text, Mapping) else None)
    return value if type(value) is int else None
