"""The public surface: a name or a signature that changes here is a change for users, and belongs in CHANGELOG.md."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from pathlib import Path

import pytest

import bridge

SIGNATURES = {
    "plan": (
        "model, target, quant=None, *, kv=None, group=None, zero_points=False, config=None, runtime=None, memory=None, "
        "keep=None, drop_layers=None, sparse=None, base=None, adapter=None, out=None, overwrite=False, "
        "candidates=None, rotate=None, **options"
    ),
    "load": "model, source, *, config=None, base=None, decode=True, workers=None",
    "estimate": "plan, model=None, *, verify=True, machine=None",
    "pruned": (
        "model, keep=None, *, drop_layers=None, data=None, importance='output', repair=False, order='source', "
        "sparse=None, sparse_method='sparsegpt', config=None, tokenizer=None, samples=None, sequence=None, field=None, "
        "device=None, progress=None"
    ),
    "prune": (
        "model, keep=None, out=None, *, target='hf', quant=None, drop_layers=None, data=None, importance='output', "
        "repair=False, order='source', sparse=None, sparse_method='sparsegpt', config=None, tokenizer=None, "
        "samples=None, sequence=None, field=None, device=None, verify=True, overwrite=False, resume=True, "
        "progress=None, memory=None, workers=None, **options"
    ),
    "engine": "model, gpu=None, out=None, *, profile=None, memory=None, progress=None",
    "distill": (
        "student, teacher, data=None, out=None, *, target='hf', quant=None, steps=1000, batch=8, sequence=512, "
        "lr=0.0001, temperature=1.0, pairs='norm', top_k=None, teacher_cache=None, calib=None, field=None, seed=0, "
        "save_every=100, eval_every=100, device=None, verify=True, overwrite=False, resume=True, progress=None, "
        "memory=None, workers=None, **options"
    ),
    "inspect": (
        "model, config=None, *, against=None, quant=None, calib=None, data=None, steps=None, gradients=False, "
        "nan=False, cost=False, out=None, sink=None, samples=None, sequence=None, field=None, device=None, "
        "tokenizer=None, overwrite=False, feature_dirs=None, progress=None"
    ),
    "inspecting": (
        "model, config=None, *, quant=None, calib=None, nan=False, out=None, overwrite=False, sink=None, "
        "feature_dirs=None, group=None"
    ),
    "chain": "path, *, overwrite=False, resume=True, progress=None",
    "search": (
        "model, budget, *, dims=None, data=None, importance='output', repair=False, quant=None, config=None, "
        "tokenizer=None, samples=None, sequence=None, field=None, device=None, progress=None"
    ),
    "convert": (
        "model, target, quant=None, out=None, *, calib=None, data=None, samples=None, sequence=None, field=None, "
        "kv=None, group=None, zero_points=False, device=None, config=None, tokenizer=None, base=None, adapter=None, "
        "verify=True, overwrite=False, resume=True, progress=None, memory=None, runtime=None, compute=None, "
        "workers=None, candidates=None, rotate=None, evaluate=None, gate=None, **options"
    ),
    "calibrate": (
        "model, quant, data=None, *, kv=None, group=None, zero_points=False, device=None, config=None, tokenizer=None, "
        "base=None, samples=None, sequence=None, field=None, memory=None, partial=None, progress=None, "
        "compute=None, workers=None, candidates=None, rotate=None"
    ),
    "verify": "out, against, *, data=None, tokenizer=None, base=None, evaluate=None, gate=None, progress=None",
    "run": "out, text, *, tokens=64, chat=False, system=None, beside=None, temperature=0.0, seed=0, image=None, "
    "audio=None, stream=None",
    "check": "",
    "repair": "directory, out, *, overwrite=False, resume=True, progress=None",
    "tensors": (
        "model, target='vllm', quant=None, *, calib=None, kv=None, config=None, memory=None, timeout=600.0, **options"
    ),
    "sensitivity": (
        "model, quant, data=None, *, target=None, runtime=None, budget=None, fallback=None, method='kl', kv=None, "
        "device=None, config=None, tokenizer=None, samples=None, sequence=None, field=None, memory=None, "
        "ranking=None, progress=None, compute=None, rotate=None, **options"
    ),
    "batch": (
        "manifest, *, engine=None, workers=None, memory=None, dry_run=False, resume=True, only=None, strict=None, "
        "progress=None"
    ),
    "modelopt_quantize": "model_hf, quant_mode, *, dataset_name=None, tokenizer=None",
    "create_forward_loop": (
        "model=None, dataset_name='cnn_dailymail', tokenizer=None, batch_size=1, num_samples=512, "
        "max_sample_length=512, device=None, include_labels=False, dataloader=None, allowed_non_tensor_keys=None"
    ),
    "convert_to_scale": "amax, maxbound",
    "get_submodule": "module, attr_name",
    "load_weights_from_hf": "model, model_type, dtype",
    "load_quant_weights_from_hf": "model, model_type, dtype, quant_mode",
    "Quantizer": "quantization_config, export_config",
}
REPORT = (
    "out", "plan_digest", "target", "scheme", "tensors", "quantized", "bytes", "source_bytes", "seconds", "peak_memory",
    "parity", "skipped", "policies", "findings", "notes", "versions", "made_from", "counts", "storage", "dtypes",
    "outliers", "experts", "advice", "programs", "next", "lacks", "inspect", "inspected", "pruning", "distillation",
)  # fmt: skip


def test_the_names_are_these_and_no_others() -> None:
    values = {"BatchReport", "BridgeError", "Calibration", "Estimate", "Inspection", "Plan", "Report", "Scheme"}
    values |= {"Loaded", "Searched", "Sensitivity", "__version__"}
    names = {*SIGNATURES, *values}
    assert set(bridge.__all__) == names
    assert all(getattr(bridge, name) is not None for name in names)


def test_type_checkers_see_the_same_names_at_the_same_homes() -> None:
    stub = ast.parse(Path(bridge.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    found = {}
    for line in stub.body:
        assert isinstance(line, ast.ImportFrom)
        for name in line.names:
            assert name.asname == name.name, "without `as` a name is private"
            found[name.name] = line.module
    packages = {name: home.rpartition(".")[0] for name, home in bridge._PACKAGES.items()}
    assert found == bridge._HOME | packages


@pytest.mark.parametrize("verb", SIGNATURES)
def test_a_verb_or_a_door_keeps_its_signature(verb: str) -> None:
    signature = inspect.signature(getattr(bridge, verb))
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == f"({SIGNATURES[verb]})"


def test_a_report_keeps_its_fields() -> None:
    assert tuple(field.name for field in dataclasses.fields(bridge.Report)) == REPORT


@pytest.mark.parametrize("method", ["save", "load"])
def test_a_calibration_can_be_kept(method: str) -> None:
    assert callable(getattr(bridge.Calibration, method))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'converted'"):
        _ = bridge.converted


def test_every_error_of_the_package_has_one_base_and_an_exit_code() -> None:
    from bridge.core import errors

    own = {value for value in vars(errors).values() if inspect.isclass(value) and value.__module__ == errors.__name__}
    classes = own - {errors.BridgeWarning, errors.Stopped}
    assert len(classes) > 5
    assert all(issubclass(cls, bridge.BridgeError) and cls.exit_code in (1, 2) for cls in classes)
