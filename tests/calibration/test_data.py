"""Calibration data: every kind a user may have becomes the same batches, and every kind that cannot is one error."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from bridge.calibration.data import Data, Sampling, prepare
from bridge.calibration.data.windows import tokens_of
from bridge.core.errors import CalibrationError, SourceError, UsageError

TEXT = "".join(chr(97 + (n * n + n // 7) % 26) for n in range(4000))


class Letters:
    """A tokenizer of one id a character, with BOS 1 and EOS 2 around a text."""

    chat_template: str | None = "own"

    def __call__(self, text: str, add_special_tokens: bool = True, **_: Any) -> dict[str, list[int]]:
        ids = [3 + ord(c) % 60 for c in text]
        return {"input_ids": [1, *ids, 2] if add_special_tokens else ids}

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool) -> str:
        assert not tokenize
        if any(set(m) != {"role", "content"} for m in messages):
            raise ValueError("a message needs role and content")
        return "".join(f"<{m['role']}>{m['content']}" for m in messages)


class Stub:
    """As much of a source as data needs."""

    def __init__(self, tokenizer: Any = None, **config: Any) -> None:
        self.config = {"vocab_size": 64, "max_position_embeddings": 96, **config}
        self.tokenizer = tokenizer

    def load_tokenizer(self) -> Any:
        if self.tokenizer is None:
            raise SourceError("a model in memory has no tokenizer; give tokenizer=")
        return self.tokenizer


def made(data: Any, source: Any = None, **options: Any) -> Data:
    return prepare(data, source or Stub(Letters()), Sampling(**options))


def rows(data: Data) -> torch.Tensor:
    return torch.cat([batch["input_ids"] for batch in data.batches])


def test_rows_begin_and_end_as_the_tokenizer_does(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    data = made(tmp_path / "a.txt", sequence=40)
    assert bool((rows(data)[:, 0] == 1).all() and (rows(data)[:, -1] == 2).all())
    assert rows(data).shape == (data.samples, 40) and data.sequence == 40
    assert data.batches[0]["attention_mask"].shape == data.batches[0]["input_ids"].shape


def test_held_out_rows_are_other_rows(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    data = made(str(tmp_path / "a.txt"), sequence=40, samples=24)
    used = {tuple(row) for row in rows(data).tolist()}
    held = [tuple(row) for batch in data.held_out for row in batch["input_ids"].tolist()]
    assert data.samples == 24 and len(held) == 3
    assert not used & set(held)


def test_held_out_batches_of_a_large_vocabulary_give_few_logits(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    few, many = (made(tmp_path / "a.txt", Stub(Letters(), vocab_size=n), sequence=80) for n in (64, 1 << 18))
    assert [len(batch["input_ids"]) for batch in few.held_out] == [4]
    assert [len(batch["input_ids"]) for batch in many.held_out] == [3, 1]  # of 84 MB each, in 268 MB
    assert torch.equal(torch.cat([batch["input_ids"] for batch in many.held_out]), few.held_out[0]["input_ids"])
    assert torch.equal(rows(many), rows(few))


def test_the_embedded_text_is_enough_for_the_defaults() -> None:
    data = made(None)
    assert data.samples == 32 and data.sequence == 96  # the model's positions
    assert sum(b["input_ids"].numel() for b in data.held_out) >= 64
    assert data.missing == ""


def test_the_digest_follows_the_ids_and_nothing_else(tmp_path: Path) -> None:
    for name, text in (("a.txt", TEXT), ("b.txt", TEXT), ("c.txt", TEXT[::-1])):
        (tmp_path / name).write_text(text)
    a, b, c = (made(tmp_path / name, sequence=40) for name in ("a.txt", "b.txt", "c.txt"))
    assert a.digest == b.digest != c.digest


def test_jsonl_gives_text_and_messages(tmp_path: Path) -> None:
    lines = [{"text": TEXT[:300]}, {"messages": [{"role": "user", "content": TEXT[300:700]}]}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    (tmp_path / "a.txt").write_text(TEXT[:300] + "\n\n<user>" + TEXT[300:700])
    assert made(tmp_path / "a.jsonl", sequence=40).digest == made(tmp_path / "a.txt", sequence=40).digest


IDS = torch.arange(160).reshape(4, 40) % 60


def test_every_kind_of_batch_means_the_same() -> None:
    kinds: list[Any] = [
        [IDS, IDS + 1],
        [IDS.tolist(), (IDS + 1).tolist()],
        [{"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}, {"input_ids": IDS + 1, "labels": IDS}],
        [(IDS, torch.zeros(4)), (IDS + 1, torch.zeros(4))],
        torch.utils.data.DataLoader(torch.cat([IDS, IDS + 1]).tolist(), batch_size=4, collate_fn=torch.tensor),
        (batch for batch in (IDS, IDS + 1)),
    ]
    digests = {made(kind).digest for kind in kinds}
    assert len(digests) == 1


def test_lists_of_ids_are_single_rows() -> None:
    data = made([[5, 6, 7, 8], [6, 7, 8, 9], [7, 8, 9, 10]])
    assert rows(data).tolist() == [[5, 6, 7, 8], [6, 7, 8, 9]]
    assert data.held_out[0]["input_ids"].tolist() == [[7, 8, 9, 10]]


def test_one_batch_is_split_and_an_endless_generator_ends() -> None:
    data = made({"input_ids": IDS})
    assert (data.samples, data.held_out[0]["input_ids"].shape[0]) == (3, 1)

    def endless() -> Iterator[torch.Tensor]:
        while True:
            yield IDS

    assert made(endless(), samples=16).samples <= 24


def test_texts_can_be_given_directly() -> None:
    assert made([TEXT[:2000], TEXT[2000:]], sequence=40).samples == 32


def test_pixels_pass_through() -> None:
    source = Stub(vocab_size=None, image_size=8)
    data = made([torch.ones(2, 3, 8, 8), torch.zeros(2, 3, 8, 8)], source)
    assert data.batches[0]["pixel_values"].shape == (2, 3, 8, 8) and data.sequence == 0


def test_a_forward_loop_is_kept_and_held_out_rows_come_from_the_embedded_text() -> None:
    def loop(model: Any) -> None:
        raise AssertionError("not called while preparing")

    data = made(loop)
    assert data.forward_loop is loop and not data.batches and data.held_out


def test_images_and_missing_tokenizers_are_no_error_until_data_are_needed() -> None:
    assert "reads no text" in made(None, Stub(vocab_size=None, image_size=8)).missing
    assert "give tokenizer=" in made(None, Stub()).missing


@pytest.mark.parametrize("text", ["", "  \n "])
def test_empty_text_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(CalibrationError, match=r"a\.txt: the calibration text is empty"):
        made(tmp_path / "a.txt")


def test_text_shorter_than_a_batch_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a few words")
    with pytest.raises(CalibrationError, match=r"11 tokens, too few for a batch.*take 188.*smaller sequence="):
        made(tmp_path / "a.txt")


def test_fewer_rows_than_asked_are_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    data = made(tmp_path / "a.txt", samples=100)
    assert sum(len(batch["input_ids"]) for batch in data.held_out) == 42 - data.samples
    (text,) = data.warnings
    assert f"has 42 rows of 96 tokens: {data.samples} to calibrate with" in text and "100 were wanted" in text


def test_the_embedded_text_is_told_with_the_flag_that_replaces_it() -> None:
    (text,) = made(None, sequence=40, default=10_000).warnings  # nobody asked for so many rows
    (text,) = made(None, sequence=40).warnings
    assert "1,280 tokens of Python's documentation" in text and "data= (--data FILE)" in text


def test_a_field_of_jsonl_is_named(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": TEXT[:2000], "text": "no"}), json.dumps({"prompt": TEXT[2000:]})]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    both = made([TEXT[:2000], TEXT[2000:]], sequence=40)
    assert made(tmp_path / "a.jsonl", sequence=40, field="prompt").digest == both.digest
    with pytest.raises(CalibrationError, match=r"a\.jsonl:2: expected .*; the record has prompt\. Name .*--field"):
        made(tmp_path / "a.jsonl")
    (tmp_path / "a.txt").write_text(TEXT)
    with pytest.raises(UsageError, match="plain text"):
        made(tmp_path / "a.txt", field="prompt")


def test_messages_without_a_chat_template_are_told_before_work(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hello"}]}))
    bare = Letters()
    bare.chat_template = None
    with pytest.raises(CalibrationError, match=r"a\.jsonl:1: the tokenizer has no chat template"):
        made(tmp_path / "a.jsonl", Stub(bare))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "is empty"),
        ([IDS, "text"], "mixes texts and batches"),
        ([IDS + 40, IDS], "ids reach from 40 to 99, the model's vocabulary ends at 64"),
        ([IDS - 1, IDS], "ids reach from -1"),
        ([[[1, 2], [3]], IDS], "pad rows to one length"),
        ([{"labels": IDS}, IDS], "has only labels"),
        ([IDS[:1]], "one sample cannot both calibrate and be held out"),
        ([torch.zeros(2, 100, dtype=torch.int64)] * 2, "rows of 100 tokens, the model has 96 positions"),
        ([torch.full((1, 3, 8, 8), float("nan"))] * 2, "pixel_values holds NaN or infinity"),
        ([torch.empty(2, 0, dtype=torch.int64)] * 2, "expected ids"),
        (7, "cannot calibrate with int"),
        ("no/such/file.txt", "no such calibration file"),
    ],
)
def test_data_that_cannot_calibrate_is_one_error(data: Any, said: str) -> None:
    with pytest.raises(CalibrationError, match=said):
        made(data)


@pytest.mark.parametrize("shape", [(1, 40), (12, 40), (4, 39), (40,)])
def test_a_mask_of_another_shape_than_the_ids_is_one_error(shape: tuple[int, ...]) -> None:
    batches = [{"input_ids": IDS}, {"input_ids": IDS, "attention_mask": torch.ones(shape)}]
    with pytest.raises(CalibrationError, match=r"^batch 1 .*attention_mask \(.*\) does not match input_ids \(4, 40\)"):
        made(batches)


@pytest.mark.parametrize(
    "masks",
    [
        {"attention_mask": torch.ones(4, 40)},
        {"attention_mask": torch.ones(4, 1, 40, 40)},
        {"attention_mask": torch.ones(1, 1, 40, 40)},
        {"decoder_input_ids": IDS[:, :7], "decoder_attention_mask": torch.ones(4, 7)},
    ],
)
def test_masks_of_pairs_and_of_decoders_pass(masks: dict[str, torch.Tensor]) -> None:
    data = made([{"input_ids": IDS, **masks}] * 2)
    assert all(torch.equal(batch[name], mask) for batch in data.batches for name, mask in masks.items())


def test_files_that_cannot_be_read_say_where(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"txt": "y"}\n')
    with pytest.raises(CalibrationError, match=r"a\.jsonl:2: expected a field 'text'.*the record has txt"):
        made(tmp_path / "a.jsonl")
    (tmp_path / "b.jsonl").write_text("{\n")
    with pytest.raises(CalibrationError, match=r"b\.jsonl:1: not JSON"):
        made(tmp_path / "b.jsonl")
    (tmp_path / "c.jsonl").write_text('{"messages": [{"role": "user"}]}\n')
    with pytest.raises(CalibrationError, match=r"c\.jsonl:1: .*chat template refused"):
        made(tmp_path / "c.jsonl")
    (tmp_path / "d.txt").write_bytes(b"ab\xff\xfe")
    with pytest.raises(CalibrationError, match="not UTF-8 text at byte 2"):
        made(tmp_path / "d.txt")
    with pytest.raises(CalibrationError, match="a directory"):
        made(tmp_path)


def test_a_text_file_without_tokenizer_says_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(TEXT)
    with pytest.raises(SourceError, match="give tokenizer="):
        made(tmp_path / "a.txt", Stub())


def test_a_dataset_that_cannot_be_loaded_is_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionError("offline")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(CalibrationError, match=r"not a file, and loading it as a dataset failed.*offline.*cache"):
        made("org/name")


def test_a_dataset_gives_its_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    asked: list[Any] = []

    def load(repo: str, config: str | None, split: str) -> list[dict[str, str]]:
        asked.append((repo, config, split.partition("[")[0]))
        return [{"text": TEXT[:2000]}, {"text": TEXT[2000:]}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert made("org/name:small", sequence=40).digest == made([TEXT[:2000], TEXT[2000:]], sequence=40).digest
    assert asked == [("org/name", "small", "train")]


@pytest.mark.parametrize("option", [{"samples": 0}, {"sequence": -1}, {"samples": True}])
def test_options_must_be_positive_numbers(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="expected a positive whole number"):
        made(None, **option)


def loops(*data: Any) -> set[str]:
    """The digests of as many loops, each over one of the data, alike but for that."""
    return {made(lambda model, held=one: [model(batch) for batch in held]).digest for one in data}


def test_the_digest_of_a_loop_follows_what_it_closes_over() -> None:
    assert len(loops([IDS], [IDS.clone()], (IDS.clone(),))) == 2  # the same values in a list, and in a tuple
    assert len(loops([IDS], [IDS + 1], [IDS, IDS], {"a": IDS}, {"b": IDS}, IDS.numpy(), IDS.float().numpy())) == 7
    loaders = [torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids)) for ids in (IDS, IDS + 1, IDS)]
    assert len(loops(*loaders)) == 2

    def over(ids: Any) -> Any:
        def loop(model: Any) -> None:
            model(ids)

        return loop

    assert made(over(IDS)).digest == made(over(IDS.clone())).digest != made(over(IDS + 1)).digest
    assert made(partial(over, IDS)).digest != made(partial(over, IDS + 1)).digest


def test_a_loop_that_closes_over_itself_or_over_nothing_yet_has_a_digest() -> None:
    def loop(model: Any) -> None:
        if model is not None:
            loop(later)

    assert made(loop).digest
    later = IDS
    assert made(loop).digest


TURNS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.mark.parametrize("template", [TURNS, TURNS.replace("<{{ m.role }}>", "{{ loop.length }}<{{ m.role }}>")])
def test_of_chats_what_the_assistant_says_is_scored(template: str, tmp_path: Path) -> None:
    """A template whose beginning depends on what follows does not tell where answers are: all is scored."""
    tokenizer = AutoTokenizer.from_pretrained("examples/models/tiny-llama")
    tokenizer.chat_template = template
    said = [f"Because of reason {n}, and what follows from it in the end." for n in range(900)]
    turns = [
        [{"role": "user", "content": f"Why is number {n} so?"}, {"role": "assistant", "content": said[n]}]
        for n in range(900)
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    source = Stub(tokenizer, vocab_size=len(tokenizer), max_position_embeddings=512)
    data = made(tmp_path / "chats.jsonl", source)
    assert data.windows
    for window in data.windows:
        scored = tokenizer.decode([token for token in window if token >= 0])
        assert tokens_of(window) == [token if token >= 0 else -1 - token for token in window]
        if template == TURNS:
            assert "Because" in scored and "Why" not in scored and "assistant" not in scored
            assert 0.3 < sum(token >= 0 for token in window) / len(window) < 0.9
        else:
            assert "Why" in scored and all(token >= 0 for token in window)
