"""Cut rows of token ids from texts.

Rows are cut at even distances and get the tokenizer's special tokens, so that a row looks like a served input. Every
n-th row is held out: calibration never sees it. Windows that outputs are evaluated on are cut between rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from bridge.calibration.data.checks import checked
from bridge.calibration.data.values import BATCH, EMBEDDED, HELD_OUT, SAMPLES, SEQUENCE, Data, Sampling
from bridge.calibration.data.windows import MOST, POSITIONS, WINDOW, WINDOWS, free_places, marked, row_places, spread
from bridge.core.errors import CalibrationError
from bridge.core.text import number
from bridge.quant.calibration import LOGITS
from bridge.sources.configs.positions import positions, vocabulary_size
from bridge.sources.source import Source

BETWEEN = "\n\n"  # two texts


def rows_of(texts: Sequence[str], source: Source, where: str, sampling: Sampling) -> Data:
    """Join the texts and cut token rows at even distances."""
    import torch

    if not any(text.strip() for text in texts):
        raise CalibrationError(f"{where}: the calibration text is empty")
    tokenizer = source.load_tokenizer()
    before, after = _specials(tokenizer)
    ids, answers = _tokens(tokenizer, texts)
    length = sampling.sequence or min(SEQUENCE, positions(source.config) or SEQUENCE)
    content = length - len(before) - len(after)
    if content < 1:
        raise CalibrationError(f"sequence={length} leaves no room for text: {len(before) + len(after)} special tokens")
    have = len(ids) // content
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
    plain = all(answers)
    special, limit = len(before) + len(after), positions(source.config) or WINDOW
    window, asked = min(WINDOW, limit) - special, sampling.rows
    wanted = _with_held_out(asked)
    starts, have, fixed = _placed(len(ids), content, wanted, min(SEQUENCE, limit) - special, window)
    count = len(starts)
    rows = [[*before, *ids[start : start + content], *after] for start in starts]
    every = HELD_OUT + 1 if count > HELD_OUT else count
    kept = [row for at, row in enumerate(rows) if (at + 1) % every]
    out = [row for at, row in enumerate(rows) if not (at + 1) % every]
    fewer = (
        f"{where} has {have} rows of {length} tokens: {len(kept)} to calibrate with and {len(out)} to compare; {asked} "
        "were wanted: give more text, or a smaller samples= (--samples) or sequence= (--sequence)"
    )

    def batches(some: list[list[int]], most: int) -> tuple[dict[str, Any], ...]:
        parts = (torch.tensor(some[at : at + most], dtype=torch.int64) for at in range(0, len(some), most))
        return tuple(
            {"input_ids": ids, "attention_mask": torch.ones_like(ids), **decoder_inputs(ids, source.config)}
            for ids in parts
        )

    logits = 4 * length * (vocabulary_size(source.config) or 1)  # bytes of a row
    data = checked(batches(kept, BATCH), batches(out, max(1, min(BATCH, LOGITS // logits))), source, where)
    if sampling.evaluate is not None or not fixed:
        number_of = WINDOWS if sampling.evaluate is None else -(-sampling.evaluate // max(1, window - 1))
        fixed = free_places(len(ids), starts, content, window, number_of)
    if sampling.evaluate is None:
        fixed += free_places(len(ids), starts, content, window, MOST - len(fixed), fixed)
    windows = tuple(
        marked(
            [*before, *ids[at : at + window], *after],
            [plain] * len(before) + answers[at : at + window] + [plain] * len(after),
        )
        for at in fixed
    )
    told = where == EMBEDDED and sampling.samples is None  # nobody asked for more, and no one can give more of it
    return replace(data, windows=windows, warnings=(fewer,) if have < wanted and not told else ())


def _tokens(tokenizer: Any, texts: Sequence[str]) -> tuple[list[int], list[bool]]:
    """The tokens of the joined texts, and which are scored: of chats what the assistant says, else all."""
    import numpy as np

    spans, at = [], 0
    for text in texts:
        spans += [(at + begin, at + end) for begin, end in getattr(text, "answers", ())]
        at += len(text) + len(BETWEEN)
    marks = bool(spans) and getattr(tokenizer, "is_fast", False)  # others do not say where a token begins
    more = {"return_offsets_mapping": True} if marks else {}
    made = tokenizer(BETWEEN.join(texts), add_special_tokens=False, verbose=False, **more)
    ids = list(made["input_ids"])
    if not marks:
        return ids, [True] * len(ids)
    begins = np.array([begin for begin, _ in made["offset_mapping"]])
    edges = np.array(spans).reshape(-1)  # an odd number of edges at or before a token: it lies in an answer
    return ids, (np.searchsorted(edges, begins, "right") % 2 == 1).tolist()


def _with_held_out(rows: int) -> int:
    return rows + -(-rows // HELD_OUT)


def _placed(total: int, content: int, wanted: int, least: int, window: int) -> tuple[list[int], int, list[int]]:
    """Where rows begin, how many there may be, and where windows begin that no row lies over.

    Windows lie between the default rows, of `least` tokens, so that all verbs evaluate a model on the same ones; other
    rows make room. There are none in a text that is too short for that.
    """
    default = spread(row_places(total, least), _with_held_out(SAMPLES)) if least > 0 else []
    fixed = free_places(total, default, least, window, WINDOWS)
    slots = row_places(total, content)
    starts = spread(slots, wanted)
    if (window - 1) * len(fixed) < POSITIONS:
        return starts, len(slots), []
    if all(start + content <= at or at + window <= start for start in starts for at in fixed):
        return starts, len(slots), fixed
    apart = row_places(total, content, fixed, window)
    return (spread(apart, wanted), len(apart), fixed) if len(apart) > 1 else (starts, len(slots), [])


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
