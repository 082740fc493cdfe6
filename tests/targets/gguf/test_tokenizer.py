"""The tokenizer of a GGUF file: what is carried, and what is refused before work begins."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Regex, Tokenizer, normalizers, pre_tokenizers

import bridge
from bridge.core.errors import CannotRun, PlanError
from bridge.core.formats.gguf import GgufFile
from bridge.tables.llama_cpp import token_rows
from bridge.targets.gguf.runtime import LlamaCpp
from bridge.targets.gguf.tokenizer import describe
from tests import once
from tests.models.gguf_families import byte_tokenizer, piece_tokenizer, save

Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A model of its own, which a test may change."""
    return Path(shutil.copytree(once.directory("gguf-llama", lambda at: save("llama", at / "m")) / "m", tmp_path / "m"))


def edit(path: Path, change: Change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def model(**changed: Any) -> Change:
    return lambda content: content["model"].update(changed)


def add(**token: Any) -> Change:
    return lambda content: content["added_tokens"].append(token)


BROKEN: dict[str, tuple[Change, str]] = {
    "no model": (lambda content: content.update(model=None), r"model is None, where an object"),
    "list of tokens": (model(vocab=["a", "b"]), r"model\.vocab is a list, where an object of tokens"),
    "id that is a text": (model(vocab={"a": "0"}), r"model\.vocab\['a'\] is '0', where an id"),
    "negative id": (model(vocab={"a": -1}), r"model\.vocab\['a'\] is -1, where an id"),
    "half a character": (model(vocab={"\ud800": 1}), r"no Unicode text"),
    "merge of one": (model(merges=["a b", "ab"]), r"model\.merges\[1\] is 'ab', where two texts"),
    "no merges": (model(merges=None), r"model\.merges is None, where a list"),
    "unknown token": (model(unk_token=3), r"model\.unk_token is 3, where a text"),
    "no added tokens": (lambda content: content.update(added_tokens=None), r"added_tokens is None, where a list"),
    "added without id": (add(content="x"), r"added_tokens\[3\]\.id is None, where a whole number"),
    "added with a negative id": (add(id=-2, content="x"), r"added_tokens\[3\]\.id is -2"),
    "added without text": (add(id=299), r"added_tokens\[3\]\.content is None, where a text"),
    "normalizer": (lambda content: content.update(normalizer="NFC"), r"normalizer is 'NFC', where null, or an object"),
    "parts": (
        lambda content: content.update(pre_tokenizer={"type": "Sequence", "pretokenizers": None}),
        r"pre_tokenizer\.pretokenizers is None, where a list",
    ),
    "template": (
        lambda content: content.update(post_processor={"type": "TemplateProcessing", "single": [{"SpecialToken": 1}]}),
        "puts several tokens before or after a text",
    ),
    "token of a template": (
        lambda content: content.update(
            post_processor={"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<no>"}}]}
        ),
        "puts '<no>' before or after a text, which is no token",
    ),
    "other processor": (
        lambda content: content.update(post_processor={"type": "RobertaProcessing"}), "adds tokens to a text by",
    ),
    "suffix": (model(end_of_word_suffix="</w>"), "puts a prefix or suffix to parts of words"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(BROKEN))
def test_a_broken_tokenizer_is_told_while_planning(what: str, source: Path) -> None:
    change, words = BROKEN[what]
    edit(source / "tokenizer.json", change)
    with pytest.raises(PlanError, match=rf"tokenizer\.json: (.|\n)*{words}"):
        bridge.plan(str(source), target="gguf")


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("content", [b"[1]", b"{", b'"\xff"'], ids=str)
def test_a_file_that_is_no_object_or_text_is_told(name: str, content: bytes, source: Path) -> None:
    if name.endswith("jinja"):
        content = b"\xff" + content
    (source / name).write_bytes(content)
    with pytest.raises(PlanError, match=rf"{name}: (cannot be read as|is a list)"):
        bridge.plan(str(source), target="gguf")


def test_all_problems_are_in_one_message(source: Path) -> None:
    edit(source / "tokenizer.json", model(merges=None, vocab=[]))
    (source / "chat_template.jinja").write_bytes(b"\xff")
    edit(source / "config.json", lambda config: config.update(rms_norm_eps=0))
    with pytest.raises(PlanError, match=r"(?s)rms_norm_eps.*model\.vocab.*model\.merges.*chat_template\.jinja"):
        bridge.plan(str(source), target="gguf")


FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "epsilon": ({"rms_norm_eps": 0}, "rms_norm_eps is 0; it should be a positive number"),
    "context": ({"max_position_embeddings": "8k"}, "max_position_embeddings is '8k'; it should be a positive whole"),
    "rope": ({"rope_parameters": "linear"}, "rope_parameters is 'linear'; it should be an object"),
    "rope of layers": ({"rope_parameters": {"full_attention": [1]}}, "full_attention is a list; it should be an"),
    "linear": ({"rope_parameters": {"rope_type": "linear"}}, "linear scaling has no factor"),
    "llama3": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "high_freq_factor": 4.0}},
        "llama3 scaling has no low_freq_factor",
    ),
    "equal factors": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4.0}},
        "low_freq_factor is 4; it should be less than high_freq_factor",
    ),
    "theta": ({"rope_parameters": {"rope_theta": -1}}, "rope_theta is -1"),
    "too long": ({"max_position_embeddings": 2**40}, "max_position_embeddings is 1099511627776"),
}  # fmt: skip


@pytest.mark.parametrize("what", list(FIELDS))
def test_a_field_that_is_no_number_of_its_kind_is_told_while_planning(what: str, source: Path) -> None:
    changed, words = FIELDS[what]
    edit(source / "config.json", lambda config: config.update(changed))
    with pytest.raises(PlanError, match=rf"config\.json: {words}"):
        bridge.plan(str(source), target="gguf")


def test_caps_that_gemma_2_leaves_out_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="attn_logit_softcapping is null"):
        bridge.plan(str(save("gemma2", tmp_path, attn_logit_softcapping=None)), target="gguf")


@pytest.mark.parametrize("kind", ["bytes", "prepend", "metaspace"])
@pytest.mark.parametrize("normalizer", ["Lowercase", "NFKC", "NFC", "Strip"])
def test_a_tokenizer_that_changes_text_is_refused(kind: str, normalizer: str, source: Path) -> None:
    tokenizer = byte_tokenizer() if kind == "bytes" else piece_tokenizer(kind)
    added = getattr(normalizers, normalizer)()
    tokenizer.normalizer = normalizers.Sequence([added, *([tokenizer.normalizer] if kind == "prepend" else [])])
    tokenizer.save(str(source / "tokenizer.json"))
    edit(source / "tokenizer.json", lambda content: content["model"].update(
        vocab={text: number for text, number in content["model"]["vocab"].items() if number < 300}
    ))  # fmt: skip
    if (kind, normalizer) == ("bytes", "NFC"):
        assert any("combining marks" in note for note in bridge.plan(str(source), target="gguf").notes)
        return
    with pytest.raises(PlanError, match=rf"({normalizer}.*which llama.cpp does not|prepares text with {normalizer})"):
        bridge.plan(str(source), target="gguf")


def test_letters_apart_from_their_marks_are_other_tokens_in_llama_cpp(source: Path) -> None:
    """The reason of the note: if llama.cpp learns NFC, it can go."""
    tokenizer = byte_tokenizer()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.save(str(source / "tokenizer.json"))
    bridge.convert(str(source), target="gguf", out=source.parent / "out", verify=False)
    engine = LlamaCpp(source.parent / "out" / "model.gguf")
    together, apart = "caf\u00e9", "cafe\u0301"
    assert tokenizer.encode(together).ids == tokenizer.encode(apart).ids
    assert engine.prompt_tokens(together) == len(tokenizer.encode(together).ids) < engine.prompt_tokens(apart)


@pytest.mark.parametrize("name", ["bos_token_id", "eos_token_id"])
@pytest.mark.parametrize("value", [300, -1, [2, 300], "2"], ids=str)
def test_a_special_token_that_is_none_is_refused(name: str, value: Any, source: Path) -> None:
    (source / "generation_config.json").unlink(missing_ok=True)
    edit(source / "config.json", lambda config: config.update({name: value}))
    with pytest.raises(PlanError, match=f"config.json: {name} is .*and the tokens are 0 to 299"):
        bridge.plan(str(source), target="gguf")


def test_a_special_token_that_is_none_is_told_with_the_file_that_names_it(source: Path) -> None:
    (source / "generation_config.json").write_text('{"eos_token_id": 300}')
    with pytest.raises(PlanError, match=r"\n  generation_config.json: eos_token_id is 300"):
        bridge.plan(str(source), target="gguf")
    (source / "generation_config.json").unlink()
    words = {"eos_token": "<end>", "added_tokens_decoder": {"301": {"content": "<end>"}}}
    (source / "tokenizer_config.json").write_text(json.dumps(words))
    with pytest.raises(PlanError, match=r"\n  tokenizer_config.json: eos_token_id is 301"):
        bridge.plan(str(source), target="gguf")


def test_padding_that_is_no_token_is_left_out_and_told(source: Path) -> None:
    (source / "generation_config.json").unlink(missing_ok=True)
    edit(source / "config.json", lambda config: config.update(pad_token_id=-1, eos_token_id=[2, 5]))
    plan = bridge.plan(str(source), target="gguf")
    assert any("pad_token_id -1 is left out" in note for note in plan.notes)
    assert any("ends with token 2, 5; the file names 2" in note for note in plan.notes)


def test_a_tokenizer_as_gemmas_is_taken_without_a_space_before_text() -> None:
    """It replaces spaces by a rule, and then splits at spaces, of which none is left."""
    tokenizer = piece_tokenizer("prepend")
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    keys = describe({"tokenizer.json": tokenizer.to_str().encode()}, tokenizer.get_vocab_size(), {})
    assert not keys.problems and keys.keys["tokenizer.ggml.add_space_prefix"] is False


def test_pieces_with_spaces_inside_are_refused_where_text_is_cut_at_spaces() -> None:
    tokenizer = piece_tokenizer("metaspace")
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    content = json.loads(tokenizer.to_str())
    assert not describe({"tokenizer.json": json.dumps(content).encode()}, 400, {}).problems
    content["model"]["merges"].append(["e▁", "t"])
    ((file, why),) = describe({"tokenizer.json": json.dumps(content).encode()}, 400, {}).problems
    assert file == "tokenizer.json" and "has pieces with spaces inside" in why


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_words_that_are_tokens_are_taken_whole_as_the_tokenizer_does(whole: bool, source: Path) -> None:
    """llama.cpp has two names of Llama 3's cuts: one takes "xyz", which no merges make, one does not."""
    tokenizer = byte_tokenizer()
    cut = pre_tokenizers.Split(Regex(token_rows("splits")["llama-bpe"]), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, byte_level])
    content = json.loads(tokenizer.to_str())
    vocab, merges = content["model"]["vocab"], content["model"]["merges"]
    last = max(vocab, key=vocab.__getitem__)
    vocab["xyz"] = vocab.pop(last)
    merges = [pair for pair in merges if "".join(pair) != last]
    content["model"] |= {"merges": merges, "ignore_merges": whole}
    (source / "tokenizer.json").write_text(json.dumps(content))
    bridge.convert(str(source), target="gguf", out=source.parent / "out", verify=False)
    engine, theirs = LlamaCpp(source.parent / "out" / "model.gguf"), Tokenizer.from_file(str(source / "tokenizer.json"))
    assert len(theirs.encode("xyz").ids) == (1 if whole else 3)
    for text in ("xyz", "the xyz", "don't we'll I'D 1234567", "  two  spaces\n\nand lines\t", "x=[{}];//#!"):
        assert engine.prompt_tokens(text) == len(theirs.encode(text).ids), text


@pytest.mark.parametrize("name", ["tekken.json", "tiktoken.model", "tokenizer.model"])
def test_a_tokenizer_in_another_file_is_refused_by_its_name(name: str, source: Path) -> None:
    (source / "tokenizer.json").unlink()
    (source / name).write_text("aGk= 0\n")
    with pytest.raises(PlanError, match=rf"\n  {name}: is the tokenizer, and target gguf reads the tokens from"):
        bridge.plan(str(source), target="gguf")


TEMPLATES = [
    {"name": "default", "template": "{{ 1 }}"}, {"name": "tool use", "template": "{{ 2 }}"},
    {"name": "rag", "template": "{{ 3 }}"},
]  # fmt: skip


@pytest.mark.parametrize("form", ["list", "files", "text"])
def test_chat_templates_have_the_keys_of_gguf_py(form: str, source: Path) -> None:
    """`SpecialVocab` reads the same files."""
    (source / "tokenizer_config.json").write_text('{"model_max_length": 256}')
    if form == "files":
        (source / "chat_template.jinja").write_text("{{ 1 }}")
        (source / "additional_chat_templates").mkdir()
        (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 2 }}")
    else:
        given = TEMPLATES if form == "list" else "{{ 1 }}"
        (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": given}))
    out = source.parent / "out"
    bridge.convert(str(source), target="gguf", out=out, verify=False)
    writer = gguf.GGUFWriter(source.parent / "theirs.gguf", "llama")
    gguf.SpecialVocab(source, n_vocab=300).add_to_gguf(writer, quiet=True)
    theirs = {name: value.value for name, value in writer.kv_data[0].items() if "chat_template" in name}
    ours = {name: value for name, value in GgufFile(out / "model.gguf").metadata.items() if "chat_template" in name}
    assert len(theirs) == {"list": 4, "files": 3, "text": 1}[form]
    listed = "tokenizer.chat_templates"
    assert sorted(ours.pop(listed, ())) == sorted(theirs.pop(listed, ())) and ours == theirs


def test_a_model_without_a_tokenizer_is_told_what_to_do(source: Path) -> None:
    (source / "tokenizer.json").unlink()
    out = source.parent / "out"
    report = bridge.convert(str(source), target="gguf", out=out, verify=False)
    (note,) = [note for note in report.notes if "no tokenizer.json" in note]
    assert "convert with tokenizer= (--tokenizer)" in note and not report.command
    assert "the model has no tokenizer.json, so the file has no tokens" in "\n".join(map(str, report.lines()))
    shutil.copy(once.directory("gguf-llama", lambda at: save("llama", at / "m")) / "m" / "tokenizer.json", out)
    with pytest.raises(CannotRun, match=r"no tokenizer\.json, so the file has no tokens.*--tokenizer"):
        bridge.run(out, "the")
