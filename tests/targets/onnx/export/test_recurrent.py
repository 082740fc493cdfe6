"""Recurrences as ONNX loops against the functions of transformers that they replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from transformers.models.bamba import modeling_bamba as bamba
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.qwen3_next import modeling_qwen3_next as qwen
from transformers.models.recurrent_gemma import modeling_recurrent_gemma as gemma

from bridge.targets.onnx.export.calls.states import StateCache, StateLayer, take_requested_state
from bridge.targets.onnx.export.naming import name_by_structure
from bridge.targets.onnx.export.recurrent import replace
from bridge.targets.onnx.export.recurrent.loops import CHUNK, expand
from bridge.targets.onnx.families import recurrent_gemma

BATCH, HEADS, GROUPS, WIDTH, SIZE = 2, 6, 3, 5, 4
TOLERANCE = 2e-6  # of float32 sums in another order
LONG = 2 * CHUNK + 7


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let the nodes of `replace` be run by ONNX Runtime, as `expand` makes them; return the operators that ran."""
    ran: list[str] = []

    def node(name: str, inputs: Any, output: Any, state: Any) -> tuple[torch.Tensor, torch.Tensor]:
        tensors = [tensor.float().contiguous() for tensor in (*inputs, state)]
        # batch and tokens are dynamic
        fixed = [[None, None, *t.shape[2:]] for t in tensors]
        values = [ir.val(f"in_{i}", ir.DataType.FLOAT, shape) for i, shape in enumerate(fixed)]
        placed = ir.node(name, values, domain=replace.DOMAIN, num_outputs=2, name="node")
        for out, word, shape in zip(placed.outputs, ("y", "state"), (output, state.shape), strict=True):
            out.name, out.dtype, out.shape = word, ir.DataType.FLOAT, ir.Shape([None] * len(shape))
        graph = ir.Graph(values, placed.outputs, nodes=[placed], opset_imports={"": 21, replace.DOMAIN: 1}, name="g")
        model = ir.Model(graph, ir_version=10)
        expand(model)
        name_by_structure(model)
        proto = ir.to_proto(model)
        onnx.checker.check_model(proto, full_check=True)
        ran.extend(each.op_type for each in graph)
        session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        y, last = session.run(None, {v.name: t.numpy() for v, t in zip(values, tensors, strict=True)})
        assert y.shape == tuple(output) and last.shape == tuple(state.shape)
        return torch.tensor(y), torch.tensor(last)

    for module in (replace, recurrent_gemma):
        monkeypatch.setattr(module, "recurrence", node)
    return ran


def in_pieces(call: Callable[..., Any], tokens: int, cuts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of tokens that are given in pieces, the state handed on; `call(begin, end, state)`."""
    state, made, begin = None, [], 0
    for end in [*cuts, tokens]:
        y, state = call(begin, end, state)
        made.append(y)
        begin = end
    assert state is not None
    return torch.cat(made, 1), state


def check(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        assert float((ours - theirs).abs().max() / theirs.abs().max()) < TOLERANCE


@pytest.mark.parametrize("cuts", [[], [1, CHUNK, CHUNK + 1, LONG - 1]])
def test_mamba2_in_pieces_gives_the_outputs_of_one_pass(cuts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    x, dt = random(BATCH, LONG, HEADS, WIDTH), random(BATCH, LONG, HEADS)
    b, c = random(BATCH, LONG, GROUPS, SIZE), random(BATCH, LONG, GROUPS, SIZE, seed=1)
    more: dict[str, Any] = {"chunk_size": 16, "D": random(HEADS), "dt_bias": random(HEADS, seed=1)}
    more |= {"dt_softplus": True, "dt_limit": (0.1, 2.0), "return_final_states": True}
    a = -random(HEADS, seed=2).exp()
    want = bamba.mamba2_chunk_scan(x, dt, a, b, c, **more)
    computed(monkeypatch)

    def call(i: int, j: int, state: Any) -> Any:
        return replace._chunk_scan(x[:, i:j], dt[:, i:j], a, b[:, i:j], c[:, i:j], initial_states=state, **more)

    check(in_pieces(call, LONG, cuts), want)


@pytest.mark.parametrize("cuts", [[], [1, 9, 10]])
def test_mamba_in_pieces_gives_the_outputs_of_one_pass(cuts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 19
    x, dt, z = (random(BATCH, WIDTH, tokens, seed=seed) for seed in range(3))
    b, c = random(BATCH, SIZE, tokens), random(BATCH, SIZE, tokens, seed=1)
    a = -random(WIDTH, SIZE).exp()
    more: dict[str, Any] = {"D": random(WIDTH), "delta_bias": random(WIDTH, seed=1), "delta_softplus": True}
    more |= {"return_last_state": True}
    y, last = mamba.mamba_selective_scan(x, dt, a, b, c, z=z, **more)
    computed(monkeypatch)

    def call(i: int, j: int, state: Any) -> Any:
        layer, cache = StateLayer(), StateCache()
        layer.recurrent_states[0], layer.has_previous_state[0] = state, state is not None
        cache.layers = [layer]
        cache.get_recurrent_state(0)
        y, state = replace._selective_scan(
            x[..., i:j], dt[..., i:j], a, b[..., i:j], c[..., i:j], z=z[..., i:j], **more
        )
        return y.transpose(1, 2), state

    check(in_pieces(call, tokens, cuts), (y.transpose(1, 2), last))


def test_a_layer_that_scans_head_by_head_takes_the_state_of_each() -> None:
    layer, cache = StateLayer(), StateCache()
    layer.recurrent_states[0], layer.has_previous_state[0] = random(BATCH, HEADS, WIDTH, SIZE), True
    cache.layers = [layer]
    state = cache.get_recurrent_state(0)
    taken = [take_requested_state() for _ in range(HEADS)]
    assert all(torch.equal(one, state[:, head]) for head, one in enumerate(taken))
    assert take_requested_state() is None


@pytest.mark.parametrize("cuts", [[], [1, CHUNK, CHUNK + 1, LONG - 1]])
@pytest.mark.parametrize("repeated", [False, True])
def test_the_delta_rule_in_pieces_gives_the_outputs_of_one_pass(
    cuts: list[int], repeated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k = (random(BATCH, LONG, GROUPS, SIZE, seed=seed) for seed in range(2))
    if repeated:  # equal keys without decay: powers of the matrix that is inverted grow to 1e17
        k = k[:, :1].expand_as(k)
    v, g = random(BATCH, LONG, HEADS, WIDTH), -random(BATCH, LONG, HEADS).exp() * (not repeated)
    beta = torch.ones(BATCH, LONG, HEADS) if repeated else random(BATCH, LONG, HEADS).sigmoid()
    more: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    want = qwen.torch_recurrent_gated_delta_rule(q, k, v, g, beta, **more)
    ran = computed(monkeypatch)

    def call(i: int, j: int, state: Any) -> Any:
        tensors = (tensor[:, i:j] for tensor in (q, k, v, g, beta))
        return replace._delta_rule(*tensors, initial_state=state, **more)

    check(in_pieces(call, LONG, cuts), want)
    assert "Scan" in ran


@pytest.mark.parametrize("cuts", [[], [1, 9, 10]])
def test_a_decay_of_each_channel_gives_the_outputs_of_one_pass(
    cuts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = 19
    q, k, g = (random(BATCH, tokens, HEADS, SIZE, seed=seed) for seed in range(3))
    v, beta, g = random(BATCH, tokens, HEADS, WIDTH), random(BATCH, tokens, HEADS).sigmoid(), -g.exp()
    more: dict[str, Any] = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    want = kimi.recurrent_kimi_delta_attention(q, k, v, g, beta, initial_state=None, **more)
    computed(monkeypatch)

    def call(i: int, j: int, state: Any) -> Any:
        tensors = (tensor[:, i:j] for tensor in (q, k, v, g, beta))
        return replace._delta_rule(*tensors, initial_state=state, **more)

    check(in_pieces(call, tokens, cuts), want)


@pytest.mark.parametrize("cuts", [[], [1, 9, 10]])
def test_gated_units_begin_anew_where_a_text_begins(cuts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = 19
    x, gate = random(BATCH, tokens, WIDTH), random(BATCH, tokens, WIDTH).sigmoid()
    reset = torch.zeros(BATCH, tokens, 1, dtype=torch.bool)
    reset[0, :4] = reset[1, 12] = True  # padding on the left, and a second text
    want = gemma.RecurrentGemmaRglru._rnn_scan(None, x, gate, reset, None)
    computed(monkeypatch)

    def call(i: int, j: int, state: Any) -> Any:
        return recurrent_gemma._gated_scan(x[:, i:j], gate[:, i:j], reset[:, i:j], state)

    check(in_pieces(call, tokens, cuts), want)


def test_functions_are_replaced_for_this_thread_and_put_back() -> None:
    import threading

    model = torch.nn.Sequential(mamba.MambaRMSNorm(4))
    original, seen = mamba.mamba_selective_scan, []
    with replace.recurrences_as_nodes(model):
        assert mamba.mamba_selective_scan is not original
        given = random(1, 2, 3), random(1, 2, 3), -random(2, 4).exp(), random(1, 4, 3), random(1, 4, 3)

        def ask() -> None:
            seen.append(mamba.mamba_selective_scan(*given))

        other = threading.Thread(target=ask)
        other.start()
        other.join()
    assert mamba.mamba_selective_scan is original
    assert torch.equal(seen[0], original(*given)) and seen[0].any()
