"""Reports to look at in a browser: two of real conversions, and made ones that are hard to draw."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import torch

import bridge
from bridge.reporting.make import save
from bridge.reporting.report import Advice, Coverage, Outliers, Report, Storage
from bridge.verification.parity import Count, OutputParity, Parity, ScaleRange, TensorParity
from tests.models.export_families import build
from tests.oracles import export_oracle

TINY = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"
KINDS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")


def dense(root: Path) -> Path:
    """The tiny Llama to ONNX in FP8."""
    bridge.convert(TINY, "trt", "fp8", root / "tiny-llama-fp8")
    return root / "tiny-llama-fp8" / "report.html"


def experts(root: Path) -> Path:
    """A mixture of experts to a checkpoint in NVFP4, calibrated; ModelOpt's kernels for it need a GPU, FP8's do not."""
    torch.manual_seed(7)
    source = export_oracle.save(build("qwen3-moe"), root / "moe")
    batches = [{"input_ids": torch.randint(3, 330, (2, 40))} for _ in range(3)]
    calibration = bridge.calibrate(source, "fp8", batches)
    bridge.convert(source, "hf", "nvfp4", root / "qwen3-moe-nvfp4", calib=calibration)
    return root / "qwen3-moe-nvfp4" / "report.html"


def failed(root: Path) -> Path:
    """Parity below its gates, findings, experts that no token reached, hostile names, and numbers at their ends."""
    hostile = "model.layers.1.<script>alert('name')</script>.\"quoted\"&amp;.weight"
    tensors = [_tensor(f"model.layers.{n}.{kind}.weight", 22 + n + 0.3 * n, n != 3) for n in range(6) for kind in KINDS]
    tensors += [_tensor(hostile, -999.0, False), _tensor("lm_head.weight", 999.0)]
    outputs = (OutputParity("source", 512, 0.871, 1.21, 0.52, 0.0, 912.5, 31.25, False),)
    layers = tuple((f"model.layers.{n}.{kind}", 0.4 / (n + 1)) for n in range(6) for kind in KINDS)
    scales = tuple(
        ScaleRange(f"model.layers.{{}}.{kind}.weight", 6000, -14 + n, (3, 40, 900, 55, 0, 1))
        for n, kind in enumerate(KINDS)
    )
    counts = (
        Count("codes rounded to nearest in the weight's dtype", 1_199_990, 1_200_000),
        Count("compared tensors", 74, 74),
    )
    parity = Parity(tuple(tensors), outputs, layers, ("outputs against modelopt: it did not run",), counts, scales)
    report = _report("model-of-somebody-with-a-name-that-is-far-too-long-for-any-heading-or-table-cell-int8", parity)
    return _saved(
        root / "failed",
        dataclasses.replace(
            report,
            skipped={f"model.layers.{n}.rotary.inv_freq": "computed from the config" for n in range(6)},
            policies={"model.layers.4.mlp.experts.2.up_proj input amax": "never seen: peers (3.25)"},
            findings=("error [scale] model.layers.3.self_attn.q_proj.weight_scale: is zero",),
            outliers=(Outliers("model.layers.0.mlp.down_proj", 0.25, 96.0, tuple(range(3, 40, 3)), 384),),
            experts=tuple(
                Coverage(f"model.layers.{n}.mlp.experts", (0, 4, 900, 12, 4096, 77 * n, 1, 350)) for n in range(6)
            ),
            advice=(Advice(("model.layers.3.self_attn.q_proj", "model.layers.3.self_attn.k_proj"), 0.4, 0.61, 91_000),),
        ),
    )  # fmt: skip


def deep(root: Path) -> Path:
    """500 layers: more weights than are drawn."""
    tensors = tuple(
        _tensor(f"model.layers.{n}.{kind}.weight", 31 + (n * 7919 % 13) / 10 - (n % 97 == 0) * 6)
        for n in range(500)
        for kind in KINDS
    )
    layers = tuple((f"model.layers.{n}.{kind}", 0.05 / (n + 1)) for n in range(500) for kind in KINDS)
    return _saved(root / "deep", _report("deep", Parity(tensors, (), layers)))


REPORTS: dict[str, Callable[[Path], Path]] = {"dense": dense, "experts": experts, "failed": failed, "deep": deep}


def _tensor(name: str, sqnr: float, passed: bool = True) -> TensorParity:
    return TensorParity(name, "w int8 a int8", 1 - 10 ** (-sqnr / 10) / 2 if sqnr > 0 else 0.1, 1.0, sqnr, 0.04, passed)


def _report(name: str, parity: Parity) -> Report:
    storage = tuple(
        Storage(
            f"model.layers.{{}}.{kind}.weight", 6, 10**7 * n, "bfloat16", "int8", 2 * 10**7 * n, 10**7 * n, 10**5 * n
        )
        for n, kind in enumerate(KINDS, 1)
    )
    return Report(
        f"models/{name}", "ab" * 32, "hf", "int8", 118, 35, 215_000_000, 420_000_000, {"plan": 0.11, "write": 2.5},
        9 * 10**8, parity, versions={"torch": "2.13.0"}, made_from={"source": "somewhere", "plan": "ab" * 32},
        counts=(Count("source tensors written, tied or dropped for a reason", 118, 118),), storage=storage,
        dtypes=(("bfloat16", 420_000_000, 5_000_000), ("int8", 0, 210_000_000)),
    )  # fmt: skip


def _saved(directory: Path, report: Report) -> Path:
    directory.mkdir()
    save(report, directory)
    return directory / "report.html"
