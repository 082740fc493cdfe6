"""The tokenizer of a Megatron checkpoint is the one that its configuration names, not one that looks like it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from bridge.core.errors import SourceError
from bridge.sources.opening import open_source
from tests.sources.foreign_checkpoints import MODEL, llama, megatron_bridge, nemo_archive, spelled

TINY = Path("examples/models/tiny-llama/tokenizer.json")
ONE, OTHER = "0a" * 16, "0b" * 16


def nemo1(root: Path, tokenizer: dict[str, Any], *members: str) -> Path:
    """An archive with files of these names, each holding its own name, and a section `tokenizer`."""
    root.mkdir()
    for member in members:
        (root / member).write_text(member)
    return nemo_archive(root, {"model_weights.ckpt": spelled(llama(), "megatron")}, tokenizer=tokenizer)


def nemo2(root: Path, tokenizer: Any, *files: str) -> Path:
    """A NeMo 2 directory with files of these names below `context`."""
    run = megatron_bridge(root / "run", spelled(llama(), "megatron"))
    for name in files:
        (root / "nemo/context" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "nemo/context" / name).write_text(name)
    (root / "nemo/context").mkdir(parents=True, exist_ok=True)
    raw = {"_target_": "nemo.Model", "config": MODEL, "tokenizer": tokenizer}
    (root / "nemo/context/model.yaml").write_text(yaml.safe_dump(raw))
    shutil.move(run / "iter_0000100", root / "nemo/weights")
    (root / "nemo/weights/run_config.yaml").unlink()
    return root / "nemo"


def carried(checkpoint: Path, **arguments: Any) -> dict[str, str]:
    """What transformers finds beside the weights: name -> the content, which is the name that it had."""
    files = open_source(checkpoint, **arguments).side_files
    texts = {name: file.read_bytes() if isinstance(file, Path) else file for name, file in files.items()}
    return {name: text.decode() for name, text in texts.items() if name != "config.json"}


def test_the_member_that_nemo_1_names_is_carried(tmp_path: Path) -> None:
    """As whoever loads it calls it, and not the one that comes first, or has the likelier name."""
    section = {"library": "sentencepiece", "model": f"nemo:{OTHER}_mistral-v3.model", "vocab_file": None}
    members = f"{ONE}_tokenizer.model", f"{OTHER}_mistral-v3.model", "tokenizer.json"
    archive = nemo1(tmp_path / "llama", section, *members)
    assert carried(archive) == {"tokenizer.model": members[1]}
    assert open_source(archive).dropped[members[0]] == f"another tokenizer's than {members[1]}"
    assert carried(tmp_path / "llama") == {"tokenizer.model": members[1]}  # unpacked


def test_vocabulary_and_merges_are_named_apart(tmp_path: Path) -> None:
    section = {"library": "megatron", "vocab_file": f"nemo:{ONE}_gpt2-vocab.json", "merge_file": f"nemo:{ONE}_bpe.txt"}
    archive = nemo1(tmp_path / "llama", section, f"{ONE}_gpt2-vocab.json", f"{ONE}_bpe.txt")
    assert carried(archive) == {"vocab.json": f"{ONE}_gpt2-vocab.json", "merges.txt": f"{ONE}_bpe.txt"}


def test_a_member_that_is_missing_is_named_unless_a_tokenizer_is_given(tmp_path: Path) -> None:
    section = {"model": f"nemo:{ONE}_tokenizer.model", "merge_file": "nemo:gone.txt"}
    archive = nemo1(tmp_path / "llama", section, f"{OTHER}_tokenizer.model")
    with pytest.raises(SourceError) as caught:
        open_source(archive)
    for key, member in (("model", f"{ONE}_tokenizer.model"), ("merge_file", "gone.txt")):
        assert f"model_config.yaml: tokenizer.{key} names {member}, which is not there; get the " in str(caught.value)
    assert carried(archive, tokenizer="examples/models/tiny-llama")  # its own file is left to the guess


def test_words_that_name_no_member_leave_it_to_what_lies_there(tmp_path: Path) -> None:
    section = {"library": "huggingface", "type": "meta-llama/Llama-3.1-8B", "model": "/raid/tokenizer.model"}
    archive = nemo1(tmp_path / "llama", section, f"{ONE}_tokenizer.json")
    assert carried(archive) == {"tokenizer.json": f"{ONE}_tokenizer.json"}


def test_of_two_that_nothing_tells_apart_none_is_taken(tmp_path: Path) -> None:
    members = f"{ONE}_tokenizer.model", f"{OTHER}_tokenizer.model"
    archive = nemo1(tmp_path / "llama", {}, *members, f"{ONE}_tokenizer_config.json")
    assert carried(archive) == {"tokenizer_config.json": f"{ONE}_tokenizer_config.json"}
    for member in members:
        assert open_source(archive).dropped[member] == "one of 2 that could be tokenizer.model; give tokenizer="


def test_the_folder_that_nemo_2_names_is_carried(tmp_path: Path) -> None:
    section = {"_target_": "nemo...AutoTokenizer", "pretrained_model_name": "nemo_tokenizer", "vocab_file": None}
    others = "a/tokenizer.json", "a/vocab.json", "a/merges.txt"
    found = nemo2(tmp_path, section, "nemo_tokenizer/tokenizer.json", "nemo_tokenizer/README.md", *others)
    assert carried(found) == {"tokenizer.json": "nemo_tokenizer/tokenizer.json"}
    assert open_source(found).dropped["context/a/merges.txt"].startswith("another tokenizer's than context/nemo_")


def test_the_file_that_nemo_2_names_is_carried_or_named(tmp_path: Path) -> None:
    section = {"_target_": "nemo...SentencePieceTokenizer", "model_path": "mistral.model"}
    assert carried(nemo2(tmp_path / "whole", section, "mistral.model")) == {"tokenizer.model": "mistral.model"}
    with pytest.raises(SourceError, match=r"model.yaml: tokenizer.model_path names context/mistral.model, which is"):
        open_source(nemo2(tmp_path / "less", section))
    folder = {"pretrained_model_name": "nemo_tokenizer"}
    with pytest.raises(SourceError, match=r"tokenizer.pretrained_model_name names context/nemo_tokenizer/, which is"):
        open_source(nemo2(tmp_path / "none", folder, "tokenizer.json"))


@pytest.mark.parametrize(
    "section",
    [
        {"pretrained_model_name": "meta-llama/Llama-3.1-8B"},
        {"pretrained_model_name": {"_target_": "nemo...DirOrStringArtifact", "attr": "gpt2", "skip": True}},
        {"model_path": "/raid/tokenizer.model"},
        {"model_path": "../../tokenizer.json"},
        "nothing",
    ],
)
def test_what_names_no_file_of_nemo_2_leaves_it_to_what_lies_there(section: Any, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("outside")
    assert carried(nemo2(tmp_path, section, "tokenizer.json")) == {"tokenizer.json": "tokenizer.json"}


def test_a_named_tokenizer_loads(tmp_path: Path) -> None:
    archive = nemo1(tmp_path / "llama", {"tokenizer_model": f"nemo:{ONE}_tokenizer.json"}, f"{ONE}_tokenizer.json")
    shutil.copy(TINY, tmp_path / f"llama/{ONE}_tokenizer.json")
    assert open_source(tmp_path / "llama").load_tokenizer()("The")["input_ids"]
    assert archive.is_file()
