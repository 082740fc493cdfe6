"""Live models against `save_pretrained`: names, shapes, bytes, configuration, and the way back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bridge.sources.live_models.checkpoint_names import live_modules, live_names, live_parts, tied_names
from bridge.sources.opening import open_source
from tests.sources.tiny_families import FAMILIES, build


def bits(tensor: torch.Tensor) -> np.ndarray:
    plain = tensor.detach().contiguous()
    return (plain.view(torch.uint16) if plain.dtype == torch.bfloat16 else plain).numpy()


@pytest.mark.parametrize("family", FAMILIES)
def test_source_in_memory_is_what_save_pretrained_writes(family: str, tmp_path: Path) -> None:
    model = build(family)
    before = (model.config.to_dict(), {n: t.data_ptr() for n, t in model.state_dict().items()})
    source = open_source(model)
    got = {name: source.read(name) for name in source.specs}
    carried = dict(source.side_files)
    assert (model.config.to_dict(), {n: t.data_ptr() for n, t in model.state_dict().items()}) == before

    model.save_pretrained(tmp_path)
    want = load_file(tmp_path / "model.safetensors")
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert source.specs[name].shape == tuple(tensor.shape)
        assert f"torch.{source.specs[name].dtype}" == str(tensor.dtype)
        assert np.array_equal(got[name], bits(tensor)), name
    assert source.config == json.loads((tmp_path / "config.json").read_text())
    assert carried == {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.name != "model.safetensors"}

    directory = open_source(tmp_path)
    assert list(directory.specs) == list(source.specs)
    assert directory.config == source.config


@pytest.mark.parametrize("family", ["mixtral", "nomic", "bert-masked", "gpt2", "deepseek-v3"])
def test_model_loaded_from_a_directory_is_the_model_that_was_saved(family: str, tmp_path: Path) -> None:
    model = build(family)
    model.save_pretrained(tmp_path)
    source = open_source(tmp_path)
    loaded = source.load_model()
    assert not loaded.training
    state = loaded.state_dict()
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    assert live_names(loaded).keys() == source.specs.keys()


def test_stacked_experts_are_views_of_one_expert_and_half() -> None:
    origins = live_names(build("mixtral"))
    for expert in range(5):
        prefix = f"model.layers.1.block_sparse_moe.experts.{expert}"
        gate, down, up = (origins[f"{prefix}.{w}.weight"].ref for w in ("w1", "w2", "w3"))
        assert gate is not None and up is not None and down is not None
        assert (gate.live, gate.expert, gate.rows) == ("model.layers.1.mlp.experts.gate_up_proj", expert, (0, 80))
        assert (up.live, up.expert, up.rows) == ("model.layers.1.mlp.experts.gate_up_proj", expert, (80, 160))
        assert (down.live, down.expert) == ("model.layers.1.mlp.experts.down_proj", expert)


def test_reading_an_expert_copies_nothing_and_cannot_write_into_the_model() -> None:
    model = build("qwen3-moe")
    array = open_source(model).read("model.layers.0.mlp.experts.3.up_proj.weight")
    stack = model.model.layers[0].mlp.experts.gate_up_proj.detach().view(torch.uint16).numpy()
    assert np.shares_memory(array, stack)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0


def test_split_matrices_are_joined() -> None:
    origin = live_names(build("nomic"))["encoder.layers.1.attn.Wqkv.weight"]
    assert (origin.axis, origin.computed, origin.ref) == (0, False, None)
    assert [part.live.rpartition(".")[0][-6:] for part in origin.parts] == ["q_proj", "k_proj", "v_proj"]


def test_live_modules_lead_to_checkpoint_modules() -> None:
    modules = live_modules(live_names(build("mixtral")))
    experts = modules["model.layers.0.mlp.experts"]
    assert experts == tuple(f"model.layers.0.block_sparse_moe.experts.{e}.w{w}" for e in range(5) for w in (1, 2, 3))
    assert modules["model.layers.0.mlp.gate"] == ("model.layers.0.block_sparse_moe.gate",)
    assert modules["model.layers.0.mlp"] == ("model.layers.0.block_sparse_moe",)
    assert modules["model.layers.1.self_attn"] == ("model.layers.1.self_attn",)


def test_every_live_tensor_is_covered_exactly_once() -> None:
    model = build("deepseek-v2")
    parts = live_parts(live_names(model))
    state = model.state_dict()
    assert parts.keys() == state.keys()
    for live, places in parts.items():
        seen = torch.zeros(state[live].shape, dtype=torch.int32)
        for ref in places:
            ref.of(seen).add_(1)
        assert bool((seen == 1).all()), live


def test_names_come_from_a_model_without_weights_too() -> None:
    with torch.device("meta"):
        model = FAMILIES["qwen3-moe"]()
    assert {n: o.parts for n, o in live_names(model).items()} == {
        n: o.parts for n, o in live_names(build("qwen3-moe")).items()
    }


def test_views_with_transposed_axes_are_found() -> None:
    from bridge.sources.live_models.checkpoint_names import Probe

    base = torch.empty(5, 6, 7, device="meta")
    probe = Probe({"w": base})
    for view in (base[3, 1:4].t(), base.permute(2, 0, 1), base[:, 2:3, 1:], base[4, 5, 2:3], base[2]):
        ref = probe.origin("x", view).ref
        assert ref is not None
        values = torch.arange(5 * 6 * 7).reshape(5, 6, 7)
        want = values.as_strided(view.shape, view.stride(), view.storage_offset())
        assert torch.equal(ref.of(values), want)
        assert np.array_equal(ref.of(values.numpy()), want.numpy())


def test_what_is_no_box_of_a_tensor_is_computed() -> None:
    from bridge.sources.live_models.checkpoint_names import Probe

    base = torch.empty(6, 4, device="meta")
    probe = Probe({"w": base})
    assert probe.origin("x", base[::2]).computed
    with probe:
        twice = base * 2
    assert [part.live for part in probe.origin("x", twice).parts] == ["w"]
    assert probe.origin("x", twice).computed


def test_computed_tensors_are_made_by_transformers_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import bridge.sources.live_models.checkpoint_names as probe

    model = build("nomic")
    model.save_pretrained(tmp_path)
    monkeypatch.setattr(probe.Probe, "_ref", lambda self, view: None)
    source = open_source(model)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert np.array_equal(source.read(name), bits(tensor)), name


def renamed(root: Path, change: Any) -> Any:
    from safetensors.torch import save_file

    state = load_file(root / "model.safetensors")
    save_file({change(name): tensor for name, tensor in state.items()}, root / "model.safetensors", {"format": "pt"})
    return open_source(root)


def check_have(source: Any, model: Any, without: tuple[str, ...] = ()) -> None:
    origins = live_names(model, source.specs)
    assert set(source.specs) - origins.keys() == set(without)
    state = model.state_dict()
    for name, origin in origins.items():
        parts = [part.of(state[part.live]) for part in origin.parts]
        assert origin.spec.name == name
        assert np.array_equal(source.read(name), bits(torch.cat(parts, origin.axis) if len(parts) > 1 else parts[0]))


def test_checkpoint_of_the_base_model_matches_the_model_with_a_head(tmp_path: Path) -> None:
    model = build("gpt2")
    model.save_pretrained(tmp_path)
    check_have(renamed(tmp_path, lambda name: name.removeprefix("transformer.")), model)


def test_legacy_norm_names_match(tmp_path: Path) -> None:
    model = build("bert-masked")
    model.save_pretrained(tmp_path)
    old = renamed(
        tmp_path, lambda n: n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("Norm.bias", "Norm.beta")
    )
    assert "bert.embeddings.LayerNorm.gamma" in old.specs
    check_have(old, model)


def test_experts_under_another_prefix_match(tmp_path: Path) -> None:
    model = build("mixtral")
    model.save_pretrained(tmp_path)
    old = renamed(tmp_path, lambda name: name.removeprefix("model."))
    assert "layers.0.block_sparse_moe.experts.4.w3.weight" in old.specs
    check_have(old, model)


def test_tensors_that_the_model_does_not_know_are_left_out(tmp_path: Path) -> None:
    model = build("llama")
    model.save_pretrained(tmp_path)
    odd = renamed(tmp_path, lambda name: name.replace("model.norm.weight", "model.mtp.weight"))
    check_have(odd, model, without=("model.mtp.weight",))


def test_stored_alias_of_a_tie_is_found_by_its_own_name(tmp_path: Path) -> None:
    model = build("llama-tied")
    origins = live_names(model, [*live_names(model), "lm_head.weight"])
    assert origins["lm_head.weight"].parts[0].live == "lm_head.weight"


def test_tie_is_dropped_by_name_and_reported() -> None:
    model = build("llama-tied")
    source = open_source(model)
    assert "lm_head.weight" not in source.specs
    assert source.dropped == {"lm_head.weight": "tied to model.embed_tokens.weight"}


def test_pair_that_shares_memory_without_being_tied_is_two_tensors() -> None:
    model = build("llama")
    model.lm_head.weight = model.model.embed_tokens.weight
    assert tied_names(model) == {}
    source = open_source(model)
    assert np.array_equal(source.read("lm_head.weight"), source.read("model.embed_tokens.weight"))


def test_tie_that_was_taken_apart_is_two_tensors_as_in_save_pretrained(tmp_path: Path) -> None:
    model = build("llama-tied")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    source = open_source(model)
    model.save_pretrained(tmp_path)
    assert source.specs.keys() == load_file(tmp_path / "model.safetensors").keys()
    assert "lm_head.weight" in source.specs


def test_no_name_is_matched_by_accident() -> None:
    origins = live_names(FAMILIES["bert-classifier"]())
    assert all(re.sub(r"^bert\.", "", o.parts[0].live) == re.sub(r"^bert\.", "", n) for n, o in origins.items())
