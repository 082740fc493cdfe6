"""What a calibration is said to take follows what its walk holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.needs import needs

torch = pytest.importorskip("torch")
needs("modelopt")

import bridge  # noqa: E402
from bridge.api.plans import need_of  # noqa: E402
from bridge.api.request import Request, resolve  # noqa: E402
from bridge.calibration.algorithms.sizes import hessian_sizes, matrices_of  # noqa: E402
from bridge.calibration.calibrate import choose_strategy  # noqa: E402
from bridge.calibration.data import DEFAULT, Sampling, prepare  # noqa: E402
from bridge.calibration.job import CalibrationJob  # noqa: E402
from bridge.calibration.requirements import home_of, model_in_memory, sampling_for, source_for  # noqa: E402
from bridge.calibration.walk.budget import calibration_need, default_tokens, stacked_bytes, streams_of, tokens_of  # noqa: E402
from bridge.calibration.walk.run import Walk  # noqa: E402
from bridge.core.errors import UsageError  # noqa: E402
from bridge.core.values import Site, TensorSpec  # noqa: E402
from bridge.planning.structure import structure_of  # noqa: E402
from bridge.quant.schemes.load import load_scheme  # noqa: E402
from bridge.sources.live_models import loading  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from tests.calibration.walk.walked_models import batches, mixture  # noqa: E402
from tests.covering import grid  # noqa: E402
from tests.models.decoder_families import build  # noqa: E402

TINY = Path(__file__).parents[3] / "examples" / "models" / "tiny-llama"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    build("LlamaForCausalLM", torch.float32).save_pretrained(path)
    return path


RECIPES = [
    ("fp8",),
    ("int8_sq",),
    ("int4_awq",),
    ("int4_awq_full",),
    ("int4_gptq",),
    ("nvfp4_gptq",),
    ("nvfp4_local_hessian",),
    ("fp8", "int4_gptq"),
    ("int8_sq", "int4_awq"),
    ("int8_sq", "int4_gptq"),
    ("int8_sq", "nvfp4_local_hessian"),
    ("int4_awq", "int4_gptq"),
    ("int4_awq", "int4_awq_full"),
    ("nvfp4_gptq", "nvfp4_local_hessian"),
    ("int8_sq", "int4_awq", "int4_awq_full", "int4_gptq"),
]


@grid({"quants": RECIPES, "kv": [None, "fp8"]})
def test_as_many_streams_are_counted_as_a_walk_holds(
    quants: tuple[str, ...], kv: str | None, llama: Path, tmp_path: Path
) -> None:
    rules = zip(("*.down_proj", "*.o_proj", "*.up_proj"), quants[1:], strict=False)
    text = "".join(f'[[rule]]\nmodules = ["{modules}"]\nquant = "{quant}"\n' for modules, quant in rules)
    (tmp_path / "recipe.toml").write_text(f'base = "{quants[0]}"\n{text}')
    source = open_source(llama)
    structure = structure_of(source)
    scheme = load_scheme(tmp_path / "recipe.toml", kv=kv).bound(structure.sites)
    walk = Walk(CalibrationJob(source, structure, scheme, prepare(batches(), source)))
    assert streams_of(scheme) == streams_of(scheme, structure.sites) == len(walk.streams.data)


def test_what_signround_holds_of_a_block_is_counted() -> None:
    """Inputs of the block from the plain and from the quantized layers before it, and the plain outputs to learn by."""
    source, scheme = open_source(TINY), load_scheme("int4:signround")
    assert streams_of(scheme) == streams_of(scheme, structure_of(source).sites) == 3
    assert streams_of(load_scheme("int4:gptq")) == 1


@pytest.mark.parametrize("quant", ["int4:gptq", "int4:signround"])
def test_a_plan_says_that_codes_chosen_by_columns_walk_whatever_memory_there_is(quant: str) -> None:
    said = bridge.plan(TINY, "hf", quant, memory="8GB").calibration
    assert said.startswith("calibration takes ") and said.endswith("block by block")
    assert "whole model" not in said


@pytest.mark.parametrize("quant", ["fp8", "int8", "int8_sq"])
def test_a_plan_counts_the_rows_that_the_scheme_calibrates_with(quant: str) -> None:
    source, scheme = open_source(TINY), load_scheme(quant)
    structure = structure_of(source)
    data = prepare(None, source, sampling_for(DEFAULT, scheme))
    assert default_tokens(scheme, source.config) == tokens_of(data)
    expected = calibration_need(source.specs, source.config, scheme, tokens_of(data), structure.sites)
    assert need_of(source, structure, scheme) == expected


@pytest.mark.slow
@pytest.mark.parametrize("kv", [None, "fp8"])
def test_a_base_that_no_site_has_counts_no_stream(kv: str | None, llama: Path, tmp_path: Path) -> None:
    (tmp_path / "recipe.toml").write_text('base = "fp8"\n[[rule]]\nmodules = ["*"]\nquant = "int4_awq"\n')
    source = open_source(llama)
    structure = structure_of(source)
    scheme = load_scheme(tmp_path / "recipe.toml", kv=kv).bound(structure.sites)
    walk = Walk(CalibrationJob(source, structure, scheme, prepare(batches(), source)))
    assert streams_of(scheme, structure.sites) == len(walk.streams.data)


def test_a_conversion_plans_with_the_rows_that_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bridge.calibration.walk.budget.BASE", 0)  # the line has the figures of blocks
    source = open_source(TINY)
    figures = [
        resolve(source, Request(TINY, "hf", "fp8", sampling=sampling)).plan.calibration
        for sampling in (DEFAULT, Sampling(samples=64), Sampling(sequence=32))
    ]
    scheme, structure = load_scheme("fp8"), structure_of(source)
    assert figures[1] == need_of(source, structure, scheme, Sampling(samples=64)).line()
    assert len({*figures}) == 3


def test_hessians_are_those_of_the_axis_that_inputs_meet() -> None:
    """Conv1D stores [in, out]: `in` of GPT-2's up projection is the hidden size."""
    scheme = load_scheme("int4_gptq")
    spec = TensorSpec("h.0.mlp.c_fc.weight", (60, 240), "float32")
    site = Site("h.0.mlp.c_fc", spec.name, "in_out", layer=0)
    ((name, hessian),) = hessian_sizes(matrices_of({spec.name: spec}, scheme, [site]))[0].items()
    assert (name, hessian) == ("h.0", 4 * 60**2)


def test_the_hessian_of_a_quantized_head_is_counted(tmp_path: Path) -> None:
    build("LlamaForCausalLM", torch.float32, tie_word_embeddings=False).save_pretrained(tmp_path)
    (tmp_path / "recipe.toml").write_text('base = "int4_gptq"\n[[rule]]\nmodules = ["lm_head"]\nquant = "int4_gptq"\n')
    source = open_source(tmp_path)
    sites = structure_of(source).sites
    sizes = [
        hessian_sizes(matrices_of(source.specs, load_scheme(scheme).bound(sites), sites))[0]
        for scheme in ("int4_gptq", tmp_path / "recipe.toml")
    ]
    assert sizes[1] == sizes[0] | {"lm_head.weight": 4 * 60**2}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Qwen3MoeForCausalLM", "MixtralForCausalLM", "GptOssForCausalLM"])
def test_the_whole_model_counts_what_transformers_stacks(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixture(family).save_pretrained(tmp_path)
    source, read, places = open_source(tmp_path), loading.as_tensor, set()

    def noted(*given: Any) -> Any:
        tensor = read(*given)
        places.add(tensor.data_ptr())
        return tensor

    monkeypatch.setattr(loading, "as_tensor", noted)
    model = source.load_model()
    copied = sum(tensor.nbytes for tensor in model.parameters() if tensor.data_ptr() not in places)
    assert stacked_bytes(source.specs.values()) == copied
    resident = open_source(model)
    data, structure = prepare(batches(), source), structure_of(source)
    fp8 = load_scheme("fp8")
    ways = [choose_strategy(CalibrationJob(it, structure, fp8, data, free=1 << 40)) for it in (source, resident)]
    assert ways[0].need.whole - ways[1].need.whole == copied  # of a model in memory nothing is stacked


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_in_memory_is_known_in_float32(dtype: str) -> None:
    """A copy in float32 is not in memory yet, and may go block by block; it runs where the model is."""
    resident = source_for(open_source(build("LlamaForCausalLM", getattr(torch, dtype))), "fp32")
    structure, data = structure_of(resident), prepare(batches(), resident)
    assert model_in_memory(resident) and home_of(resident) == "cpu"
    found = choose_strategy(CalibrationJob(resident, structure, load_scheme("fp8"), data, free=1 << 40))
    assert found.resident and not found.ahead and not found.blocks
    if dtype == "float32":
        assert not choose_strategy(CalibrationJob(resident, structure, load_scheme("fp8"), data, free=1)).blocks
    else:
        with pytest.raises(UsageError, match="too little to calibrate"):
            choose_strategy(CalibrationJob(resident, structure, load_scheme("fp8"), data, free=1))


@pytest.mark.slow
def test_free_memory_is_read_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    looks: list[int] = []

    def shrinking() -> int:
        looks.append(1 << 40 >> len(looks))
        return looks[-1]

    monkeypatch.setattr("bridge.calibration.calibrate.available_memory", shrinking)
    bridge.calibrate(TINY, "fp8", samples=2, sequence=32)
    assert len(looks) == 1
    bridge.convert(TINY, "hf", "fp8", tmp_path / "out", samples=2, sequence=32, verify=False, progress=False)
    assert len(looks) == 2


def test_activations_of_a_device_wait_in_the_memory_of_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    source = open_source(TINY)
    structure, scheme = structure_of(source), load_scheme("fp8")
    ids = torch.ones(8, 128, dtype=torch.long)
    data = prepare([{"input_ids": ids}] * 64, source)
    monkeypatch.setattr("bridge.calibration.walk.budget.BASE", 0)
    job = CalibrationJob(source, structure, scheme, data, free=1 << 40)
    host, small = (choose_strategy(replace(job, device=device)) for device in (None, "cuda"))
    assert small.need.blocks.held == small.need.blocks.in_files == host.need.blocks.held and not small.need.offloaded
    monkeypatch.setattr("bridge.calibration.walk.budget.STAYS", 1 << 10)
    device = choose_strategy(replace(job, device="cuda"))
    assert device.need.blocks.held == host.need.blocks.in_files < host.need.blocks.held
    assert device.need.offloaded == host.need.states
    assert device.spill(None) is None
    monkeypatch.setattr("bridge.calibration.calibrate.available_memory", lambda: device.need.offloaded - 1)
    with pytest.raises(UsageError, match=r"of activations wait in the host's memory, of which .* give fewer samples="):
        device.spill(None)
