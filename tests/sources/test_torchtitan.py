"""torchtitan's checkpoints as sources: its own adapters' tensors, the last of a run's steps, what must be asked for."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import bridge
from bridge.core.errors import SourceError
from bridge.sources.opening import open_source
from bridge.tables.dialects.dialect import load_dialect
from tests.oracles import torchtitan_oracle
from tests.sources.foreign_checkpoints import CONFIG, llama, spelled
from tests.sources.tiny_families import build
from tests.sources.weights.dcp_saves import bits, save
from tests.targets.hf.test_hf_stacked import build as gpt_oss


def refusal(model: object, **arguments: Any) -> str:
    with pytest.raises(SourceError) as caught:
        open_source(model, **arguments)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "era"), torchtitan_oracle.MODELS)
def test_every_tensor_is_the_adapters(name: str, era: str, tmp_path: Path) -> None:
    made = torchtitan_oracle.family(name, era)
    source = open_source(made.save(tmp_path, training=True).parent, config=made.config_hf)
    tied = made.config_hf["tie_word_embeddings"]  # the adapter leaves the head out then, the file has it
    assert source.specs.keys() == made.hf.keys() | ({"lm_head.weight"} if tied else set())
    assert not tied or np.array_equal(source.read("lm_head.weight"), made.hf["model.embed_tokens.weight"])
    assert all(np.array_equal(source.read(tensor), array) for tensor, array in made.hf.items())
    assert source.dropped["optimizer.*"].startswith("training state, ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_of_rows_are_the_tensors(dtype: torch.dtype, tmp_path: Path) -> None:
    """Cuts through heads, which are in another order, included."""
    hf = llama(dtype)
    source = open_source(save(tmp_path / "step-3", spelled(hf, "torchtitan")), config=CONFIG)
    for name, tensor in hf.items():
        whole = bits(tensor)
        for begin, end in ((0, 1), (1, 8), (7, len(whole)), (0, len(whole))):
            out = np.zeros((end - begin, *whole.shape[1:]), whole.dtype)
            assert np.array_equal(source.read_rows(name, begin, end, out), whole[begin:end])
            assert np.array_equal(source.read_rows(name, begin, end), whole[begin:end])


def test_the_last_finished_step_is_read(tmp_path: Path) -> None:
    first, last = llama(), {name: tensor + 1 for name, tensor in llama().items()}
    save(tmp_path / "step-9", spelled(first, "torchtitan"))
    save(tmp_path / "step-10", spelled(last, "torchtitan"))
    save(tmp_path / "step-11", spelled(last, "torchtitan"))
    (tmp_path / "step-11/.metadata").unlink()
    source = open_source(tmp_path, config=CONFIG)
    assert np.array_equal(source.read("lm_head.weight"), last["lm_head.weight"].numpy())
    assert source.dropped["step-9/"] == "another step; step-10 is read"
    assert source.dropped["step-11/"] == "its save did not finish"
    (tmp_path / "step-9/.metadata").unlink()
    (tmp_path / "step-10/.metadata").unlink()
    assert "no step has a .metadata: no save finished, or hidden files were not copied" in refusal(tmp_path)


def test_the_last_finished_step_of_a_dump_folder_is_read(tmp_path: Path) -> None:
    """As a run leaves it: `<dump>/checkpoint/step-<N>`, beside logs."""
    first, last = llama(), {name: tensor + 1 for name, tensor in llama().items()}
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "tb").mkdir()
    assert "checkpoint: has no step-<N>: the run has saved none yet" in refusal(tmp_path)
    save(tmp_path / "checkpoint/step-9", spelled(first, "torchtitan"))
    save(tmp_path / "checkpoint/step-10", spelled(last, "torchtitan"))
    (tmp_path / "checkpoint/step-11").mkdir()
    source = open_source(tmp_path, config=CONFIG)
    assert np.array_equal(source.read("lm_head.weight"), last["lm_head.weight"].numpy())
    assert source.dropped["checkpoint/"] == "step-10 of it is read"
    assert source.dropped["checkpoint/step-9/"] == "another step; step-10 is read"
    for step in ("step-9", "step-10"):
        (tmp_path / "checkpoint" / step / ".metadata").unlink()
    assert "checkpoint: no step has a .metadata: no save finished" in refusal(tmp_path)


def test_the_config_is_asked_for_field_by_field(tmp_path: Path) -> None:
    step = save(tmp_path / "step-3", spelled(llama(), "torchtitan"))
    message = refusal(step)
    assert "neither configuration nor tensors tell these; give config={" in message
    for field in ("num_attention_heads", "rms_norm_eps", "rope_parameters", "max_position_embeddings"):
        assert f"\n    {field}: " in message


@pytest.mark.parametrize("how", ["file", "directory", "beside"])
def test_the_config_comes_from_a_file(how: str, tmp_path: Path) -> None:
    step = save(tmp_path / "step-3", spelled(llama(), "torchtitan"))
    holder = step if how == "beside" else tmp_path
    (holder / "config.json").write_text(json.dumps(CONFIG))
    config = {"file": holder / "config.json", "directory": holder, "beside": None}[how]
    source = open_source(step, config=config)
    assert source.config["num_attention_heads"] == 6
    assert json.loads(source.side_files["config.json"])["architectures"] == ["LlamaForCausalLM"]  # type: ignore[arg-type]


def test_all_that_contradicts_the_tensors_is_told_at_once(tmp_path: Path) -> None:
    step = save(tmp_path / "step-3", spelled(llama(), "torchtitan"))
    message = refusal(step, config=CONFIG | {"num_hidden_layers": 4, "intermediate_size": 81, "vocab_size": 96})
    assert "the model's configuration, 3 problems" in message
    assert "config=: num_hidden_layers = 4, but the tensors have 3" in message
    assert "config=: intermediate_size = 81, but the tensors have 80" in message
    assert "config=: vocab_size = 96, but the tensors have 97" in message


def test_names_that_no_dialect_knows_are_shown(tmp_path: Path) -> None:
    step = save(tmp_path / "step-3", {f"blocks.{n}.w": torch.ones(3) for n in range(4)})
    assert refusal(step, config=CONFIG) == (
        f"{step}: its tensors have names of no known dialect (megatron, torchtitan, meta): "
        "blocks.{0..3}.w; add a table of their meaning to mappings/dialects"
    )


def test_a_tensor_that_is_missing_or_unknown_is_named(tmp_path: Path) -> None:
    state = spelled(llama(), "torchtitan")
    state["layers.1.attention.gate.weight"] = state.pop("layers.1.attention.wo.weight")
    message = refusal(save(tmp_path / "step-3", state), config=CONFIG)
    assert "layers.1.attention.gate.weight: " in message
    assert "torchtitan.toml has no row for it" in message
    assert "layers.1.attention.wo.weight: is missing; model.layers.1.self_attn.o_proj.weight needs it" in message


def test_hugging_faces_own_weights_come_first(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save(tmp_path, {"unknown": torch.ones(3)})
    save_file(llama(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert open_source(tmp_path).dropped["__0_0.distcp"].startswith("weights or training state")


def test_shards_in_hugging_faces_names_need_a_config_only(tmp_path: Path) -> None:
    hf = llama(torch.bfloat16)
    storage = dcp.HuggingFaceStorageWriter(str(tmp_path), save_distributed=True)
    dcp.save(hf, storage_writer=storage, no_dist=True)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert all(path.name.startswith("shard-00001-") for path in tmp_path.glob("*.safetensors"))
    source = open_source(tmp_path)
    assert source.specs.keys() == hf.keys()
    assert all(np.array_equal(source.read(name), bits(tensor)) for name, tensor in hf.items())


def test_conversion_writes_the_tensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    hf = llama(torch.bfloat16)
    step = save(tmp_path / "step-3", spelled(hf, "torchtitan"))
    report = bridge.convert(step, "hf", config=CONFIG, out=tmp_path / "out", verify=False)
    written = load_file(tmp_path / "out/model.safetensors")
    assert written.keys() == hf.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in hf.items())
    assert report.tensors == len(hf)


STATES = ("llama", "qwen3-moe", "gpt2", "gpt-oss")


def model_of(name: str) -> Any:
    return gpt_oss(torch.bfloat16) if name == "gpt-oss" else build(name)


@pytest.mark.parametrize("prefix", ["", "model.", "module.", "_orig_mod.module.", "model.module."])
@pytest.mark.parametrize("name", STATES)
def test_a_state_dict_of_transformers_reads_as_what_save_pretrained_writes(
    name: str, prefix: str, tmp_path: Path
) -> None:
    """As FSDP's trainers save it, beside the optimizer."""
    model = model_of(name)
    model.save_pretrained(tmp_path / "saved")
    state: dict[str, Any] = {prefix + key: tensor.clone() for key, tensor in model.state_dict().items()}
    step = save(tmp_path / "step", state | {"optim": {"state": {"exp_avg": torch.ones(7)}}})
    (step / "config.json").write_bytes((tmp_path / "saved/config.json").read_bytes())
    mine, theirs = open_source(step), open_source(tmp_path / "saved")
    assert mine.specs.keys() - theirs.specs.keys() == ({"lm_head.weight"} if name == "gpt2" else set())  # it is tied
    assert all(mine.specs[tensor] == spec for tensor, spec in theirs.specs.items())
    assert all(np.array_equal(mine.read(tensor), theirs.read(tensor)) for tensor in theirs.specs)
    assert mine.config == theirs.config and "training state" in mine.dropped["optim.*"]
    assert bridge.plan(step, "hf").architecture == theirs.config["architectures"][0]
    (step / "config.json").unlink()
    assert open_source(step, config=tmp_path / "saved").fingerprint != theirs.fingerprint


def test_a_state_dict_without_its_config_is_told(tmp_path: Path) -> None:
    step = save(tmp_path / "step", {f"model.{name}": tensor for name, tensor in build("llama").state_dict().items()})
    for config in (None, {"num_attention_heads": 6}, {"architectures": ["GPT2LMHeadModel"]}):
        message = refusal(step, config=config)
        assert "its tensors have Hugging Face names (model.lm_head.weight, model.model.embed_tokens" in message
        assert message.endswith("put its config.json beside them, or give config=")


@pytest.mark.parametrize(
    ("model", "names"),
    [
        ("qwen3_5", ["layers.0.attention_norm.weight", "layers.0.attn.in_proj_z.weight", "tok_embeddings.weight"]),
        ("flux", ["img_in.weight", "double_blocks.0.img_attn.qkv.weight"]),
    ],
)
def test_a_model_of_torchtitan_that_no_table_reads_is_named(model: str, names: list[str], tmp_path: Path) -> None:
    path = save(tmp_path / "step-1", {name: torch.ones(3, 3) for name in names})
    assert f"{names[1]}: of torchtitan's {model}, which no table reads; let torchtitan save" in refusal(path)


def test_the_names_by_which_such_models_are_known_are_those_of_torchtitan() -> None:
    package = Path(next(iter(find_spec("torchtitan").submodule_search_locations))) / "models"
    text = "".join(
        (package / name).read_text() for name in ("qwen3_5/state_dict_adapter.py", "flux/model/state_dict_adapter.py")
    )
    for name in load_dialect("torchtitan").refused:
        assert f'"{name.replace("{l}", "{}")}"' in text
