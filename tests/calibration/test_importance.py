"""Importance matrices: the mean squares are those that hooks of our own see, and nothing unusable is kept."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import bridge  # noqa: E402
from bridge.calibration.policies import Measured, settle_importance  # noqa: E402
from bridge.core.errors import CalibrationError, SchemeError  # noqa: E402
from bridge.quant.calibration import Calibration  # noqa: E402
from bridge.quant.schemes.catalog import read_scheme  # noqa: E402
from bridge.quant.schemes.grammar import Policies  # noqa: E402
from tests.models.decoder_families import build as decoder  # noqa: E402
from tests.models.export_families import build  # noqa: E402
from tests.oracles.importance import importance_of  # noqa: E402

SCHEME = "q4_0_imatrix"
SUMMED = 1e-6  # theirs are float32 means of float64 sums in another order


def made(family: str) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    torch.manual_seed(3)
    return build(family).float().eval(), [{"input_ids": torch.randint(3, 330, (2, 24))} for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "qwen3-moe"])
def test_mean_squares_are_those_of_the_inputs(family: str, tmp_path: Path) -> None:
    model, batches = made(family)
    calibration = bridge.calibrate(model, SCHEME, batches)
    want = importance_of(model, batches[:-1])  # the last batch is held out
    assert calibration.input_square.keys() == want.keys()
    for name, squares in want.items():
        ours = calibration.input_square[name]
        assert ours.dtype == np.float32 and np.allclose(ours, squares, rtol=SUMMED, atol=0), name
    assert calibration.applied == () and calibration.held_out is not None
    saved = Calibration.load(calibration.save(tmp_path / "c.safetensors"))
    assert all((saved.input_square[name] == array).all() for name, array in calibration.input_square.items())
    assert bridge.calibrate(model, SCHEME, batches).to_bytes() == calibration.to_bytes()


@pytest.mark.slow
def test_a_loop_of_the_users_gives_the_same_and_the_model_stays_as_it_is() -> None:
    model, batches = made("mixtral")
    calibration = bridge.calibrate(model, SCHEME, batches)
    model.train()
    settings = dict(vars(model.config))

    def loop(given: Any) -> None:
        for batch in batches[:-1]:
            given(**batch)

    again = bridge.calibrate(model, SCHEME, loop)
    assert all((again.input_square[name] == array).all() for name, array in calibration.input_square.items())
    assert model.training and dict(vars(model.config)) == settings
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.slow
def test_experts_count_their_own_tokens_and_one_without_any_weighs_all_inputs_alike() -> None:
    model, batches = made("mixtral")
    experts = len(model.model.layers[0].mlp.experts.gate_up_proj)
    with torch.no_grad():  # tokens of layer 0 go to the first two
        router = model.model.layers[0].mlp.gate
        router.weight.zero_()
    calibration = bridge.calibrate(model, SCHEME, batches)
    (counts,) = [array for name, array in calibration.expert_tokens.items() if ".layers.0." in name]
    unseen = np.flatnonzero(counts == 0)
    assert counts.sum() == 2 * 2 * 2 * 24 and 0 < len(unseen) < experts
    for number in unseen:
        mark = f"model.layers.0.block_sparse_moe.experts.{number}."
        applied = {one.module for one in calibration.applied if one.module.startswith(mark)}
        assert applied == {mark + leaf for leaf in ("w1", "w2", "w3")}
        assert all((calibration.input_square[name] == 1).all() for name in applied)
    assert {(one.what, one.case, one.policy) for one in calibration.applied} == {("importance", "never seen", "ones")}


STACKS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "quant", "options"),
    [
        ("GptOssForCausalLM", "nvfp4_wo:imatrix", {"format": "modelopt"}),
        ("Llama4ForCausalLM", "nvfp4_wo:gptq", {"format": "modelopt"}),
        ("Llama4ForCausalLM", "nvfp4_wo:imatrix", {"format": "compressed-tensors"}),
    ],
)
def test_experts_of_a_stack_are_searched_with_their_own_inputs(
    family: str, quant: str, options: dict[str, str], tmp_path: Path
) -> None:
    more = {"intermediate_size_mlp": 96} if family.startswith("Llama4") else {}
    model = decoder(family, torch.float32, **STACKS, **more, vocab_size=97)
    batches = [{"input_ids": torch.randint(3, 97, (4, 24))} for _ in range(3)]
    report = bridge.convert(model, "hf", quant, tmp_path / "out", data=batches, progress=False, **options)
    assert report.passed and report.parity and not report.findings
    counts = {count.what: (count.n, count.of) for count in report.parity.counts}
    assert all(n == of for n, of in counts.values())
    experts = {name: module for name, module in model.named_modules() if name.endswith(".experts")}
    seen: dict[str, list[Any]] = {}
    hooks = [
        module.register_forward_pre_hook(
            lambda _, args, given, name=name: seen.setdefault(name, []).append((*args, *given.values())),
            with_kwargs=True,
        )
        for name, module in experts.items()
    ]
    with torch.no_grad():
        for batch in batches[:-1]:  # the last is held out
            model(**batch)
    for hook in hooks:
        hook.remove()
    found, compared = Calibration.load(tmp_path / "out" / "bridge" / "calibration.safetensors"), 0
    for name, calls in seen.items():
        for number in range(model.config.num_local_experts):
            rows = []
            for inputs, *chosen in calls:
                if chosen:  # the numbers of each token's experts
                    rows.append(inputs.reshape(-1, inputs.shape[-1])[(chosen[0] == number).any(-1)])
                else:  # all tokens for each expert, those of others are zero
                    own = inputs.reshape(model.config.num_local_experts, -1, inputs.shape[-1])[number]
                    rows.append(own[(own != 0).any(-1)])
            want = torch.cat(rows).double().square().mean(0).numpy()
            ours = found.input_square[f"{name}.gate_up_proj.{number}"]
            assert np.allclose(ours, want, rtol=1e-4, atol=0), (name, number)  # eager experts add in another order
            compared += 1
    assert compared == len(experts) * model.config.num_local_experts > 0


def test_modelopt_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batches = made("llama")
    monkeypatch.setitem(sys.modules, "modelopt", None)  # importing it fails
    monkeypatch.setitem(sys.modules, "modelopt.torch.quantization", None)
    calibration = bridge.calibrate(model, SCHEME, batches)
    assert "nvidia-modelopt" not in calibration.provenance.versions


@pytest.mark.slow
def test_a_recipe_takes_both_kinds_of_statistics(tmp_path: Path) -> None:
    pytest.importorskip("modelopt.torch.quantization")
    recipe = tmp_path / "mix.toml"
    recipe.write_text(f'base = "int8"\n[[rule]]\nroles = ["mlp.down.weight"]\nquant = "{SCHEME}"\n')
    model, batches = made("llama")
    calibration = bridge.calibrate(model, recipe, batches)
    want = {name for name in importance_of(model, batches) if name.endswith("down_proj")}
    assert calibration.input_square.keys() == want
    assert calibration.input_amax and not calibration.input_amax.keys() & want


def _of(sums: list[float], tokens: float = 2, expert: bool = False) -> Mapping[str, Measured]:
    return {"m.0.q": Measured(np.array(sums), tokens, expert)}


@pytest.mark.parametrize(
    ("measured", "policies", "said"),
    [
        (_of([1, np.nan]), Policies(), "not finite: m.0.q: their input overflows"),
        (_of([1, 1e300]), Policies(), "not finite: m.0.q"),  # beyond float32
        (_of([0, 0], 0), Policies(), "never seen: m.0.q: no calibration token reached"),
        (_of([0, 0], 0, expert=True), Policies(never_seen="error"), "never seen: m.0.q"),
        (_of([0, 0]), Policies(zero="error"), "zero: m.0.q"),
    ],
)
def test_what_cannot_be_used_is_refused_by_module(
    measured: Mapping[str, Measured], policies: Policies, said: str
) -> None:
    with pytest.raises(CalibrationError, match=f"importance matrix cannot be used\n  {said}"):
        settle_importance(measured, policies)
    assert settle_importance(measured, policies, needed=()) == ({}, ())


def test_inputs_that_are_all_zero_weigh_alike_and_single_zeros_stay() -> None:
    squares, (applied,) = settle_importance(_of([0, 0]), Policies())
    assert (squares["m.0.q"] == 1).all() and (applied.case, applied.policy) == ("zero", "ones")
    squares, none = settle_importance(_of([0, 3]), Policies())
    assert squares["m.0.q"].tolist() == [0, 1.5] and not none


@pytest.mark.parametrize("numeric", ['dtype = "int8"\nper = "channel"', 'dtype = "int4"\nper = "block"\nblock = [32]'])
def test_only_codes_that_llama_cpp_searches_take_an_importance(numeric: str, tmp_path: Path) -> None:
    scheme = tmp_path / "own.toml"
    gates = "".join(f"[parity.{kind}]\ncosine = 0.9\nnorm = [0.9, 1.1]\n" for kind in ("tensor", "output"))
    scheme.write_text(f'summary = "x"\nalgorithm = "imatrix"\n[[weight]]\n{numeric}\n{gates}')
    with pytest.raises(SchemeError, match="algorithm 'imatrix' chooses codes of q4_0, q4_1, q5_0, q5_1,"):
        read_scheme(scheme)
