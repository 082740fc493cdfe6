"""The errors of a walk are those that hooks see on the whole model, in which ModelOpt quantized one unit alone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.needs import needs

torch = pytest.importorskip("torch")
needs("modelopt")
transformers = pytest.importorskip("transformers")

from bridge.api.sensitivity.units import units_of  # noqa: E402
from bridge.calibration.data import Data, prepare  # noqa: E402
from bridge.calibration.job import CalibrationJob  # noqa: E402
from bridge.calibration.walk.block_errors import ALL, BlockErrors, BlockProbe  # noqa: E402
from bridge.calibration.walk.run import measure_block_errors  # noqa: E402
from bridge.planning.structure import structure_of  # noqa: E402
from bridge.quant.schemes.load import load_scheme  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from bridge.sources.source import Source  # noqa: E402
from tests.calibration.walk.walked_models import batches  # noqa: E402
from tests.models.decoder_families import build  # noqa: E402
from tests.oracles.modelopt_oracle import ask  # noqa: E402

pytestmark = pytest.mark.slow
WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 16}  # blocks of 128 fit


def saved(family: str, path: Path, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> tuple[Any, Source]:
    """A model as transformers loads it, and its source, which may not load it."""
    build(family, torch.float32, **fields).save_pretrained(path)
    model = getattr(transformers, family).from_pretrained(path).eval()
    source = open_source(path)
    monkeypatch.setattr(source, "load_model", lambda: pytest.fail("the whole model was loaded"), raising=True)
    return model, source


def data_of(source: Source) -> Data:
    """Two held-out batches, one of them padded."""
    made = batches()
    return replace(prepare(made, source), batches=tuple(made[:2]), held_out=(made[1], made[3]))


def measured(source: Source, scheme: str, data: Data) -> tuple[dict[str, list[str]], BlockErrors]:
    structure, bound = structure_of(source), load_scheme(scheme)
    bound = bound.bound(structure.sites)
    units = {unit.name: [site.module for site in unit.sites] for unit in units_of(structure, bound, source.specs)}
    return units, measure_block_errors(CalibrationJob(source, structure, bound, data), units)


def outputs(model: Any, block: str, held_out: Sequence[Any]) -> Any:
    """What a block returns for the held-out inputs, without padding, in float64."""
    kept: list[Any] = []

    def keep(_: Any, __: Any, output: Any) -> None:
        kept.append((output if isinstance(output, torch.Tensor) else output[0]).double())

    handle = model.get_submodule(block).register_forward_hook(keep)
    with torch.no_grad():
        for batch in held_out:
            model(**batch, use_cache=False)
    handle.remove()
    return torch.cat([out[batch["attention_mask"] == 1] for out, batch in zip(kept, held_out, strict=True)])


@pytest.mark.parametrize(
    ("family", "scheme", "block", "fields"),
    [
        ("LlamaForCausalLM", "fp8", "model.layers.1", {}),
        ("LlamaForCausalLM", "int4_awq", "model.layers.0", WIDE),
        ("GPT2LMHeadModel", "int8_sq", "transformer.h.1", {}),
        ("Qwen3MoeForCausalLM", "fp8", "model.layers.0", {}),
    ],
)
def test_errors_are_those_of_hooks_on_the_whole_model(
    family: str, scheme: str, block: str, fields: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, source = saved(family, tmp_path, monkeypatch, **fields)
    data = data_of(source)
    units, found = measured(source, scheme, data)
    inside = [name for name, modules in units.items() if modules[0].startswith(f"{block}.")]
    assert {unit for name, unit in found.errors if name == block} == {ALL, *inside}
    plain = outputs(model, block, data.held_out)
    for unit in [*inside, ALL]:
        on = inside if unit == ALL else [unit]
        off = {live(module): {"enable": False} for name in units if name not in on for module in units[name]}
        alone = ask(model, scheme, lambda model: [model(**batch) for batch in data.batches] and None, changes=off).model
        changed = outputs(alone, block, data.held_out)
        error = found.errors[block, unit]
        # the same kernels on the same inputs, but sums over rows in another order
        wanted = float((changed - plain).square().sum() / plain.square().sum())
        assert error.error == pytest.approx(wanted, rel=1e-6) and wanted > 0
        cosine = torch.nn.functional.cosine_similarity(changed.flatten(), plain.flatten(), 0)
        assert error.cosine == pytest.approx(float(cosine), rel=1e-12)
    assert found.tokens == sum(int(batch["attention_mask"].sum()) for batch in data.held_out)


def live(module: str) -> str:
    """The quantizers of a checkpoint's module: those of experts lie in the module that holds them all."""
    name, experts, _ = module.partition(".experts.")
    return f"{name}.experts.*" if experts else f"{module}.*"


def test_a_block_that_changes_its_inputs_in_place_is_measured_as_if_it_did_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, source = saved("LlamaForCausalLM", tmp_path, monkeypatch)
    kind, data = type(model.model.layers[0]), data_of(source)
    forward = kind.forward

    def errors(shift: Callable[[Any], Any]) -> Any:
        def shifted(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            return forward(self, shift(hidden_states), *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", shifted)
            return measured(source, "int8_wo", data)[1].errors

    assert errors(lambda states: states.add_(0.25)) == errors(lambda states: states + 0.25)


def test_a_unit_in_several_blocks_has_the_sum_of_its_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, source = saved("T5ForConditionalGeneration", tmp_path, monkeypatch)
    made = batches(decoder=True)
    units, found = measured(source, "int8_wo", prepare(made, source))
    crossing = next(unit for unit in units if len({name for name, other in found.errors if other == unit}) > 1)
    parts = [error for (_, unit), error in found.errors.items() if unit == crossing]
    together = found.of(crossing)
    assert together and together.error == pytest.approx(sum(part.error for part in parts), rel=1e-15)
    assert together.cosine == min(part.cosine for part in parts)


def test_memory_holds_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, source = saved("LlamaForCausalLM", tmp_path, monkeypatch, num_hidden_layers=4, intermediate_size=808)
    held: list[int] = []
    runner = BlockProbe.runner

    def noted(self: Any, block: str, plain: Any, calibrated: Any) -> Any:
        held.append(_held())
        return runner(self, block, plain, calibrated)

    monkeypatch.setattr(BlockProbe, "runner", noted)
    layer = sum(p.nbytes for p in model.model.layers[0].parameters())
    data = data_of(source)
    gc.collect()
    before = _held()
    for scheme, copies in (("fp8", 1), ("int8_sq", 2)):  # a smoothed weight and the original
        held.clear()
        measured(source, scheme, data)
        assert layer <= max(held) - before < (copies + 0.6) * layer


def _held() -> int:
    """Bytes of all tensors."""
    kinds = (torch.Tensor, torch.nn.Parameter)
    tensors = (t for t in gc.get_objects() if type(t) in kinds and t.device.type == "cpu")
    kept = (tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided)
    return sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())


def test_each_weight_is_read_once_and_an_unquantized_head_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, source = saved("LlamaForCausalLM", tmp_path, monkeypatch, tie_word_embeddings=False)
    read: list[str] = []
    rows = type(source).read_rows

    def noted(self: Any, name: str, *args: Any) -> Any:
        read.append(name)
        return rows(self, name, *args)

    monkeypatch.setattr(type(source), "read_rows", noted)
    measured(source, "fp8", data_of(source))
    assert sorted(read) == sorted({*source.specs} - {"lm_head.weight"})
