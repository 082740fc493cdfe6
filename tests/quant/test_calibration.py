"""`Calibration` as a file: exact round trip, same bytes, every wrong field refused; and the policies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bridge.calibration.policies import settle
from bridge.core.errors import CalibrationError, WriteError
from bridge.core.formats.safetensors import layout
from bridge.core.values import Site, TensorSpec
from bridge.quant.calibration import Applied, Calibration, HeldOut, Provenance
from bridge.quant.schemes.grammar import Policies
from bridge.quant.schemes.load import load_scheme

PROVENANCE = Provenance("fp8", "d1", "LlamaForCausalLM", "m1", "bfloat16", "d2", 32, 128, {"torch": "2"})


def scalar(value: float) -> np.ndarray:
    return np.asarray(value, np.float32)


def sample() -> Calibration:
    held = HeldOut(
        ({"input_ids": np.arange(6).reshape(2, 3)}, {"input_ids": np.arange(4).reshape(2, 2)}),
        np.array([0, 2]),
        np.array([1, 3, 5]),
        np.float32([[1, 2, 3], [4, 5, 6]]),
        np.empty((2, 0), np.float32),
        3.5,
        None,
    )
    return Calibration(
        PROVENANCE,
        input_amax={"a.b": scalar(1.1), "a.c": scalar(2.0**-30)},
        smoothing_amax={"a.b": np.float32([0, 1.5, 3])},
        input_square={"a.b": np.float32([0, 2.25, 9])},
        awq_scale={"a.c": np.float32([0.5, 2])},
        pre_scale={"a.d": np.float32([0.5, 2, 4])},
        k_amax={"a": scalar(3)},
        v_amax={"a": scalar(4)},
        applied=(Applied("a.c", "input amax", "zero", "floor", 448.0),),
        held_out=held,
    )


def test_save_and_load_is_exact_and_writes_the_same_bytes(tmp_path: Path) -> None:
    first = sample().save(tmp_path / "a.safetensors")
    loaded = Calibration.load(first)
    again = loaded.save(tmp_path / "b.safetensors")
    assert first.read_bytes() == again.read_bytes()
    assert loaded.provenance == PROVENANCE and loaded.applied == sample().applied
    for kind in ("input_amax", "smoothing_amax", "awq_scale", "pre_scale", "k_amax", "v_amax", "input_square"):
        ours, theirs = getattr(sample(), kind), getattr(loaded, kind)
        assert ours.keys() == theirs.keys() and all(np.array_equal(ours[k], theirs[k]) for k in ours)
    held, was = loaded.held_out, sample().held_out
    assert held is not None and was is not None
    assert held.quantized.shape == (2, 0) and held.source_perplexity == 3.5 and held.quantized_perplexity is None
    assert [b["input_ids"].tolist() for b in held.inputs] == [b["input_ids"].tolist() for b in was.inputs]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


def test_the_order_of_insertion_does_not_reach_the_file(tmp_path: Path) -> None:
    turned = replace(sample(), input_amax=dict(reversed(list(sample().input_amax.items()))))
    a, b = sample().save(tmp_path / "a.safetensors"), turned.save(tmp_path / "b.safetensors")
    assert a.read_bytes() == b.read_bytes() and sample().digest == turned.digest


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "a.safetensors"
    target.mkdir()
    with pytest.raises(WriteError, match="cannot be written"):
        sample().save(target)
    assert [p.name for p in tmp_path.iterdir()] == ["a.safetensors"]


def written(path: Path, arrays: dict[str, np.ndarray], said: dict[str, object], version: str = "1") -> Path:
    specs = [TensorSpec(name, a.shape, a.dtype.name) for name, a in arrays.items()]
    head, offsets, size = layout(specs, {"qbridge.calibration": version, "qbridge": json.dumps(said)})
    data = bytearray(size)
    data[: len(head)] = head
    for name, a in arrays.items():
        data[offsets[name] : offsets[name] + a.nbytes] = a.tobytes()
    path.write_bytes(data)
    return path


SAID: dict[str, object] = {
    "provenance": {
        "scheme": "fp8", "scheme_digest": "x", "architecture": "A", "model": "m", "dtype": "float32",
        "data_digest": "d", "samples": 1, "sequence": 2, "versions": {"torch": "2"},
    },
    "applied": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("arrays", "said", "error"),
    [
        ({"input_amax/a": scalar(0)}, SAID, "not finite or not positive"),
        ({"input_amax/a": scalar(np.nan)}, SAID, "not finite or not positive"),
        ({"pre_scale/a": np.float32([1, np.inf])}, SAID, "not finite or not positive"),
        ({"smoothing_amax/a": np.float32([-1, 1])}, SAID, "not finite or not positive"),
        ({"input_square/a": np.float32([0, -1])}, SAID, "not finite or not positive"),
        ({"input_square/a": np.float32(1)}, SAID, "expected float32 of 1 axes"),
        ({"input_amax/a": np.float32([1, 2])}, SAID, "float32 of 0 axes"),
        ({"awq_scale/a": scalar(1)}, SAID, "float32 of 1 axes"),
        ({"input_amax/a": np.asarray(1.0)}, SAID, "float64"),
        ({"weights/a": scalar(1)}, SAID, "unknown tensor 'weights/a'"),
        ({}, {**SAID, "applied": [{"module": "a"}]}, "Applied: case, policy, value, what is missing or unknown"),
        ({}, {**SAID, "provenance": {**SAID["provenance"], "samples": "1"}}, "Provenance.samples: expected int"),  # type: ignore[dict-item]
        ({}, {**SAID, "provenance": {**SAID["provenance"], "versions": {"t": 2}}}, "versions: expected str, found 2"),  # type: ignore[dict-item]
        ({}, {"applied": []}, "provenance"),
        ({"held_out/rows": np.array([0])}, SAID, "held_out contains"),
    ],
)
def test_every_field_is_checked_on_load(
    tmp_path: Path, arrays: dict[str, np.ndarray], said: dict[str, object], error: str
) -> None:
    path = written(tmp_path / "c.safetensors", arrays, said)
    with pytest.raises(CalibrationError, match=error) as raised:
        Calibration.load(path)
    assert "c.safetensors" in str(raised.value)


def test_other_versions_and_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CalibrationError, match="version '2'; expected '1'"):
        Calibration.load(written(tmp_path / "c.safetensors", {}, SAID, version="2"))
    (tmp_path / "d.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(CalibrationError, match="not a calibration"):
        Calibration.load(tmp_path / "d.safetensors")


def test_require_names_everything_that_is_missing_with_layers_folded() -> None:
    formats = {f"l.{n}.q": load_scheme("int8_sq").format for n in range(4)}
    kv = load_scheme("fp8", kv="fp8").kv
    with pytest.raises(CalibrationError) as raised:
        replace(sample(), input_amax={"l.0.q": scalar(1)}).require(formats, ["l.0", "l.1"], kv)
    said = str(raised.value)
    assert "input amax: l.{1..3}.q" in said and "smoothquant: l.{0..3}.q" in said and "KV amax: l.{0..1}" in said


def test_nothing_is_required_of_formats_without_statistics() -> None:
    formats = {"x": load_scheme("int8_wo").format, "y": load_scheme("mxfp8").format, "z": "kept: output head"}
    assert sample().missing(formats, ["a"], None) == []


EXPERTS = [Site(f"l.{n}.experts.{e}.w1", "w", "out_in", (), n, e) for n in range(2) for e in range(3)]
BOUNDS = {site.module: 448.0 for site in EXPERTS} | {"q": 448.0}


def test_an_expert_that_saw_no_token_takes_the_maximum_of_its_layers_peers() -> None:
    found = {site.module: float(at + 1) for at, site in enumerate(EXPERTS)} | {"l.0.experts.1.w1": None}
    settled, applied = settle(found, "input amax", EXPERTS, BOUNDS, Policies())
    assert float(settled["l.0.experts.1.w1"]) == 3.0
    assert applied == [Applied("l.0.experts.1.w1", "input amax", "never seen", "peers", 3.0)]


def test_a_dead_layer_gets_a_scale_of_one() -> None:
    settled, applied = settle({"q": 0.0}, "input amax", EXPERTS, BOUNDS, Policies())
    assert float(settled["q"]) == 448.0 and applied[0].policy == "floor"


@pytest.mark.parametrize(
    ("value", "policies", "said"),
    [
        (None, Policies(), "never seen: q: no calibration token"),
        (float("nan"), Policies(), "not finite: q"),
        (float("inf"), Policies(), "not finite: q"),
        (0.0, Policies(zero="error"), "zero: q"),
    ],
)
def test_what_no_policy_can_mend_is_an_error(value: float | None, policies: Policies, said: str) -> None:
    with pytest.raises(CalibrationError, match=said):
        settle({"q": value}, "input amax", EXPERTS, BOUNDS, policies)


def test_what_the_plan_keeps_is_left_out_where_it_would_be_an_error() -> None:
    found = {"kept": None, "dead": 0.0, "q": 2.0}
    settled, _ = settle(found, "input amax", EXPERTS, BOUNDS | {"dead": 448.0}, Policies(), {"q"})
    assert {name: float(amax) for name, amax in settled.items()} == {"dead": 448.0, "q": 2.0}
    with pytest.raises(CalibrationError, match="never seen: kept: no calibration token"):
        settle(found, "input amax", EXPERTS, BOUNDS | {"dead": 448.0}, Policies(), {"q", "kept"})


def test_floor_can_be_asked_for() -> None:
    settled, _ = settle({"q": None}, "input amax", EXPERTS, BOUNDS, Policies(never_seen="floor"))
    assert float(settled["q"]) == 448.0
