"""A calibration block by block has the bytes of the calibration of the whole model, and reads each weight once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.needs import needs

torch = pytest.importorskip("torch")
needs("modelopt")

import bridge  # noqa: E402
from bridge.calibration.data import Data, prepare  # noqa: E402
from bridge.calibration.job import CalibrationJob  # noqa: E402
from bridge.calibration.modelopt import fake_quantize  # noqa: E402
from bridge.calibration.requirements import source_for  # noqa: E402
from bridge.calibration.walk.options import Options  # noqa: E402
from bridge.calibration.walk.run import Walk, calibrate_by_blocks  # noqa: E402
from bridge.core.errors import BridgeError, CalibrationError, UsageError  # noqa: E402
from bridge.core.progress import no_progress  # noqa: E402
from bridge.planning.structure import structure_of  # noqa: E402
from bridge.quant.calibration import Calibration  # noqa: E402
from bridge.quant.schemes.load import load_scheme  # noqa: E402
from bridge.quant.schemes.scheme import Scheme  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from bridge.sources.source import Source  # noqa: E402
from tests.calibration.walk.walked_models import KINDS, batches  # noqa: E402
from tests.covering import grid  # noqa: E402
from tests.models.calibrated_models import built  # noqa: E402
from tests.models.decoder_families import DECODERS, OTHERS, build  # noqa: E402

SCHEMES = {
    "fp8 + kv": ("fp8", "fp8"),
    "int8_sq": ("int8_sq", None),
    "int8": ("int8", None),
    "int4_awq + kv": ("int4_awq", "fp8"),
    "w4a8_awq": ("w4a8_awq", None),
    "int4_awq_clip": ("int4_awq_clip", None),
    "int4_awq_full + kv": ("int4_awq_full", "fp8"),
    "int4_gptq + kv": ("int4_gptq", "fp8"),
    "nvfp4_gptq + kv": ("nvfp4_gptq", "fp8"),
    "nvfp4_local_hessian": ("nvfp4_local_hessian", None),
    "nvfp4_awq + kv": ("nvfp4_awq", "fp8"),
    "nvfp4 + kv": ("nvfp4", "nvfp4"),
}
MIXED = """
base = "fp8"
[[rule]]
modules = ["*.down_proj"]
quant = "int8_sq"
[[rule]]
modules = ["*.o_proj", "*.up_proj"]
quant = "int4_awq"
[[rule]]
modules = ["*.gate_proj"]
layers = [0]
quant = "none"
[[rule]]
modules = ["*.gate_proj"]
layers = [1]
quant = "int4_gptq"
"""
CLIPPED = """
base = "int4_awq_clip"
[[rule]]
modules = ["*.down_proj"]
quant = "int8_sq"
[[rule]]
modules = ["*.o_proj"]
quant = "int4_awq"
[[rule]]
modules = ["*.up_proj", "*.gate_proj"]
quant = "int4_awq_full"
"""
SEARCHES = ("awq", "gptq", "hessian")  # take two to four times as long as the others
# transformers' grouped matrix products take bfloat16 experts of multiples of 16 bytes only
EXPERTS = ("Moe", "MoE", "Mixtral", "Deepseek", "Dots1", "Jamba", "MiniMax", "Olmoe", "Qwen3Next", "moe")


def whole(source: Source, scheme: Scheme, data: Data) -> Calibration:
    return fake_quantize(CalibrationJob(source, structure_of(source), scheme, data)).calibration


def walked(source: Source, scheme: Scheme, data: Data, progress: Any = no_progress, ahead: bool = False) -> Calibration:
    options = Options(ahead)
    return calibrate_by_blocks(CalibrationJob(source, structure_of(source), scheme, data, progress=progress), options)


def outcome(way: Any, source: Source, scheme: Scheme, data: Data) -> bytes | type[BridgeError]:
    """The bytes of a calibration, or the error that refuses it."""
    try:
        calibration: Calibration = way(source, scheme, data)
        return calibration.to_bytes()
    except BridgeError as error:
        return type(error)


@grid(
    {"family": [*DECODERS, *OTHERS], "scheme": list(SCHEMES), "dtype": ["float32", "bfloat16"]},
    valid=lambda family, _, dtype: dtype == "float32" or not any(part in family for part in EXPERTS),
    cost=lambda _, scheme, __: any(part in scheme for part in SEARCHES),
    later=lambda family, *_: family not in KINDS,
)
def test_statistics_are_those_of_the_whole_model(family: str, scheme: str, dtype: str, tmp_path: Path) -> None:
    build(family, getattr(torch, dtype)).save_pretrained(tmp_path)
    source = open_source(tmp_path)
    quant, kv = SCHEMES[scheme]
    bound = load_scheme(quant, kv=kv).bound(structure_of(source).sites)
    data = prepare(batches("Conditional" in family), source)
    expected = outcome(whole, source, bound, data)
    assert outcome(walked, source, bound, data) == expected


@pytest.mark.slow
@pytest.mark.parametrize("kv", [None, "fp8"])
def test_a_recipe_of_four_algorithms_needs_further_streams(kv: str | None, tmp_path: Path) -> None:
    (tmp_path / "mixed.toml").write_text(MIXED)
    build("LlamaForCausalLM").save_pretrained(tmp_path / "model")
    source = open_source(tmp_path / "model")
    scheme = load_scheme(tmp_path / "mixed.toml", kv=kv).bound(structure_of(source).sites)
    data = prepare(batches(), source)
    found = walked(source, scheme, data)
    assert found.input_amax and found.smoothing_amax and found.awq_scale and found.weight_codes
    assert found.digest == whole(source, scheme, data).digest


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["int4_gptq", "nvfp4_gptq"])
def test_a_block_with_a_cache_and_no_matrix_of_gptq_runs_as_often_as_others(scheme: str, tmp_path: Path) -> None:
    recipe = f'base = "{scheme}"\n[[rule]]\nmodules = ["*"]\nlayers = [0]\nquant = "none"\n'
    (tmp_path / "kept.toml").write_text(recipe)
    build("LlamaForCausalLM").save_pretrained(tmp_path / "model")
    source = open_source(tmp_path / "model")
    bound = load_scheme(tmp_path / "kept.toml", kv="fp8").bound(structure_of(source).sites)
    data = prepare(batches(), source)
    assert walked(source, bound, data).digest == whole(source, bound, data).digest


@pytest.mark.slow
@pytest.mark.parametrize("kv", [None, pytest.param("fp8", marks=pytest.mark.product)])
def test_a_recipe_of_all_kinds_of_awq_smooths_three_times(kv: str | None, tmp_path: Path) -> None:
    (tmp_path / "mixed.toml").write_text(CLIPPED)
    build("LlamaForCausalLM").save_pretrained(tmp_path / "model")
    source = open_source(tmp_path / "model")
    scheme = load_scheme(tmp_path / "mixed.toml", kv=kv).bound(structure_of(source).sites)
    data = prepare(batches(), source)
    found = walked(source, scheme, data)
    assert found.smoothing_amax and len(found.weight_clip) > len(found.awq_scale) > 0
    assert found.digest == whole(source, scheme, data).digest


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "bert"])
def test_a_model_in_memory_is_walked_and_stays_as_it_is(family: str) -> None:
    model = built(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    source, data = open_source(model), [ids % 97 for ids in torch.arange(4 * 2 * 24).reshape(4, 2, 24)]
    scheme = load_scheme("int8_sq").bound(structure_of(source).sites)
    prepared = prepare(data, source)
    assert walked(source, scheme, prepared).digest == whole(source, scheme, prepared).digest
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any("Quant" in type(module).__name__ for module in model.modules())


@pytest.mark.slow
def test_experts_are_counted_as_in_the_whole_model(tmp_path: Path) -> None:
    build("MixtralForCausalLM", torch.float32).save_pretrained(tmp_path)
    source = open_source(tmp_path)
    scheme = load_scheme("fp8").bound(structure_of(source).sites)
    found = walked(source, scheme, prepare(batches(), source))
    assert [int(counts.sum()) for counts in found.expert_tokens.values()] == [3 * 2 * 24 * 2] * 2
    assert found.held_out is not None and found.held_out.source_perplexity and found.held_out.quantized_perplexity


def held_by_weight_quantizers(root: Any) -> int:
    """Bytes of tensors in the weight quantizers of a module, in their calibrators, and in ModelOpt's searches."""
    total = 0
    for name, module in root.named_modules():
        owners = [getattr(module, search, None) for search in ("awq_lite", "awq_clip")]
        if "weight_quantizer" in name:
            owners += [module, getattr(module, "_calibrator", None)]
            total += sum(buffer.nbytes for buffer in module.buffers(recurse=False))
        tensors = (value for owner in owners if owner for value in vars(owner).values())
        total += sum(value.nbytes for value in tensors if isinstance(value, torch.Tensor))
    return total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("quant", "family"),
    [
        pytest.param("int4_awq", "LlamaForCausalLM", marks=pytest.mark.product),
        ("int4_gptq", "LlamaForCausalLM"),
        ("nvfp4_local_hessian", "LlamaForCausalLM"),
        pytest.param("w4a8_awq", "LlamaForCausalLM", marks=pytest.mark.product),
        ("int4_awq", "MixtralForCausalLM"),
    ],
)
def test_quantizers_of_a_finished_block_hold_no_memory(
    quant: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(family, torch.float32).save_pretrained(tmp_path)
    source = open_source(tmp_path)
    scheme = load_scheme(quant).bound(structure_of(source).sites)
    choose, visit = Walk._keep_codes, Walk._visit
    calibrated: list[int] = []
    left: list[int] = []

    def chosen(self: Walk, seen: Any, root: Any, bindings: Any) -> None:
        choose(self, seen, root, bindings)
        calibrated.append(held_by_weight_quantizers(root))

    def visited(self: Walk, block: Any) -> Any:
        seen = visit(self, block)
        left.append(sum(held_by_weight_quantizers(module) for module in self.model.fake.modules.values()))
        return seen

    monkeypatch.setattr(Walk, "_keep_codes", chosen)
    monkeypatch.setattr(Walk, "_visit", visited)
    walked(source, scheme, prepare(batches(), source))
    assert sum(calibrated) > 0 and not any(left)


class CountedReads:
    """A source that counts the bytes that are read of each tensor."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.read_bytes: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    def read(self, name: str) -> np.ndarray:
        self.read_bytes[name] += self._source.specs[name].nbytes
        return self._source.read(name)

    def read_rows(self, name: str, begin: int, end: int, out: np.ndarray | None = None) -> np.ndarray:
        rows = self._source.read_rows(name, begin, end, out)
        self.read_bytes[name] += rows.nbytes
        return rows


@grid(
    {
        "family": ["LlamaForCausalLM", "Qwen3MoeForCausalLM", "GPT2LMHeadModel", "Phi3ForCausalLM"],
        "ahead": [False, True],
    }
)
def test_each_weight_is_read_once(family: str, ahead: bool, tmp_path: Path) -> None:
    build(family, torch.float32, tie_word_embeddings=False).save_pretrained(tmp_path)
    source = CountedReads(open_source(tmp_path))
    scheme = load_scheme("int4_awq", kv="fp8").bound(structure_of(source).sites)
    data = prepare(batches(), source)
    found = walked(source, scheme, data, ahead=ahead)
    assert found.digest == whole(open_source(tmp_path), scheme, data).digest
    assert source.read_bytes == {name: spec.nbytes for name, spec in source.specs.items()}


@pytest.mark.slow
def test_progress_counts_up_to_its_total(tmp_path: Path) -> None:
    build("LlamaForCausalLM", torch.float32).save_pretrained(tmp_path)
    source = open_source(tmp_path)
    scheme = load_scheme("int4_awq").bound(structure_of(source).sites)
    seen: list[tuple[int, int, str]] = []
    walked(source, scheme, prepare(batches(), source), lambda *step: seen.append(step))
    done = [step[0] for step in seen]
    assert done == sorted(done) and done[-1] == seen[-1][1]
    assert {step[1:] for step in seen} == {(seen[-1][1], "calibrate")}


@pytest.mark.slow
def test_memory_decides_and_the_result_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("LlamaForCausalLM", torch.float32).save_pretrained(tmp_path)
    data = batches()
    large = bridge.calibrate(tmp_path, "fp8", data, memory="1GB")
    monkeypatch.setattr("bridge.calibration.walk.budget.BASE", 0)
    source = open_source(tmp_path)
    monkeypatch.setattr(type(source), "load_model", lambda _: pytest.fail("the whole model was loaded"))
    small = bridge.calibrate(tmp_path, "fp8", data, memory=340_000)
    assert small.digest == large.digest


@pytest.mark.slow
def test_memory_below_the_largest_block_is_refused_before_a_weight_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build("LlamaForCausalLM", torch.float32).save_pretrained(tmp_path)
    source = open_source(tmp_path)
    for way in ("load_model", "load_skeleton", "read", "read_rows"):
        monkeypatch.setattr(type(source), way, lambda *_: pytest.fail("a weight was read"))
    with pytest.raises(UsageError, match=r"model.layers.0 has 96.5 kB, .* give at least \d+ bytes"):
        bridge.calibrate(tmp_path, "fp8", batches(), memory="100kB")


def test_a_forward_loop_runs_the_whole_model_or_not_at_all(tmp_path: Path) -> None:
    build("LlamaForCausalLM", torch.float32).save_pretrained(tmp_path)
    with pytest.raises(CalibrationError, match=r"a forward_loop runs the whole model, which takes .* give batches"):
        bridge.calibrate(tmp_path, "fp8", lambda model: model(torch.ones(1, 4, dtype=torch.int64)), memory="100kB")


@pytest.mark.slow
def test_weights_shared_by_depth_are_refused_with_the_block() -> None:
    config = transformers_config("AlbertForMaskedLM")
    source = open_source(config)
    scheme = load_scheme("fp8").bound(structure_of(source).sites)
    with pytest.raises(CalibrationError, match=r"albert_layer_groups.0 runs more than once .* give memory=.*workers=1"):
        walked(source, scheme, prepare(batches(), source))


@pytest.mark.slow
def test_a_parameter_used_outside_its_module_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built("llama")
    kind = type(model.model)
    forward = kind.forward

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = forward(self, *args, **kwargs)
        output.last_hidden_state = output.last_hidden_state * self.layers[0].mlp.up_proj.weight.sum()
        return output

    monkeypatch.setattr(kind, "forward", scaled)
    source = open_source(model)
    scheme = load_scheme("fp8").bound(structure_of(source).sites)
    with pytest.raises(CalibrationError, match=r"is used outside its module .* give memory="):
        walked(source, scheme, prepare(batches(), source))


def transformers_config(name: str) -> Any:
    """A random model with one layer that runs twice."""
    import transformers

    torch.manual_seed(3)
    cls = getattr(transformers, name)
    model = cls(
        cls.config_class(
            vocab_size=97, embedding_size=20, hidden_size=60, num_hidden_layers=2, num_attention_heads=6,
            intermediate_size=80, max_position_embeddings=64,
        )
    ).eval()  # fmt: skip
    model.config.architectures = [name]
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["megatron", "torchtitan", "quantized"])
def test_every_kind_of_source_is_read_block_by_block(kind: str, tmp_path: Path) -> None:
    build("LlamaForCausalLM").save_pretrained(tmp_path / "hf")
    target, quant = ("hf", "int8_wo") if kind == "quantized" else (kind, None)
    bridge.convert(tmp_path / "hf", target, quant, tmp_path / kind, verify=False, progress=False)
    source = open_source(tmp_path / kind)
    for name, kv in (("fp8", "fp8"), ("int4_awq", None)):
        scheme = load_scheme(name, kv=kv).bound(structure_of(source).sites)
        data = prepare(batches(), source)
        assert walked(source, scheme, data).to_bytes() == whole(source, scheme, data).to_bytes()


@pytest.mark.slow
def test_a_checkpoint_of_bfloat16_runs_in_float32(tmp_path: Path) -> None:
    build("LlamaForCausalLM").save_pretrained(tmp_path)
    source = source_for(open_source(tmp_path), "fp32")
    scheme = load_scheme("fp8").bound(structure_of(source).sites)
    data = prepare(batches(), source)
    assert walked(source, scheme, data).to_bytes() == whole(source, scheme, data).to_bytes()
