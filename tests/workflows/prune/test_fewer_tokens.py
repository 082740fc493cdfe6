"""Models with fewer tokens: the same logits for those that are left, and a tokenizer that makes their numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import bridge
from bridge.core.errors import CalibrationError, PlanError
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.planning.structure import structure_of
from bridge.sources.opening import open_source
from bridge.sources.pruned.opening import plan_cut
from bridge.sources.pruned.renumber import renumbered_files
from bridge.sources.pruned.vocabulary import Vocabulary
from tests.models.decoder_families import build
from tests.sources.pruned.families import FAMILIES
from tests.sources.pruned.test_vocabulary import KINDS, LINES, READ, SPECIAL, STRANGE

EXAMPLES = Path("examples/models")
PAGES = "\n".join(path.read_text(encoding="utf-8") for path in sorted(Path("docs/pages").rglob("*.md")))


def words(count: int = 97) -> PreTrainedTokenizerFast:
    """A tokenizer whose tokens are words: w0., w1., ..."""
    made = Tokenizer(models.WordLevel({f"w{number}.": number for number in range(count)}, unk_token="w1."))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="w1.", eos_token="w2.")


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("tiny-llama", marks=pytest.mark.product), "tiny-gpt2"])
def test_what_is_written_answers_as_the_whole_model_for_the_tokens_that_are_left(name: str, tmp_path: Path) -> None:
    (tmp_path / "data.txt").write_text(PAGES[:60_000], encoding="utf-8")
    out = tmp_path / "out"
    report = bridge.prune(EXAMPLES / name, {"vocab": "50%"}, out, data=tmp_path / "data.txt")
    assert report.passed and bridge.verify(out, EXAMPLES / name).passed
    kept = SafetensorsFile(out / "bridge" / "pruning.safetensors").read("vocab").astype(np.int64)
    assert report.pruning and report.pruning.share["vocab"] > 0.9
    new = {old: at for at, old in enumerate(kept.tolist())}
    whole, cut = (AutoTokenizer.from_pretrained(place) for place in (EXAMPLES / name, out))
    big, small = (AutoModelForCausalLM.from_pretrained(place) for place in (EXAMPLES / name, out))
    assert (small.config.vocab_size, small.config.eos_token_id, cut.eos_token_id) == (len(kept), *[new[0]] * 2)
    same = 0
    for line in PAGES[60_000:].split("\n"):
        old, got = (tokenizer(line)["input_ids"] for tokenizer in (whole, cut))
        assert cut.decode(got) == whole.decode(old)
        if not old or not {*old} <= new.keys():
            continue
        assert got == [new[number] for number in old]
        same += 1
        if same <= 10:
            with torch.no_grad():
                want = big(torch.tensor([old])).logits[..., torch.from_numpy(kept)]
                assert (small(torch.tensor([got])).logits - want).abs().max() <= 1e-5 * want.abs().max()
    assert same > 100


# Gemma 4 is not pruned: its layers have embeddings of tokens of their own, and widths.
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "Gemma4ForCausalLM"])
def test_every_family_loses_rows_alone(family: str) -> None:
    model = build(family, torch.float32, **FAMILIES[family])
    source = open_source(model, tokenizer=words(model.config.vocab_size))
    cut = plan_cut(source, {"vocab": 40}, None)
    counts = np.random.default_rng(0).integers(0, 99, cut.before["vocab"])
    pruned = cut.pruned({"vocab": {(None, None): counts}})
    structure_of(pruned)
    kept = pruned.kept.positions("vocab", None, None)
    tokens = torch.arange(3, 40)[None] % 40
    with torch.no_grad():
        want = model(torch.from_numpy(kept)[tokens]).logits[..., torch.from_numpy(kept)]
        got = pruned.load_model()(tokens).logits
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    tokenizer = Tokenizer.from_str(bytes(pruned.side_files["tokenizer.json"]).decode())
    assert tokenizer.encode(f"w{kept[7]}. w{kept[39]}.").ids == [7, 39]


@pytest.mark.slow
def test_tokens_go_together_with_channels(tmp_path: Path) -> None:
    keep: dict[str, Any] = {"vocab": 640, "ffn": 128, "layers": 3}
    smaller = bridge.pruned(EXAMPLES / "tiny-llama", keep, data=[PAGES[:40_000]], samples=8, sequence=64)
    assert smaller.specs["lm_head.weight"].shape == (640, 128)
    assert bridge.convert(smaller, "gguf", "q8_0", tmp_path / "gguf").passed
    assert bridge.convert(smaller, "hf", "fp8", tmp_path / "hf", data=[PAGES[:40_000]], samples=4, sequence=64).passed


@pytest.mark.slow
def test_a_checkpoint_without_a_tokenizer_takes_the_given_one(tmp_path: Path) -> None:
    bridge.convert(EXAMPLES / "tiny-llama", "megatron", None, tmp_path / "all", verify=False)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        for path in (tmp_path / "all").rglob(name):
            path.unlink()
    with pytest.raises(
        PlanError, match=re.escape("fewer tokens take a tokenizer.json, which is cut too: give tokenizer=")
    ):
        bridge.pruned(tmp_path / "all", {"vocab": 640}, data=[PAGES])
    smaller = bridge.pruned(tmp_path / "all", {"vocab": 640}, data=[PAGES], tokenizer=EXAMPLES / "tiny-llama")
    same = bridge.pruned(EXAMPLES / "tiny-llama", {"vocab": 640}, data=[PAGES])
    assert smaller.kept.digest == same.kept.digest
    assert (
        json.loads(smaller.side_files["tokenizer.json"])["model"]
        == json.loads(same.side_files["tokenizer.json"])["model"]
    )


@pytest.mark.parametrize(
    ("keep", "data", "error", "said"),
    [
        ({"vocab": 100}, [PAGES], PlanError, "vocab=100: 257 tokens stay in any case (special and added tokens"),
        ({"vocab": 9999}, [PAGES], PlanError, "vocab=9999: it is 1536 now"),
        ({"vocabulary": 640}, [PAGES], PlanError, "nearest: vocab"),
        ({"vocab": 640}, None, CalibrationError, "give text like yours, data= (--data FILE)"),
        ({"vocab": 640}, lambda model: None, CalibrationError, "give texts, or batches of input_ids"),
        ({"vocab": 640}, [""], CalibrationError, "they have none; give more text"),
    ],
)
def test_what_cannot_be_cut_is_refused(keep: Any, data: Any, error: Any, said: str) -> None:
    with pytest.raises(error, match=re.escape(said)):
        bridge.pruned(EXAMPLES / "tiny-llama", keep, data=data)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            {"type": "Sentences", "vocab": {}},
            "its model is of type 'Sentences'; known: BPE, Unigram, WordLevel, WordPiece",
        ),
        (
            {"type": "BPE", "vocab": {}, "merges": [], "end_of_word_suffix": "</w>"},
            "a prefix or suffix that the text has not",
        ),
        ({"type": "BPE", "vocab": {"a": 0}, "merges": [["a"]]}, "not what the tokenizers library writes"),
        (None, "model is None"),
    ],
)
def test_a_tokenizer_that_cannot_be_cut_is_named_with_the_reason(model: Any, said: str, tmp_path: Path) -> None:
    for path in (EXAMPLES / "tiny-llama").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
    with pytest.raises(PlanError, match=re.escape(said)):
        bridge.plan(tmp_path, "hf", keep={"vocab": 640})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "model"),
    [
        ("LlamaTokenizer", "byte fallback", "llama"),
        ("GemmaTokenizer", "byte fallback", "gemma2"),
        ("Qwen2Tokenizer", "byte level", "qwen2"),
        ("GPT2Tokenizer", "byte level", "gpt2"),
        ("PreTrainedTokenizerFast", "every merge", "llama"),
        ("PreTrainedTokenizerFast", "unigram", "llama"),
        ("BertTokenizer", "word piece", "bert"),
    ],
)
def test_classes_of_transformers_read_the_cut_tokenizer(name: str, kind: str, model: str, tmp_path: Path) -> None:
    """Some build their own of the vocabulary and merges in tokenizer.json."""
    made = KINDS[kind]()
    ids = made.get_vocab()
    rows = max(ids.values()) + 1
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    if name == "BertTokenizer":
        named |= {"cls_token": "<s>", "sep_token": "</s>", "pad_token": "</s>", "mask_token": "<s>"}
    added = {str(ids[token]): {"content": token, "special": True} for token in SPECIAL}
    config = json.dumps({"tokenizer_class": name, "added_tokens_decoder": added, **named}).encode()
    files = {"tokenizer.json": made.to_str().encode(), "tokenizer_config.json": config}
    vocabulary = Vocabulary(files, json.loads(made.to_str()), rows, {})
    counts = np.bincount([number for line in LINES[::3] for number in made.encode(line).ids], minlength=rows)
    kept = vocabulary.kept(counts, 700)
    new = {old: at for at, old in enumerate(kept.tolist())}
    loaded = []
    for part, content in (("whole", files), ("cut", renumbered_files(vocabulary, kept))):
        (tmp_path / part).mkdir()
        about = {"model_type": model, "vocab_size": rows, "bos_token_id": 1, "eos_token_id": 2}
        (tmp_path / part / "config.json").write_text(json.dumps(about))
        for file, data in content.items():
            (tmp_path / part / file).write_bytes(data)
        loaded.append(AutoTokenizer.from_pretrained(tmp_path / part))
    whole, cut = loaded
    assert cut.eos_token_id == new[whole.eos_token_id]
    pairs = [(whole(line)["input_ids"], cut(line)["input_ids"]) for line in [*READ, *STRANGE]]
    same = [(old, got) for old, got in pairs if {*old} <= new.keys()]
    assert len(same) > 100
    assert all(got == [new[number] for number in old] for old, got in same)


def test_a_tokenizer_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    for path in (EXAMPLES / "tiny-llama").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    content = json.loads((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    content["post_processor"] = {"type": "BertProcessing", "sep": ["<|endoftext|>", 1500], "cls": ["<|endoftext|>", 0]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(PlanError, match=r"tokenizer\.json names the token 1500 in one place only"):
        bridge.plan(tmp_path, "hf", keep={"vocab": 640})


def test_a_sentencepiece_file_alone_is_refused_with_the_reason(tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((EXAMPLES / "tiny-llama" / name).read_bytes())
    (tmp_path / "tokenizer.model").write_bytes(b"no sentences")
    with pytest.raises(
        PlanError, match=r"vocab=640: fewer tokens take a tokenizer.json.*no tokenizer could be loaded from"
    ):
        bridge.plan(tmp_path, "hf", keep={"vocab": 640})


def test_other_files_of_the_vocabulary_are_left_out_and_the_report_says_why(tmp_path: Path) -> None:
    for path in (EXAMPLES / "tiny-llama").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "tokenizer.model").write_bytes(b"the whole vocabulary")
    smaller = bridge.pruned(tmp_path, {"vocab": 640}, data=[PAGES])
    assert "tokenizer.model" not in smaller.side_files
    assert smaller.dropped["tokenizer.model"] == "has the whole vocabulary, and tokenizer.json what is left of it"


def test_batches_of_tokens_count_and_their_padding_does_not() -> None:
    ids = torch.arange(300, 400).repeat(4, 1)
    mask = torch.ones_like(ids)
    mask[:, :50] = 0
    smaller = bridge.pruned(
        EXAMPLES / "tiny-llama",
        {"vocab": 500},
        data=[{"input_ids": ids, "attention_mask": mask}, {"input_ids": ids[:, 50:]}],
    )
    assert {*range(350, 400)} <= {*smaller.kept.positions("vocab", None, None).tolist()}
    assert smaller.kept.share["vocab"] == 1.0
