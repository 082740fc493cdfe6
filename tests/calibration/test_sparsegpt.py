"""SparseGPT against ModelOpt's, and Wanda against its formula."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

import bridge
from bridge.calibration.importance.sparsity import sparsified
from tests.models.decoder_families import build

random = torch.Generator().manual_seed(0)
BATCHES = [{"input_ids": torch.randint(3, 97, (rows, 24), generator=random)} for rows in (8, 7, 9)]
LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
GPT2 = {"n_embd": 64, "n_inner": 96, "n_head": 4}
MATRIX = {"LlamaForCausalLM": "model.layers.{}.mlp.down_proj", "GPT2LMHeadModel": "transformer.h.{}.mlp.c_fc"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("silent", [False, True])
def test_sparsegpt_has_the_bits_of_modelopt(dtype: Any, silent: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from modelopt.torch.sparsity.weight_sparsity import sparsegpt

    x = torch.randn(900, 320, generator=random) @ torch.randn(320, 320, generator=random)
    if silent:
        x[:, 7] = 0
    weight, hessian = torch.randn(96, 320, generator=random).to(dtype), x.T @ x * (2 / 900)
    kept: list[Any] = []  # ModelOpt solves a copy of the weight, and returns where it is not zero
    prepare = sparsegpt.prepare
    monkeypatch.setattr(sparsegpt, "prepare", lambda *args: kept.append(made := prepare(*args)) or made)
    config = {"hessian_damp": 0.1, "pattern": "2:4 sparsity", "col_block_size": 128, "row_block_size": -1}
    mask = sparsegpt.create_sgpt_mask(weight, hessian.clone(), config)
    got = sparsified(weight, hessian)
    assert torch.equal(got, kept[0][0]) and torch.equal(got != 0, mask)
    error = (x @ (got.float() - weight.float()).T).norm()
    assert error < (x @ (weight.float() * mask - weight.float()).T).norm()


def data_of(model: Any) -> list[dict[str, Any]]:
    from bridge.calibration.data import prepare
    from bridge.sources.opening import open_source

    return list(prepare(BATCHES, open_source(model)).batches)


@pytest.mark.slow
def test_a_whole_llama_gets_the_zeros_of_modelopt() -> None:
    import modelopt.torch.sparsity as mts

    model = build("LlamaForCausalLM", torch.float32, **LLAMA)
    got = bridge.pruned(model, sparse="2:4", data=BATCHES).load_model().state_dict()

    def loop(live: Any) -> None:
        for batch in data_of(model):
            live(**batch)

    config = {"forward_loop": loop, "verbose": False}
    oracle = mts.export(mts.sparsify(copy.deepcopy(model), "sparsegpt", config=config)).state_dict()
    same = total = 0
    for name, want in oracle.items():
        if name.endswith("_proj.weight"):
            same, total = same + int(((got[name] != 0) == (want != 0)).sum()), total + want.numel()
    # The Hessians are sums of the same products in another order and scale: a few choices are near ties.
    assert same / total > 0.999


@pytest.mark.parametrize(("family", "config"), [("LlamaForCausalLM", LLAMA), ("GPT2LMHeadModel", GPT2)])
def test_wanda_keeps_the_largest_products_with_the_norm_of_the_input(family: str, config: dict[str, Any]) -> None:
    model = build(family, torch.float32, **config)
    got = bridge.pruned(model, sparse="2:4", sparse_method="wanda", data=BATCHES).load_model()
    for layer in range(2):
        module, seen = model.get_submodule(MATRIX[family].format(layer)), []
        handle = module.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].flatten(0, 1)))
        with torch.no_grad():
            for batch in data_of(model):
                model(**batch)
        handle.remove()
        turned = family.startswith("GPT2")
        weight = (module.weight.T if turned else module.weight).detach().double()
        new = got.get_submodule(MATRIX[family].format(layer)).weight.detach()
        products = weight.abs() * torch.cat(seen).double().norm(dim=0)
        order = products.reshape(len(weight), -1, 4).argsort(dim=-1, descending=True).argsort(dim=-1)
        want = torch.where(order.reshape(weight.shape) < 2, weight, 0.0).float()
        assert np.array_equal((new.T if turned else new).numpy(), want.numpy())


def test_matrices_with_one_input_share_its_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge.calibration.importance.sums import Channels

    calls: list[int] = []
    add = Channels.add
    monkeypatch.setattr(
        Channels, "add", lambda self, x, *args, **kw: calls.append(x.shape[-1]) or add(self, x, *args, **kw)
    )
    model = build("LlamaForCausalLM", torch.float32, **LLAMA)
    bridge.pruned(model, sparse="2:4", data=BATCHES)
    batches = len(data_of(model))
    assert len(calls) == 2 * 4 * batches  # inputs of attention, of its output, of the MLP, of its output
