"""Megatron's checkpoints as sources, of every layout: transformers answers from them as megatron-core does itself."""

from __future__ import annotations

import gzip
import io
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import PreTrainedTokenizerFast

import bridge
from bridge.core.errors import SourceError
from bridge.sources.opening import open_source
from tests.covering import grid
from tests.models.megatron_families import EVERY, FAMILIES, VOCAB
from tests.oracles import megatron_oracle
from tests.sources.foreign_checkpoints import CONFIG, MODEL, llama, megatron_bridge, nemo_archive, spelled, stacked
from tests.sources.test_oracles import CLOSE, answer
from tests.sources.weights.dcp_saves import save

# How the same weights are laid out: names of both specs, layers together and apart, ranks of two kinds.
LAYOUTS: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "bridge", {"layers": "single", "optimizer": True}),
    ("llama", "bridge", {"tp": 2, "pp": 2}),
    ("llama", "nemo1", {"tp": 2}),
    ("llama-mqa", "nemo1", {"tp": 2, "pp": 2}),
    ("qwen2-tied", "nemo1", {"pp": 2}),
    ("mixtral", "nemo1", {"tp": 2, "pp": 2}),
    ("mixtral-grouped", "bridge", {"layers": "singleton"}),
    ("qwen3-moe", "bridge", {"layers": "singleton", "tp": 2}),
    ("qwen3-moe", "nemo2", {"layers": "single"}),
    ("mixtral", "bridge", {"layers": "single", "spec": "local"}),
    ("gpt", "nemo2", {"spec": "local"}),
    ("qwen2-tied", "megatron-lm-legacy", {"tp": 2, "pp": 2}),
    ("gpt", "nemo1", {"tp": 2, "spec": "local"}),
    ("gemma2", "bridge", {}),
    ("starcoder2", "nemo2", {}),
    ("starcoder2", "bridge", {"tp": 2}),
    ("deepseek", "bridge", {}),
    ("deepseek", "bridge", {"layers": "singleton"}),
    ("deepseek", "bridge", {"layers": "single", "spec": "local"}),
    ("deepseek-plain", "bridge", {"tp": 2}),
    ("glm4-moe", "bridge", {}),
    ("glm4-moe", "bridge", {"layers": "singleton", "tp": 2}),
    ("glm4-moe-plain", "bridge", {"layers": "single", "spec": "local"}),
    ("gpt_oss", "bridge", {}),
    ("gpt_oss", "bridge", {"layers": "single", "spec": "local"}),
]
# Of models that a writer has no words for: its fused gelu is the other one, its RoPE scaling is always 8, or not
# written at all. Megatron-LM has none for Gemma at all.
WORDLESS = {
    ("gpt", "nemo1"): {"activation_function": "gelu"},
    ("llama-rope", "nemo1"): {"rope_parameters": FAMILIES["llama-rope"].hf["rope_parameters"]},
    ("gpt_oss", "bridge"): {"rope_parameters": EVERY["gpt_oss"].hf["rope_parameters"]},
}


def refusal(model: object, **arguments: Any) -> str:
    with pytest.raises(SourceError) as caught:
        open_source(model, **arguments)
    return str(caught.value)


def assert_answers(name: str, kind: str, scratch: Path, **options: Any) -> None:
    """Convert, load in transformers, and compare logits."""
    made = megatron_oracle.family(name)
    assert made.ids.shape[1] >= 70
    checkpoint = made.save(scratch / "in", kind, **options)
    config = {"vocab_size": VOCAB} | WORDLESS.get((name, kind.removesuffix("-dist")), {})
    source = open_source(checkpoint, config=config)
    (scratch / "hf").mkdir()
    state = {tensor: source.read(tensor) for tensor in source.specs}
    found = answer(state, dict(source.config), made.ids, scratch / "hf")
    assert np.abs(found - made.logits).max() < CLOSE


@grid(
    {"name": list(FAMILIES), "kind": megatron_oracle.KINDS},
    valid=lambda name, kind: (name, kind[:11]) != ("gemma", "megatron-lm"),
    shows=lambda name, kind: {(name, kind)} & WORDLESS.keys(),
)
def test_transformers_answers_as_megatron_does(name: str, kind: str, tmp_path: Path) -> None:
    assert_answers(name, kind, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "kind", "options"), LAYOUTS)
def test_layout_does_not_change_the_answer(name: str, kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    assert_answers(name, kind, tmp_path, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *(name for name in FAMILIES if name != "gpt"),
        *("gemma2", "deepseek", "deepseek-plain", "gpt_oss", "glm4-moe", "glm4-moe-plain"),
    ],
)
def test_tensors_are_those_of_megatron_bridge(name: str, tmp_path: Path) -> None:
    config = {"vocab_size": VOCAB} | WORDLESS.get((name, "bridge"), {})
    source = open_source(megatron_oracle.family(name).save(tmp_path, "bridge"), config=config)
    wanted = megatron_oracle.bridged(name)
    assert source.specs.keys() == wanted.keys()
    assert all(np.array_equal(source.read(tensor), array) for tensor, array in wanted.items())


def assert_same(source: Any, hf: dict[str, torch.Tensor]) -> None:
    assert source.specs.keys() == hf.keys()
    assert all(np.array_equal(source.read(name), tensor.numpy()) for name, tensor in hf.items())


@pytest.mark.slow
def test_a_run_an_iteration_and_a_bare_directory_are_one_model(tmp_path: Path) -> None:
    hf = llama()
    run = megatron_bridge(tmp_path / "run", stacked(spelled(hf, "megatron")))
    assert_same(open_source(run), hf)
    assert_same(open_source(run / "iter_0000100"), hf)
    nemo = tmp_path / "nemo2"
    (nemo / "context").mkdir(parents=True)
    (nemo / "context/model.yaml").write_text(yaml.safe_dump({"config": MODEL, "_target_": "nemo.Model"}))
    shutil.copytree(run / "iter_0000100", nemo / "weights", ignore=shutil.ignore_patterns("*.yaml"))
    assert_same(open_source(nemo), hf)
    assert_same(open_source(nemo / "weights"), hf)
    (run / "iter_0000100/run_config.yaml").unlink()
    assert_same(open_source(run / "iter_0000100", config=CONFIG), hf)
    for name in ("common.pt", "metadata.json"):  # what is left is any distributed checkpoint
        (run / "iter_0000100" / name).unlink()
    assert_same(open_source(run / "iter_0000100", config=CONFIG), hf)


def test_the_iteration_is_the_one_that_the_run_names(tmp_path: Path) -> None:
    megatron_bridge(tmp_path, spelled(llama(), "megatron"))
    shutil.copytree(tmp_path / "iter_0000100", tmp_path / "iter_0000200")
    source = open_source(tmp_path)
    assert source.dropped["iter_0000200/"] == "another iteration; iter_0000100 is read"
    (tmp_path / "latest_checkpointed_iteration.txt").unlink()
    assert open_source(tmp_path).dropped["iter_0000100/"] == "another iteration; iter_0000200 is read"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("300")
    assert refusal(tmp_path) == (
        f"{tmp_path}: latest_checkpointed_iteration.txt says iteration 300, but the iterations here are: "
        "iter_0000100, iter_0000200; give one"
    )
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert "'release' is not an iteration; give the directory of one" in refusal(tmp_path)
    (tmp_path / "iter_0000200").rename(tmp_path / "release")
    assert open_source(tmp_path).specs.keys() == llama().keys()


def test_checkpoints_of_several_kinds_are_not_chosen_between(tmp_path: Path) -> None:
    run = megatron_bridge(tmp_path, spelled(llama(), "megatron"))
    (run / "consolidated.00.pth").write_bytes(b"")
    assert refusal(run) == (
        f"{run}: holds 2 checkpoints of several kinds (iter_0000100, consolidated.00.pth); give the path of one, or "
        "move the others away"
    )


@pytest.mark.slow
def test_an_archive_is_read_in_place_and_unpacked_alike(tmp_path: Path) -> None:
    hf = llama()
    archive = nemo_archive(tmp_path / "llama", {"model_weights.ckpt": spelled(hf, "megatron")})
    assert_same(open_source(tmp_path / "llama"), hf)
    shutil.rmtree(tmp_path / "llama")
    assert_same(open_source(archive), hf)
    assert_same(open_source(tmp_path), hf)  # a directory with one archive
    shutil.copy(archive, tmp_path / "other.nemo")
    assert refusal(tmp_path) == f"{tmp_path}: 2 archives; give one: llama.nemo, other.nemo"


@pytest.mark.filterwarnings("ignore:.*compressed; a copy")
def test_a_compressed_archive_is_the_model_of_the_plain_one(tmp_path: Path) -> None:
    archive = nemo_archive(tmp_path / "llama", {"model_weights.ckpt": spelled(llama(), "megatron")})
    (tmp_path / "packed").mkdir()
    packed = tmp_path / "packed" / archive.name
    packed.write_bytes(gzip.compress(archive.read_bytes()))
    plain, found = open_source(archive), open_source(packed)
    assert found.config == plain.config and found.specs == plain.specs and found.name == plain.name
    assert all((found.read(name) == plain.read(name)).all() for name in plain.specs)
    assert found.fingerprint == open_source(packed).fingerprint


def test_an_archive_with_members_outside_is_refused(tmp_path: Path) -> None:
    archive = nemo_archive(tmp_path / "llama", {"model_weights.ckpt": spelled(llama(), "megatron")})
    with tarfile.open(archive, "a:") as tar:
        member = tarfile.TarInfo("../../outside.txt")
        member.size = 3
        tar.addfile(member, io.BytesIO(b"out"))
    assert "holds names outside its directory (../../outside.txt)" in refusal(archive)
    assert not list(tmp_path.parent.glob("outside.txt"))


def test_an_archives_tokenizer_is_carried_and_loads(tmp_path: Path) -> None:
    tokenizer = Path("examples/models/tiny-llama/tokenizer.json")
    root = tmp_path / "llama"
    root.mkdir()
    shutil.copy(tokenizer, root / f"{'0a' * 16}_tokenizer.json")
    archive = nemo_archive(root, {"model_weights.ckpt": spelled(llama(), "megatron")})
    source = open_source(archive)
    assert source.side_files["tokenizer.json"] == tokenizer.read_bytes()
    assert source.side_files.keys() == {"tokenizer.json", "config.json"}
    assert source.load_tokenizer()("The")["input_ids"]


def test_a_checkpoint_without_tokenizer_asks_for_one(tmp_path: Path) -> None:
    run = megatron_bridge(tmp_path, spelled(llama(), "megatron"))
    with pytest.raises(SourceError, match="the checkpoint has no tokenizer; give tokenizer="):
        open_source(run).load_tokenizer()


def test_padding_of_the_vocabulary_is_cut_or_asked_about(tmp_path: Path) -> None:
    run = megatron_bridge(tmp_path, spelled(llama(), "megatron"), vocab_size=None)
    message = refusal(run)
    assert "    vocab_size: tokens with an embedding; the tensors have 112 rows" in message
    assert open_source(run, config={"vocab_size": 90}).specs["lm_head.weight"].shape == (90, 48)
    message = refusal(run, config={"vocab_size": 113})
    assert "config=: vocab_size = 113, but the tensors have 112 rows" in message


def tokenizer_of(count: int, root: Path) -> Any:
    """A tokenizer of transformers with so many tokens, one of them added, in `root`."""
    from tokenizers import Tokenizer, models

    words = models.WordLevel({f"word{at}": at for at in range(count - 1)}, unk_token="word0")
    made = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="<end>")
    assert len(made) == count
    made.save_pretrained(root)
    return made


def nemo2(root: Path, **config: Any) -> Path:
    """A directory of NeMo 2, whose tokenizer is in its context."""
    save(root / "weights", {f"module.{name}": tensor for name, tensor in spelled(llama(), "megatron").items()})
    tokenizer_of(97, root / "context" / "nemo_tokenizer")
    model = MODEL | {"_target_": "nemo.collections.llm.gpt.model.llama.LlamaConfig", "vocab_size": None} | config
    section = {"_target_": "nemo.AutoTokenizer", "pretrained_model_name": "nemo_tokenizer"}
    (root / "context/model.yaml").write_text(yaml.safe_dump({"config": model, "tokenizer": section}))
    return root


def test_a_tokenizer_tells_the_vocabulary_that_nemos_configuration_does_not(tmp_path: Path) -> None:
    """NeMo 1 and 2 ask it, and pad the embedding: here 97 tokens to 112 rows."""
    directory = nemo2(tmp_path / "two", make_vocab_size_divisible_by=16)
    (tmp_path / "one").mkdir()
    shutil.copy(directory / "context/nemo_tokenizer/tokenizer.json", tmp_path / "one" / f"{'0a' * 16}_tokenizer.json")
    archive = nemo_archive(
        tmp_path / "one", {"model_weights.ckpt": spelled(llama(), "megatron")}, override_vocab_size=None,
        make_vocab_size_divisible_by=8, tokenizer={"library": "huggingface"},
    )  # fmt: skip
    for checkpoint in (directory, archive):
        source = open_source(checkpoint)
        assert source.config["vocab_size"] == 97 and source.specs["lm_head.weight"].shape == (97, 48)
        assert open_source(checkpoint, config={"vocab_size": 90}).config["vocab_size"] == 90
        assert bridge.plan(checkpoint, "megatron", keep={"ffn": 64}).outputs


def test_a_given_tokenizer_tells_the_vocabulary_unless_it_is_another_models(tmp_path: Path) -> None:
    run = megatron_bridge(
        tmp_path / "run", spelled(llama(), "megatron"), vocab_size=None, make_vocab_size_divisible_by=8
    )
    made = tokenizer_of(97, tmp_path / "fits")
    for given in (made, tmp_path / "fits", str(tmp_path / "fits")):
        assert open_source(run, tokenizer=given).config["vocab_size"] == 97
    tokenizer_of(60, tmp_path / "fewer")
    message = refusal(run, tokenizer=tmp_path / "fewer")
    assert "fewer/tokenizer.json = 60, padded to a multiple of 8 times the ranks, but the tensors have 112" in message
    assert 'give the tokenizer of the model, or config={"vocab_size": ...}' in message
    tokenizer_of(113, tmp_path / "more")
    assert "= 113, but the tensors have 112 rows" in refusal(run, tokenizer=tmp_path / "more")


@pytest.mark.slow
def test_tied_models_have_no_head(tmp_path: Path) -> None:
    state = spelled(llama(), "megatron")
    del state["output_layer.weight"]
    run = megatron_bridge(tmp_path / "tied", state, share_embeddings_and_output_weights=True)
    assert open_source(run).config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in open_source(run).specs
    contradicting = megatron_bridge(tmp_path / "untied", state)
    assert "share_embeddings_and_output_weights = False, but the tensors have True" in refusal(contradicting)


def test_norms_around_zero_are_those_around_one_shifted(tmp_path: Path) -> None:
    hf = llama()
    state = {n: t - 1 if "norm" in n else t for n, t in spelled(hf, "megatron").items()}
    source = open_source(megatron_bridge(tmp_path, state, layernorm_zero_centered_gamma=True))
    for name, tensor in hf.items():
        wanted = (tensor - 1) + 1 if "norm" in name else tensor
        assert np.array_equal(source.read(name), wanted.numpy())


def test_training_state_and_run_are_told_and_not_carried(tmp_path: Path) -> None:
    state: dict[str, Any] = spelled(llama(), "megatron")
    extra = {f"decoder.layers.mlp.linear_fc1._extra_state/shard_{n}_3": io.BytesIO(b"state") for n in range(3)}
    moments = {f"optimizer.state.exp_avg.{name}": tensor for name, tensor in state.items()}
    source = open_source(megatron_bridge(tmp_path, state | moments | extra))
    nbytes = sum(tensor.nbytes for tensor in moments.values())
    assert source.dropped["optimizer.*"] == f"training state, {nbytes} bytes"
    assert source.dropped["decoder.layers.mlp.linear_fc1._extra_state"] == "state of Transformer Engine"
    assert source.dropped["common.pt"] == "of the training run, not of the model"
    assert source.dropped["run_config.yaml"] == "its place is taken by the config.json that is made of it"
    assert source.side_files.keys() == {"config.json"}


@pytest.mark.slow
def test_plan_imports_no_framework(tmp_path: Path) -> None:
    run = megatron_bridge(tmp_path, spelled(llama(), "megatron"))
    code = (
        "import sys, bridge; plan = bridge.plan(sys.argv[1], 'hf', 'int8_wo'); "
        "print(len(plan.quantized), sorted({'torch', 'transformers', 'megatron', 'numba'} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-c", code, run], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "21 []"


def test_every_contradiction_is_told_at_once(tmp_path: Path) -> None:
    run = megatron_bridge(
        tmp_path, spelled(llama(), "megatron"), num_layers=4, hidden_size=56, ffn_hidden_size=81, num_query_groups=3
    )
    message = refusal(run)
    said = "run_config.yaml: model."
    for text in (
        f"{said}num_layers = 4, but the tensors have 3: decoder.layers.2.",
        f"{said}hidden_size = 56, but the tensors have 48: decoder.final_layernorm.weight (48,)",
        f"{said}ffn_hidden_size = 81, but the tensors have 80: decoder.layers.0.mlp.linear_fc2.weight (48, 80)",
        f"{said}num_query_groups = 3), but the tensors have 100: decoder.layers.0.self_attention.linear_qkv.weight",
    ):
        assert text in message
    assert "the model's configuration, 4 problems" in message


def test_a_tensor_of_an_unknown_module_is_named(tmp_path: Path) -> None:
    state = spelled(llama(), "megatron")
    state |= {f"decoder.layers.{n}.self_attention.gate.weight": torch.ones(3) for n in range(3)}
    message = refusal(megatron_bridge(tmp_path, state))
    assert "is not a LlamaForCausalLM of this config: 1 problem\n" in message
    assert "decoder.layers.{0..2}.self_attention.gate.weight: " in message
    assert "megatron.toml has no row for it" in message


def test_a_missing_and_a_truncated_file_are_named(tmp_path: Path) -> None:
    run = megatron_bridge(tmp_path, spelled(llama(), "megatron"))
    file = run / "iter_0000100/__0_0.distcp"
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    assert "__0_0.distcp: shorter than .metadata says: it has" in refusal(run)
    file.unlink()
    assert "__0_0.distcp: missing, though .metadata names it; copy it again" in refusal(run)


def test_a_directory_without_weights_says_so(tmp_path: Path) -> None:
    (tmp_path / "context").mkdir()
    (tmp_path / "context/model.yaml").write_text("config: {}")
    assert "no weights: neither a distributed checkpoint (.metadata, *.distcp) nor files of ranks" in refusal(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["hf", "tripy", "trtllm"])
def test_other_targets_write_what_they_write_of_the_hugging_face_checkpoint(target: str, tmp_path: Path) -> None:
    run = megatron_bridge(tmp_path / "run", stacked(spelled(llama(torch.bfloat16), "megatron")))
    bridge.convert(run, "hf", out=tmp_path / "hf", verify=False)
    written: list[dict[str, bytes]] = []
    for number, model in enumerate((run, tmp_path / "hf")):
        out = tmp_path / str(number)
        report = bridge.convert(model, target, "int8_wo", out=out, verify=False)
        assert report.tensors > len(llama())  # and scales
        files = [path for path in out.rglob("*") if path.is_file()]
        written.append({path.relative_to(out).as_posix(): path.read_bytes() for path in files})
    ours, theirs = written
    assert any(name.endswith(".safetensors") for name in ours)
    told = {"bridge.json", "report.json", "report.html", "README.md"}  # what they were made of
    assert ours.keys() == theirs.keys()
    assert [name for name in ours.keys() - told if ours[name] != theirs[name]] == []


@pytest.mark.slow
@pytest.mark.product  # a source's tensors are those of any other by then
def test_onnx_answers_as_the_model_does(tmp_path: Path) -> None:
    run = megatron_bridge(tmp_path / "run", stacked(spelled(llama(), "megatron")))
    tokenizer = "examples/models/tiny-llama"
    report = bridge.convert(run, "trt", "int8_wo", out=tmp_path / "trt", tokenizer=tokenizer)
    assert report.passed
    assert bridge.verify(tmp_path / "trt", against=run, tokenizer=tokenizer).passed
