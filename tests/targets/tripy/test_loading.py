"""`load` fills a user's module with what fits it exactly; else it names every difference, and touches nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import bridge
from bridge.core.errors import PlanError, SourceError, UsageError
from bridge.targets.tripy import load
from bridge.targets.tripy.loading import differing_prefixes
from tests.targets.tripy.test_building import ENTRY

INT4 = ENTRY | {"quant_dtype": "int4", "weight_quant_dim": None, "block": 10}
FLOAT8 = ENTRY | {"quant_dtype": "float8", "weight_quant_dim": None}
SHAPES = {"weight": (60, 80), "bias": (60,)}


def written(
    directory: Path,
    modules: dict[str, Any],
    dtype: torch.dtype = torch.float32,
    copies: dict[str, str] | None = None,
    **shapes: Any,
) -> Path:
    """A directory as target tripy writes it: Linears `h.0` and `h.1` (80 to 60) as `modules` says, filled with sevens.

    shapes: of tensors of both that are otherwise, None leaves one out.
    """
    tensors = {}
    for name in ("h.0", "h.1"):
        entry, parts = modules.get(name), dict(SHAPES)
        if entry:
            parts["weight_scale"] = (60,) if entry["weight_quant_dim"] == 0 else ()
        if entry and entry["block"]:
            parts["weight_scale"] = (6, 80)
        if entry and entry["layout"] == "in_out":
            parts |= {"weight": (80, 60), "weight_scale": (8, 60)}
        if entry and entry["input_scale"]:
            parts["input_scale"] = ()
        if entry and entry["pre_quant_scale"]:
            parts["pre_quant_scale"] = (80,)
        parts |= shapes
        tensors |= {f"{name}.{part}": torch.full(of, 7.0, dtype=dtype) for part, of in parts.items() if of is not None}
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    section = {
        "format": 1,
        "dtype": str(dtype).removeprefix("torch."),
        "snapped": True,
        "modules": modules,
        "copies": copies or {},
    }
    (directory / "config.json").write_text(json.dumps({"tripy": section}))
    return directory


def stack(tp: Any, part: Any, mask: bool = False) -> Any:
    """A user's own module with two `part()`s, called h.0 and h.1, and perhaps a mask that it made itself."""

    class Stack(tp.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = [part(), part()]
            if mask:
                self.mask = tp.Tensor(torch.ones(4, 4))

        def forward(self, x: Any) -> Any:
            return self.h[1](self.h[0](x))

    return Stack()


def both(entry: dict[str, Any]) -> dict[str, Any]:
    return {"h.0": entry, "h.1": entry}


def held(tensor: Any) -> torch.Tensor:
    return torch.from_dlpack(tensor)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_every_tensor_arrives(dtype: str, tp: Any, tmp_path: Path) -> None:
    modules = both(ENTRY | {"input_scale": True})
    module = stack(tp, lambda: tp.Linear(80, 60, True, getattr(tp, dtype), tp.int8, 0))
    load(written(tmp_path, modules, getattr(torch, dtype)), module)
    for name, tensor in module.state_dict().items():
        assert (held(tensor) == 7).all() and held(tensor).dtype == getattr(torch, dtype), name
    assert "h.1.input_scale" in module.state_dict()


def test_what_the_user_made_stays(tp: Any, tmp_path: Path) -> None:
    module = stack(tp, lambda: tp.Linear(80, 60), mask=True)
    load(written(tmp_path, {}), module)
    assert (held(module.mask) == 1).all() and (held(module.h[0].bias) == 7).all()


def test_all_differences_are_told_at_once_and_nothing_is_loaded(tp: Any, tmp_path: Path) -> None:
    module = stack(tp, lambda: tp.Linear(80, 64, dtype=tp.float16))
    module.norm = tp.LayerNorm(60)
    before = dict(module.state_dict())
    directory = written(tmp_path, {"h.0": ENTRY}, bias=None, beta=(60,))
    with pytest.raises(PlanError) as raised:
        load(directory, module)
    assert str(raised.value).splitlines() == [
        f"{directory} does not fit Stack; nothing was loaded:",
        "  h.0: int8 in the file, not quantized in the module; "
        "write tp.Linear(..., quant_dtype=tp.int8, weight_quant_dim=0)",
        "  h.{0..1}.bias, norm.weight, norm.bias: missing in the file",
        "  h.{0..1}.beta: in the file, but not a parameter of the module",
        "  h.{0..1}.weight: float32 in the file, float16 in the module; convert with dtype='float16', "
        "or build the module in tp.float32",
        "  h.{0..1}.weight: shape (60, 80) in the file, (64, 80) in the module",
    ]
    assert module.state_dict() == before


def test_layers_are_folded(tp: Any, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"\n  h.\{0..1\}.bias: missing in the file$"):
        load(written(tmp_path, {}, bias=None), stack(tp, lambda: tp.Linear(80, 60)))


LINEAR = {
    "int8 where int4 is": (ENTRY, {"quant_dtype": "int4"}, "int8 in the file, int4 in the module; write tp.Linear"),
    "another axis": (
        ENTRY,
        {"quant_dtype": "int8", "weight_quant_dim": 1},
        "weight_quant_dim 0 in the file, 1 in the module; "
        r"write tp.Linear\(..., quant_dtype=tp.int8, weight_quant_dim=0\)",
    ),
    "an axis from the end": (
        ENTRY, {"quant_dtype": "int8", "weight_quant_dim": -2}, "weight_quant_dim 0 in the file, -2 in the module",
    ),
    "not quantized in the file": (
        None, {"quant_dtype": "int8", "weight_quant_dim": 0}, "int8 in the module, not quantized in the file",
    ),
    "blocks along in": (
        INT4 | {"layout": "in_out"},
        {"quant_dtype": "int4"},
        r"stored \[in, out\] in blocks along `in`, which tp.Linear cannot hold; "
        r"write bridge.targets.tripy.models.layers.BlockLinear"
        r"\(80, 60, bias=True, dtype=tp.float32, block=10, pre_quant_scale=False\), "
        "or convert with quant='int4_wo', linear=True, which tp.Linear holds at a loss, without a pre-scale",
    ),
    "pre-scale": (
        ENTRY | {"pre_quant_scale": True},
        {"quant_dtype": "int8", "weight_quant_dim": 0},
        "has a pre-scale in the file, which the input must be multiplied by; "
        "write bridge.targets.tripy.models.layers.SmoothLinear",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LINEAR)
def test_other_quantization_is_named_with_what_to_write(case: str, tp: Any, tmp_path: Path) -> None:
    entry, settings, said = LINEAR[case]
    settings = {**settings, "quant_dtype": getattr(tp, settings["quant_dtype"])}
    module = stack(tp, lambda: tp.Linear(80, 60, **settings))
    with pytest.raises(PlanError, match=rf"nothing was loaded:\n  h.\{{0..1\}}: {said}") as raised:
        load(written(tmp_path, both(entry) if entry else {}), module)
    assert len(str(raised.value).splitlines()) == 2, "its tensors differ for the same reason"


def test_block_linear_takes_no_blocks_along_out(tp: Any, tmp_path: Path) -> None:
    from bridge.targets.tripy.models.layers import BlockLinear

    module = stack(tp, lambda: BlockLinear(80, 60, block=10))
    with pytest.raises(PlanError, match=r"stored \[out, in\], which BlockLinear does not hold; write tp.Linear"):
        load(written(tmp_path, both(INT4)), module)
    load(written(tmp_path, both(INT4 | {"layout": "in_out"})), module)


@pytest.mark.parametrize(
    ("entry", "shape", "wanted"), [(FLOAT8, (1,), "()"), (INT4, (80, 6), "(6, 80)"), (INT4, (1, 1), "(6, 80)")]
)
def test_scale_of_a_shape_that_would_fail_only_when_run_is_refused(
    entry: dict[str, Any], shape: tuple[int, ...], wanted: str, tp: Any, tmp_path: Path
) -> None:
    module = stack(tp, lambda: tp.Linear(80, 60, quant_dtype=getattr(tp, entry["quant_dtype"])))
    with pytest.raises(SourceError) as raised:
        load(written(tmp_path, both(entry), weight_scale=shape), module)
    assert f"h.{{0..1}}: has a weight_scale of shape {shape}; Tripy reads {wanted}" in str(raised.value)
    load(written(tmp_path, both(entry)), module)


def test_scale_of_an_earlier_load_does_not_stay(tp: Any, tmp_path: Path) -> None:
    module = stack(tp, lambda: tp.Linear(80, 60, quant_dtype=tp.float8))
    load(written(tmp_path / "a", both(FLOAT8 | {"input_scale": True})), module)
    with pytest.raises(PlanError, match="input_scale: missing in the file"):
        load(written(tmp_path / "b", both(FLOAT8)), module)


def test_bias_of_an_earlier_load_does_not_stay_in_a_class_of_the_users(tp: Any, tmp_path: Path) -> None:
    from nvtripy.frontend.module.parameter import DefaultParameter

    class Plain(tp.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = DefaultParameter((60, 80), tp.float32), DefaultParameter((60,), tp.float32)

    module = stack(tp, Plain, mask=True)
    load(written(tmp_path / "a", {}), module)
    with pytest.raises(PlanError, match=r"h\.\{0\.\.1\}\.bias: missing in the file"):
        load(written(tmp_path / "b", {}, bias=None), module)
    load(written(tmp_path / "a", {}), module)


@pytest.mark.parametrize(
    ("entry", "changes", "says"),
    [
        (FLOAT8 | {"input_scale": True}, {"input_scale": None}, "h.{0..1}: lacks input_scale of shape ()"),
        (FLOAT8, {"input_scale": ()}, "h.{0..1}.input_scale: does not belong to a quantized module of config.json"),
        (ENTRY, {"weight_scale": None}, "h.{0..1}: has no weight matrix with a weight_scale"),
    ],
)
def test_files_that_contradict_each_other_are_not_loaded(
    entry: dict[str, Any], changes: dict[str, Any], says: str, tp: Any, tmp_path: Path
) -> None:
    module = stack(tp, lambda: tp.Linear(80, 60, quant_dtype=getattr(tp, entry["quant_dtype"])))
    with pytest.raises(SourceError, match="its files contradict each other; nothing was loaded") as raised:
        load(written(tmp_path, both(entry), **changes), module)
    assert says in str(raised.value)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_scale_that_is_none_is_not_loaded(value: float, tp: Any, tmp_path: Path) -> None:
    out = written(tmp_path, both(FLOAT8))
    held = load_file(out / "model.safetensors")
    save_file(held | {"h.1.weight_scale": torch.tensor(value)}, out / "model.safetensors")
    with pytest.raises(SourceError, match=r"h\.1: has weight_scale that is not finite and positive"):
        load(out, stack(tp, lambda: tp.Linear(80, 60, quant_dtype=tp.float8)))


def test_files_that_are_not_whole_are_named(tp: Any, tmp_path: Path) -> None:
    module = stack(tp, lambda: tp.Linear(80, 60))
    weights = written(tmp_path, {}) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(SourceError, match=r"model.safetensors.*shorter than"):
        load(tmp_path, module)
    weights.unlink()
    with pytest.raises(SourceError, match=r"model.safetensors: cannot be opened: No such file"):
        load(tmp_path, module)


def test_module_of_another_framework_is_refused(tp: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"load takes a tp.Module to fill, not Linear"):
        load(written(tmp_path, {}), torch.nn.Linear(80, 60))


def test_arguments_in_the_wrong_order_are_named(tp: Any, tmp_path: Path) -> None:
    module = stack(tp, lambda: tp.Linear(80, 60))
    with pytest.raises(UsageError, match=r"as in load\(directory, module\); not NoneType"):
        load(None, module)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"as in load\(directory, module\); not Stack"):
        load(module, written(tmp_path, {}))


def test_block_linear_is_written_as_the_message_says(tp: Any, tmp_path: Path) -> None:
    """What stands after "write" is evaluated, and the module made of it loads."""
    from bridge.targets.tripy.models.layers import BlockLinear

    entry = INT4 | {"layout": "in_out", "pre_quant_scale": True}
    directory = written(tmp_path, both(entry), torch.float16, bias=None)
    with pytest.raises(PlanError) as raised:
        load(directory, stack(tp, lambda: tp.Linear(80, 60, False, tp.float16, tp.int4)))
    said = str(raised.value).split("write ")[1].split(", or convert")[0]
    module = stack(tp, lambda: eval(said, {"bridge": bridge, "tp": tp}))
    load(directory, module)
    assert (held(module.h[1].pre_quant_scale) == 7).all()
    without = stack(tp, lambda: BlockLinear(80, 60, False, tp.float16, 10))
    with pytest.raises(PlanError, match=r"h.\{0..1\}: has a pre-scale in the file"):
        load(directory, without)
    with pytest.raises(UsageError, match="in_features = 80 does not divide into blocks of 128"):
        BlockLinear(80, 60)


def test_shape_of_a_linear_that_is_quantized_otherwise_is_told_too(tp: Any, tmp_path: Path) -> None:
    module = stack(tp, lambda: tp.Linear(80, 64, False, tp.float16, tp.int4))
    with pytest.raises(PlanError) as raised:
        load(written(tmp_path, both(INT4 | {"layout": "in_out"})), module)
    lines = [line.strip().partition(";")[0] for line in str(raised.value).splitlines()[1:]]
    assert lines == [
        "h.{0..1}: stored [in, out] in blocks along `in`, which tp.Linear cannot hold",
        "h.{0..1}.bias: in the file, but not a parameter of the module",
        "h.{0..1}.weight: float32 in the file, float16 in the module",
        "h.{0..1}.weight: shape (60, 80) in the file, (64, 80) in the module",
    ]


@pytest.mark.parametrize("copies", [{"h.1.bias": "h.0.bias"}, {"h.0.bias": "h.1.bias"}])
def test_tensor_under_two_names_needs_one_of_them(copies: dict[str, str], tp: Any, tmp_path: Path) -> None:
    parts = iter((True, False))
    module = stack(tp, lambda: tp.Linear(80, 60, next(parts)))
    with pytest.raises(PlanError, match=r"h.1.bias: in the file, but not a parameter of the module$"):
        load(written(tmp_path, {}), module)
    load(written(tmp_path, {}, copies=copies), module)
    assert (held(module.h[0].bias) == 7).all()
    neither = stack(tp, lambda: tp.Linear(80, 60, False))
    with pytest.raises(PlanError, match=r"h.\{0..1\}.bias: in the file, but not a parameter of the module$"):
        load(written(tmp_path, {}, copies=copies), neither)


def test_one_prefix_that_differs_is_told_in_one_line(tp: Any, tmp_path: Path) -> None:
    class Holder(tp.Module):
        def __init__(self, **settings: Any) -> None:
            super().__init__()
            self.body = stack(tp, lambda: tp.Linear(80, 60, **settings))

    int8 = {"quant_dtype": tp.int8, "weight_quant_dim": 0}
    directory = written(tmp_path, both(ENTRY))
    with pytest.raises(PlanError) as raised:
        load(directory, Holder(**int8))
    assert str(raised.value).splitlines()[1:] == [
        "  names begin with 'body.' in the module only; load its part 'body' alone"
    ]
    with pytest.raises(PlanError) as raised:
        load(directory, Holder(bias=False))
    assert [line.partition(";")[0] for line in str(raised.value).splitlines()[1:]] == [
        "  names begin with 'body.' in the module only",
        "  body.h.{0..1}: int8 in the file, not quantized in the module",
        "  body.h.{0..1}.bias: in the file, but not a parameter of the module",
    ]


NAMES = ["wte.weight", "h.0.fc.weight", "h.1.fc.weight"]


@pytest.mark.parametrize(
    ("surplus", "lacking", "said"),
    [
        (["transformer."], ["body."], "'transformer.' in the file, with 'body.' in the module; call it 'transformer'"),
        (["transformer."], [""], "'transformer.' in the file only; make this module the part 'transformer' of another"),
        ([""], ["transformer."], "'transformer.' in the module only; load its part 'transformer' alone"),
        (["a.model."], ["b.model."], "'a.' in the file, with 'b.' in the module; call it 'a' there"),
        (["a.", "b."], ["c."], "None"),
        (["a."], [], "None"),
    ],
)
@pytest.mark.parametrize("beside", [[], ["lm_head.bias"]])
def test_prefixes(surplus: list[str], lacking: list[str], said: str, beside: list[str]) -> None:
    of = [[prefix + name for prefix in prefixes for name in NAMES] for prefixes in (surplus, lacking)]
    assert said in str(differing_prefixes(of[0] + beside, of[1]))
    assert said in str(differing_prefixes(of[0], of[1] + beside)) or not lacking
