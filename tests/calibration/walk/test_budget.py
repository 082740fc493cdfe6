"""What a calibration is said to take follows what its walk holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("modelopt.torch.quantization")

from bridge.api.request import need_of  # noqa: E402
from bridge.calibration.amount import sampling_for  # noqa: E402
from bridge.calibration.data import DEFAULT, prepare  # noqa: E402
from bridge.calibration.walk.budget import calibration_need, default_tokens, stacked_bytes, streams_of, tokens_of  # noqa: E402
from bridge.calibration.walk.walk import Walk  # noqa: E402
from bridge.core.progress import no_progress  # noqa: E402
from bridge.planning.structure import structure_of  # noqa: E402
from bridge.quant.schemes.load import load_scheme  # noqa: E402
from bridge.sources.live_models import loading  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from tests.calibration.walk.walked_models import batches, mixture  # noqa: E402
from tests.models.decoder_families import build  # noqa: E402

TINY = Path(__file__).parents[3] / "examples" / "models" / "tiny-llama"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    build("LlamaForCausalLM", torch.float32).save_pretrained(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("kv", [None, "fp8"])
@pytest.mark.parametrize(
    "quants",
    [
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
    ],
    ids="+".join,
)
def test_as_many_streams_are_counted_as_a_walk_holds(
    quants: tuple[str, ...], kv: str | None, llama: Path, tmp_path: Path
) -> None:
    rules = zip(("*.down_proj", "*.o_proj", "*.up_proj"), quants[1:], strict=False)
    text = "".join(f'[[rule]]\nmodules = ["{modules}"]\nquant = "{quant}"\n' for modules, quant in rules)
    (tmp_path / "recipe.toml").write_text(f'base = "{quants[0]}"\n{text}')
    source = open_source(llama)
    structure = structure_of(source)
    scheme = load_scheme(tmp_path / "recipe.toml", kv=kv).bound(structure.sites)
    walk = Walk(source, structure, scheme, prepare(batches(), source), "cpu", no_progress)
    assert streams_of(scheme) == len(walk._streams)


@pytest.mark.parametrize("quant", ["fp8", "int8", "int8_sq"])
def test_a_plan_counts_the_rows_that_the_scheme_calibrates_with(quant: str) -> None:
    source, scheme = open_source(TINY), load_scheme(quant)
    data = prepare(None, source, sampling_for(DEFAULT, scheme))
    assert default_tokens(scheme, source.config) == tokens_of(data)
    assert need_of(source, scheme) == calibration_need(source.specs, source.config, scheme, tokens_of(data))


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
