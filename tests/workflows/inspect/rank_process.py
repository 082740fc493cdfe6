"""What one of two processes sees, for test_ranks; `both` in one process is what they see together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import bridge
from bridge import dlfw as debug_api
from bridge.core.errors import BridgeError
from bridge.workflows.inspect.result import Record

SIX = ["activation", "weight", "output", "gradient", "dgrad", "wgrad"]
BLOCKS = {"max_blockwise_dynamic_range": {"block_size": 4, "dims": 1}}
STATS = [
    "min",
    "max",
    "cur_amax",
    "mean",
    "std",
    "l2_norm",
    "kurtosis",
    "numel",
    "nan%",
    "inf%",
    "p99",
    "dynamic_range",
]
LOSSES = ["int8_sqnr", "mxfp8_mse", "mxfp8_scale_std", "mxfp8_underflows%", "int8_max_error"]


def config(**schedule: Any) -> dict[str, Any]:
    features = {
        "LogTensorStats": {"enabled": True, "tensors": SIX, "stats": [*STATS, BLOCKS], **schedule},
        "LogQuantizedTensorStats": {"enabled": True, "tensors": SIX, "stats": LOSSES, **schedule},
    }
    return {"s": {"enabled": True, "layers": {"layer_types": ["all"]}, "transformer_engine": features}}


class Sometimes(torch.nn.Module):
    """`second` runs where the sum of a batch is positive."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.second = torch.nn.Linear(8, 12), torch.nn.Linear(12, 4)

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        return self.second(y) if x.sum() > 0 else y


def batches(case: str) -> list[list[Any]]:
    """Steps of two batches; process r takes the r-th."""
    draw = torch.Generator().manual_seed(3)
    steps = [[torch.randn(rows, 8, generator=draw) + 1 for rows in (4, 8)] for _ in range(3)]
    if case == "idle":  # `second` does not run in process 1
        steps = [[one, -other] for one, other in steps]
    if case == "broken":
        steps[0][1][2, 3], steps[1][0][0, 0] = float("nan"), float("inf")
    return steps


def run(case: str, rank: int | None, out: Path | None = None) -> list[Record]:
    model = Sometimes()
    with bridge.inspecting(model, config(freq=2) if case == "seldom" else config(), out=out) as session:
        for step in batches(case):
            for batch in step if rank is None else step[rank : rank + 1]:
                model.zero_grad()
                model(batch).square().sum().backward()
            session.step()
        return session.inspection.records


def stages(rank: int) -> list[Record]:
    """Each process has one of two layers."""
    model = torch.nn.ModuleDict({f"stage{rank}": torch.nn.Linear(8, 4 + rank)})
    with bridge.inspecting(model, config()) as session, torch.no_grad():
        model[f"stage{rank}"](torch.ones(2, 8))
        session.step()
        return session.inspection.records


def sharded(rank: int | None) -> list[Record]:
    """A matrix that both have a half of; its activation is the same in both."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    model = torch.nn.Sequential(Sometimes().first)
    if rank is not None:
        parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
    with bridge.inspecting(model, config()) as session:
        model(batches("whole")[0][0]).square().sum().backward()
        session.step()
        return session.inspection.records


def door(rank: int | None, folder: Path) -> dict[str, Any]:
    """What the calls of Transformer Engine log; process r calls with its own tensors, and has a layer of its own.

    Without a rank: a process that has all tensors.
    """
    logged: dict[str, Any] = {}

    class Logger:
        def log_scalar(self, name: str, value: float, iteration: int, **_: Any) -> None:
            logged[f"{name} {iteration}"] = value

    def see(name: str, tensor: str, data: Any, **words: Any) -> None:
        api.inspect_tensor(layer_name=name, tensor_name=tensor, tensor=data, iteration=step, **words)

    stats = ["max", "mean", "std", "numel"]
    every = {"enabled": True, "freq": 2, "tensors": ["activation", "weight", "gradient"]}
    features = {
        "LogTensorStats": {**every, "stats": stats},
        "LogQuantizedTensorStats": {**every, "stats": ["int8_mse", "fp8_current_scaling_mse"]},
    }
    generic = {"LogTensorStats": {"enabled": True, "tensors": ["loss"], "stats": ["max", "mean"]}}
    section = {"enabled": True, "layers": {"layer_types": ["fc"]}, "transformer_engine": features, **generic}
    debug_api.initialize({"s": section}, log_dir=folder, statistics_logger=Logger())
    debug_api.set_tensor_reduction_group(None if rank is None else torch.distributed.group.WORLD)
    api, parts = debug_api.transformer_engine, [torch.arange(8.0).view(2, 4), torch.arange(12.0).view(3, 4) - 4]
    for step in range(2):
        if rank is None or step == 0:
            for at in range(2) if rank is None else [rank]:
                see("both.fc", "activation", parts[at])
                see(f"only{at}.fc", "activation", parts[at])
                see("shard.fc", "gradient", parts[at], reduction_group=debug_api.get_tensor_reduction_group())
        if rank is not None:
            see("both.fc", "weight", parts[rank], tp_group=None, tp_size=1)
            see("alone.fc", "activation", parts[rank], skip_reduction=True)
            see("shard.fc", "weight", parts[rank], tp_group=debug_api.get_tensor_reduction_group(), tp_size=2)
        debug_api.step()
    if rank is not None:
        words = {"tensor": parts[rank], "tensor_name": "loss", "iteration": 0}
        logged["whole"] = debug_api.log_tensor_stats("both.fc", **words)
        logged["own"] = debug_api.log_tensor_stats("both.fc", **words, skip_reduction=True)
    debug_api.end_debug()
    return logged


def dumped(rank: int, out: Path, steps: int = 2, fails: bool = False) -> Any:
    """Tensors that both write; only process 1 has something to write if the loop fails."""
    model, words = Sometimes(), {"enabled": True, "tensors": ["activation"], "high_precision_tensor": True}
    section = {"enabled": True, "layers": {"modules": ["first"]}, "transformer_engine": {"DumpTensors": words}}
    try:
        with bridge.inspecting(model, {"s": section}, out=out) as session:
            for step in range(steps):
                if rank or not fails:
                    model(batches("whole")[step][rank])
                session.step()
            if fails:
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    return session.inspection


def taken(out: Path) -> str:
    """The error where rank 0 finds `out`."""
    try:
        run("whole", 0, out)
    except BridgeError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refused(rank: int, out: Path) -> list[str]:
    """The errors where one rank alone finds no calibration, no folder of classes, and lines of another loop."""
    (out.parent / "mine").mkdir(exist_ok=True)
    (out.parent / "mine" / "sees.py").write_text("class Sees:\n    def fp8_gemm_enabled(self): ...\n")
    left = out.with_name("left.steps.jsonl")
    if rank == 0:
        left.write_text("")
    found = []
    for words in (
        {"calib": out / "missing" if rank else None, "out": out},
        {"feature_dirs": out / "missing" if rank else out.parent / "mine"},
        {"out": left.with_name("left")},
    ):
        try:
            with bridge.inspecting(Sometimes(), config(), **words):
                found.append("entered")
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    return [*found, str(out.with_name(f"{out.name}.steps.jsonl").exists())]


def main(rank: int, store: str, out: str, cases: list[str], results: Any) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found: dict[str, Any] = {case: run(case, rank) for case in cases}
    found["written"] = run("whole", rank, Path(out) / f"seen{rank}")
    found["stages"], found["sharded"] = stages(rank), sharded(rank)
    found["door"] = door(rank, Path(out) / f"logs{rank}")
    place = Path(out)
    found["dumped"] = dumped(rank, place / "shared"), dumped(rank, place / f"disk{rank}" / "seen")
    dumped(rank, place / "failed", fails=True)
    found["taken"] = taken(Path(out) / "seen0")
    found["refused"] = refused(rank, Path(out) / "refused")
    results.put((rank, found))
    torch.distributed.destroy_process_group()
