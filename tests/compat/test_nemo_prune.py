"""NeMo's pruning functions: the weights of bridge's own verbs, and each silent case of NeMo an error."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import bridge  # noqa: E402
from bridge.compat.nemo_prune import PruningConfig, prune, prune_language_model  # noqa: E402
from bridge.core.errors import BridgeError, UsageError  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from tests.models.decoder_families import build  # noqa: E402

IDS = torch.randint(3, 90, (8, 24), generator=torch.Generator().manual_seed(0))
DATA = [{"input_ids": IDS}]


@pytest.mark.slow
def test_a_pruned_model_is_returned_and_the_callers_stays() -> None:
    model = build("LlamaForCausalLM", torch.float32, num_hidden_layers=5)
    before = {name: param.clone() for name, param in model.state_dict().items()}
    with pytest.warns(UserWarning, match="stays as it is"):
        made = prune_language_model(
            model, PruningConfig(target_ffn_hidden_size=64, target_num_layers=4), DATA, object()
        )
    assert made.config.intermediate_size == 64 and made.config.num_hidden_layers == 4
    keep = {"ffn": 64, "layers": 4}
    expected = bridge.pruned(model, keep, data=DATA, importance="minitron", order="importance").load_model()
    for name, param in expected.state_dict().items():
        assert torch.equal(param, made.state_dict()[name]), name
    assert all(torch.equal(param, before[name]) for name, param in model.state_dict().items())


def test_layers_are_dropped_by_their_numbers_from_one() -> None:
    model = build("LlamaForCausalLM", torch.float32, num_hidden_layers=4)
    made = prune_language_model(model, PruningConfig(drop_layers=[2, 4]))
    for new, old in ((0, 0), (1, 2)):
        own, theirs = made.model.layers[new].mlp.up_proj.weight, model.model.layers[old].mlp.up_proj.weight
        assert torch.equal(own, theirs)
    assert made.config.num_hidden_layers == 2


CASES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"drop_layers": [1], "target_hidden_size": 32}, ValueError, "drop_layers cannot be used with other pruning"),
    ({"drop_layers": [0, 1]}, AssertionError, r"counts from 1, and has \[0\]"),
    ({"drop_layers": [99]}, AssertionError, r"range 1 to 2, got \[99\]"),
    ({"drop_layers": [1, 1]}, AssertionError, "twice"),
    ({"drop_layers": [1, 2]}, BridgeError, "no layer would be left"),
    ({"drop_layers": []}, ValueError, "nothing would be pruned"),
    ({}, ValueError, "nothing would be pruned"),
    ({"target_num_attention_heads": 4}, AssertionError, "should be provided together"),
    ({"target_num_query_groups": 1}, AssertionError, "should be provided together"),
    ({"target_num_attention_heads": 3, "target_num_query_groups": 2}, AssertionError, "must be divisible"),
    ({"target_mamba_num_heads": 4}, ValueError, "prunes no state-space layers"),
    ({"target_ffn_hidden_size": 4000}, AssertionError, "ffn"),
]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"drop_layers": "12"}, r"drop_layers is '12'; expected the numbers of layers, as \[1, 2\]"),
        ({"drop_layers": 3}, "drop_layers is 3; expected the numbers"),
        ({"drop_layers": ["1"]}, r"drop_layers is \['1'\]"),
        ({"drop_layers": [1.0]}, r"drop_layers is \[1.0\]"),
        ({"drop_layers": {2}}, r"drop_layers is \{2\}"),
        ({"target_hidden_size": "50%"}, "target_hidden_size is '50%'; expected a whole number"),
        ({"target_num_layers": True}, "target_num_layers is True"),
    ],
)
def test_a_value_of_another_kind_is_a_type_error_and_a_usage_error(given: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said) as caught:
        PruningConfig(**given)
    assert isinstance(caught.value, UsageError)
    changed = PruningConfig()
    vars(changed).update(given)
    with pytest.raises(TypeError, match=said):
        changed.check()


@pytest.mark.parametrize(("given", "kind", "said"), CASES, ids=[str(given) for given, _, _ in CASES])
def test_what_nemo_refuses_or_ignores_is_an_error(given: dict[str, Any], kind: type[Exception], said: str) -> None:
    model = build("LlamaForCausalLM", torch.float32)
    with pytest.raises(kind, match=said) as caught:
        prune_language_model(model, PruningConfig(**given), DATA)
    assert isinstance(caught.value, BridgeError)


def test_several_micro_batches_are_refused() -> None:
    class Data:
        global_batch_size, micro_batch_size = 4, 2

    with pytest.raises(AssertionError, match="must be equal"):
        prune("examples/models/tiny-llama", "out", PruningConfig(target_ffn_hidden_size=64), data=Data())


def test_sizes_need_data() -> None:
    with pytest.raises(AssertionError, match="data_module is required"):
        prune_language_model(build("LlamaForCausalLM"), PruningConfig(target_ffn_hidden_size=64))
    with pytest.raises(AssertionError, match="data is required"):
        prune("llama", "out", PruningConfig(target_ffn_hidden_size=64))


@pytest.mark.slow
def test_a_checkpoint_is_pruned_for_megatron(tmp_path: Path) -> None:
    out = str(tmp_path / "pruned")
    config = PruningConfig(target_ffn_hidden_size=192, target_num_attention_heads=4, target_num_query_groups=2)
    text = Path("bridge/calibration/data/default_text.txt").read_text(encoding="utf-8")
    assert prune("examples/models/tiny-llama", out, config, num_train_samples=4, data=[text]) == out
    written = open_source(out)
    assert written.config["intermediate_size"] == 192 and written.config["num_attention_heads"] == 4
    expected = bridge.pruned(
        "examples/models/tiny-llama", {"ffn": 192, "heads": 4}, data=[text], importance="minitron", order="importance",
        samples=4,
    )  # fmt: skip
    for name in expected.specs:
        assert (written.read(name) == expected.read(name)).all(), name


@pytest.mark.slow
def test_a_live_model_of_megatron_is_pruned_in_place(tmp_path: Path) -> None:
    """In a process of its own, on gloo; answers are those of transformers with the same weights."""
    pytest.importorskip("megatron.core")
    from tests.oracles import live_prune_process, megatron_oracle

    with ProcessPoolExecutor(1, megatron_oracle.processes()) as pool:
        ffn, hidden, heads, layers, dropped = pool.submit(live_prune_process.main, str(tmp_path / "store")).result()
    assert ffn["sizes"] == [4, 128, 192, 4] and hidden["sizes"] == [4, 96, 256, 4]
    assert heads["sizes"] == [4, 128, 256, 2]
    assert layers["sizes"] == dropped["sizes"] == [3, 128, 256, 4]
    for one in (ffn, hidden, heads, layers, dropped):
        assert one["same"] and one["trains"] and one["error"] < 1e-5, one
        assert one["channels"] == 32 and one["groups"] == 2
