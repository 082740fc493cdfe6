"""Every tensor, object and file of a foreign checkpoint is used or named; what contradicts itself is not guessed at."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bridge
from bridge.core.errors import SourceError
from bridge.sources.opening import open_source
from tests.sources.foreign_checkpoints import CONFIG, Tensors, llama, megatron_bridge, meta, nemo_archive, spelled
from tests.sources.weights.dcp_saves import save
from tests.tables import foreign as formulas
from tests.tables.checkpoints import headers

TIED = CONFIG | {"tie_word_embeddings": True}


def refusal(model: object, **arguments: Any) -> str:
    with pytest.raises(SourceError) as caught:
        open_source(model, **arguments)
    return str(caught.value)


def packed(root: Path) -> Path:
    archive = root.with_suffix(".nemo")
    with tarfile.open(archive, "w:") as tar:
        tar.add(root, arcname=".")
    return archive


def shares(state: Tensors, count: int = 2) -> list[Tensors]:
    """Tensor-parallel shares of a Llama in Megatron's names."""
    found: list[Tensors] = [{} for _ in range(count)]
    for name, tensor in state.items():
        for rank, held in enumerate(found):
            if "norm" in name:
                held[name] = tensor
            elif "linear_fc1" in name:
                held[name] = torch.cat([half.chunk(count)[rank] for half in tensor.chunk(2)])
            else:
                axis = 1 if "linear_proj" in name or "linear_fc2" in name else 0
                held[name] = tensor.chunk(count, axis)[rank].clone()
    return found


def tensor_parallel(root: Path, parts: Iterable[Tensors], **config: Any) -> Path:
    return nemo_archive(root, {f"mp_rank_{n:02}/model_weights.ckpt": part for n, part in enumerate(parts)}, **config)


def test_shares_behind_several_prefixes_are_joined(tmp_path: Path) -> None:
    """NeMo 1's O2 wraps the module once more: `model.module.`."""
    hf = llama()
    state = {f"module.{name}": tensor for name, tensor in spelled(hf, "megatron").items()}
    source = open_source(tensor_parallel(tmp_path / "llama", shares(state)))
    assert source.specs.keys() == hf.keys()
    assert all(np.array_equal(source.read(name), tensor.numpy()) for name, tensor in hf.items())


def test_the_state_of_an_unknown_module_is_named(tmp_path: Path) -> None:
    state: dict[str, Any] = spelled(llama(), "megatron")
    known = {f"decoder.layers.{module}._extra_state/shard_{n}_3": io.BytesIO(b"state")
             for n in range(3) for module in ("mlp.linear_fc1", "self_attention.core_attention")}  # fmt: skip
    source = open_source(megatron_bridge(tmp_path / "a", state | known | {"steps": io.BytesIO(b"7")}))
    assert source.dropped["decoder.layers.mlp.linear_fc1._extra_state"] == "state of Transformer Engine"
    assert source.dropped["steps"] == "an object of the training program, no tensor"
    unknown = {f"decoder.layers.mlp.adapter._extra_state/shard_{n}_3": io.BytesIO(b"state") for n in range(3)}
    message = refusal(megatron_bridge(tmp_path / "b", state | known | unknown))
    assert (
        "decoder.layers.mlp.adapter._extra_state: the state of a module that mappings/dialects/megatron.toml has"
        in message
    )
    assert "linear_fc1" not in message


def test_the_state_of_an_unknown_module_among_a_ranks_tensors_is_named(tmp_path: Path) -> None:
    state: dict[str, Any] = spelled(llama(), "megatron")
    extra = (io.BytesIO(b"x"), io.BytesIO(), b"", b"x", bytearray(), bytearray(b"x"))  # empty ones are saved as a call
    modules = [f"{n}.self_attention.linear_{part}" for part in ("qkv", "proj") for n in range(3)]
    state |= {f"decoder.layers.{at}._extra_state": value for at, value in zip(modules, extra, strict=True)}
    archive = nemo_archive(tmp_path / "a", {"model_weights.ckpt": state})
    name = "model.decoder.layers.{0..2}.self_attention.linear_qkv._extra_state"
    assert open_source(archive).dropped[name] == "state of Transformer Engine"
    state["decoder.layers.1.adapter._extra_state"] = io.BytesIO(b"x")
    assert "model.decoder.layers.1.adapter._extra_state: the state of a module that" in refusal(
        nemo_archive(tmp_path / "b", {"model_weights.ckpt": state})
    )


@pytest.mark.parametrize("archived", [False, True])
def test_every_file_beside_the_weights_is_named(archived: bool, tmp_path: Path) -> None:
    root = tmp_path / "llama"
    nemo_archive(root, {"model_weights.ckpt": spelled(llama(), "megatron")})
    (tmp_path / "llama.nemo").unlink()
    for name in ("optimizer.pt", "model_weights/__7_0.distcp", "optimizer.state.exp_avg/0.0", "weights/notes.txt"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(b"12345")
    (root / "optimizer.state.exp_avg/0.1").write_bytes(b"678")
    shutil.rmtree(root / "model_weights")  # a leftover index would be another checkpoint
    source = open_source(packed(root) if archived else root)
    assert source.dropped == {
        "model_config.yaml": "its place is taken by the config.json that is made of it",
        "optimizer.pt": "of the training run, not of the model",
        "optimizer.*/": "training state, 8 bytes in 2 files",
        "weights/notes.txt": "of the training run, not of the model",
    }


@pytest.mark.parametrize("archived", [False, True])
def test_two_layouts_of_ranks_are_not_chosen_between(archived: bool, tmp_path: Path) -> None:
    state = spelled(llama(), "megatron")
    names = ("mp_rank_00/model_weights.ckpt", "tp_rank_00_pp_rank_000/model_weights.ckpt")
    archive = nemo_archive(tmp_path / "llama", dict.fromkeys(names, state))
    message = refusal(archive if archived else tmp_path / "llama")
    assert f"files of ranks in 2 layouts ({', '.join(names)}); which to read is unclear" in message


def test_a_distributed_checkpoint_beside_files_of_ranks_is_not_chosen(tmp_path: Path) -> None:
    state = spelled(llama(), "megatron")
    nemo_archive(tmp_path / "llama", {"model_weights.ckpt": state})
    save(tmp_path / "llama/model_weights", {f"model.{name}": tensor for name, tensor in state.items()})
    assert "holds a distributed checkpoint and files of ranks" in refusal(packed(tmp_path / "llama"))
    (tmp_path / "llama/model_weights.ckpt").unlink()
    shutil.copytree(tmp_path / "llama/model_weights", tmp_path / "llama/weights")
    assert "2 distributed checkpoints (" in refusal(packed(tmp_path / "llama"))


def test_ungated_rows_are_odd_in_a_rank(tmp_path: Path) -> None:
    """Three rows a rank cannot be a gate and an up, and need not be."""
    from tests.sources.dialects.test_tensors import GPT2_CONFIG

    config = GPT2_CONFIG | {"n_inner": 6, "vocab_size": 96, "n_positions": 64}
    numbers = np.random.default_rng(0)
    hf = {name: numbers.random(spec.shape, np.float32) for name, spec in headers(config).items()}
    state = {name: torch.from_numpy(np.float32(array)) for name, array in formulas.megatron("gpt2", hf).items()}
    parts: list[Tensors] = [{}, {}]
    for name, tensor in state.items():
        whole = "norm" in name or "position" in name or name.endswith(("linear_proj.bias", "linear_fc2.bias"))
        axis = 1 if name.endswith(("linear_proj.weight", "linear_fc2.weight")) else 0
        for rank, part in enumerate(parts):
            part[name] = tensor if whole else tensor.chunk(2, axis)[rank].clone()
    assert parts[0]["decoder.layers.0.mlp.linear_fc1.weight"].shape[0] == 3
    (tmp_path / "m").mkdir()
    for rank, part in enumerate(parts):
        (tmp_path / f"m/mp_rank_{rank:02}").mkdir()
        torch.save({"model": part}, tmp_path / f"m/mp_rank_{rank:02}/model_optim_rng.pt")
    source = open_source(tmp_path / "m", config=config)
    assert all(np.array_equal(source.read(name), array) for name, array in hf.items())


@pytest.mark.slow
def test_copies_that_differ_are_named_when_they_are_read(tmp_path: Path) -> None:
    parts = shares({n: t[:96] if t.shape[0] == 112 else t for n, t in spelled(llama(), "megatron").items()})
    vocabulary = {"override_vocab_size": 96}
    source = open_source(tensor_parallel(tmp_path / "same", parts, **vocabulary))
    norm = "model.layers.1.post_attention_layernorm.weight"
    wanted = source.read(norm)
    name = "decoder.layers.1.mlp.linear_fc1.layer_norm_weight"
    changed = parts[0][name].clone()
    changed[-1] += 1e-6
    archive = tensor_parallel(tmp_path / "drifted", [parts[0], parts[1] | {name: changed}], **vocabulary)
    plan = bridge.plan(archive, "hf")  # which reads no weight
    assert norm in plan.sources
    with pytest.raises(SourceError) as caught:
        bridge.convert(archive, "hf", out=tmp_path / "out", verify=False)
    assert f"{archive}: model.{name}: the copies of tp 0 pp 0 and tp 1 pp 0 differ" in str(caught.value)
    assert not (tmp_path / "out").exists()
    assert np.array_equal(open_source(archive).read_rows(norm, 0, 5), wanted[:5])  # as far as they are alike


@pytest.mark.parametrize("dialect", ["megatron", "torchtitan"])
@pytest.mark.parametrize("differs", [False, True])
def test_a_tied_head_that_is_stored_is_held_against_the_embedding(differs: bool, dialect: str, tmp_path: Path) -> None:
    hf = {n: t[:96] if t.shape[0] == 97 else t for n, t in llama().items()}
    hf["lm_head.weight"] = hf["model.embed_tokens.weight"].clone()
    hf["lm_head.weight"][5, 3] += differs
    state = spelled(hf, dialect)
    if dialect == "torchtitan":
        model, config = save(tmp_path / "c", state), TIED | {"vocab_size": 96}
    else:
        last = {"decoder.final_layernorm.weight", "output_layer.weight"}
        stages = [{n: t for n, t in state.items() if n not in last}, {n: state[n] for n in last}]
        names = (f"tp_rank_00_pp_rank_00{n}/model_weights.ckpt" for n in range(2))
        said = {"share_embeddings_and_output_weights": True, "override_vocab_size": 96}
        model, config = nemo_archive(tmp_path / "m", dict(zip(names, stages, strict=True)), **said), None
    assert open_source(model, config=config).config["tie_word_embeddings"] is True
    if differs:
        with pytest.raises(SourceError, match="differ, but the config ties them: which one is meant"):
            bridge.convert(model, "hf", out=tmp_path / "out", verify=False, config=config)
        return
    bridge.convert(model, "hf", out=tmp_path / "out", verify=False, config=config)
    written = open_source(tmp_path / "out")
    assert "lm_head.weight" not in written.specs
    assert np.array_equal(written.read("model.embed_tokens.weight"), hf["model.embed_tokens.weight"].numpy())


@pytest.fixture
def unreadable(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Names of files that cannot be opened; whoever runs the tests may be allowed to open everything."""
    names: set[str] = set()
    opened = os.open

    def refuse(path: Any, *arguments: Any, **options: Any) -> int:
        if Path(path).name in names:
            raise PermissionError(13, "Permission denied")
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    return names


def test_unreadable_files_matter_where_they_hold_the_model(unreadable: set[str], tmp_path: Path) -> None:
    run = megatron_bridge(tmp_path / "run", spelled(llama(), "megatron"))
    iteration = run / "iter_0000100"
    for name in ("optimizer.pt", "LIESMICH-\udcfc.txt"):
        (iteration / name).write_bytes(b"x")
    unreadable.add("optimizer.pt")
    source = open_source(run)
    assert source.dropped["optimizer.pt"] == "cannot be opened: Permission denied"
    assert source.dropped["LIESMICH-\udcfc.txt"] == "of the training run, not of the model"
    for name in ("__0_0.distcp", ".metadata", "metadata.json"):
        unreadable |= {name}
        assert f"{name}: cannot be opened: Permission denied" in refusal(run)
        unreadable -= {name}


def test_an_unreadable_rank_is_not_left_out(unreadable: set[str], tmp_path: Path) -> None:
    root = meta(tmp_path / "m", spelled({n: t[:96] for n, t in llama().items()}, "meta"), 2, vocab_size=96)
    unreadable.add("consolidated.01.pth")
    assert refusal(root) == f"{root}: consolidated.01.pth: cannot be opened: Permission denied"
    (root / "consolidated.01.pth").unlink()
    (root / "consolidated.01.pth").symlink_to("gone")
    assert refusal(root) == f"{root}: consolidated.01.pth: a link to gone, which is not there"


def test_a_tokenizer_that_is_a_link_to_nothing_is_not_left_out(tmp_path: Path) -> None:
    root = meta(tmp_path / "m", spelled({n: t[:96] for n, t in llama().items()}, "meta"), 2, vocab_size=96)
    (root / "tokenizer.model").unlink(missing_ok=True)
    (root / "tokenizer.model").symlink_to("gone")
    assert refusal(root) == f"{root}: tokenizer.model: a link to gone, which is not there"


def test_a_linked_folder_of_weights_is_named(tmp_path: Path) -> None:
    nemo_archive(tmp_path / "llama", {})
    save(tmp_path / "elsewhere", spelled(llama(), "megatron"))
    (tmp_path / "llama/model_weights").symlink_to(tmp_path / "elsewhere")
    assert refusal(tmp_path / "llama") == f"{tmp_path / 'llama'}: model_weights: a link to a directory"
    with tarfile.open(tmp_path / "linked.nemo", "w:") as tar:
        tar.add(tmp_path / "llama", arcname=".")
    assert f"model_weights: a link to {tmp_path / 'elsewhere'}" in refusal(tmp_path / "linked.nemo")
