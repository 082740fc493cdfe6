"""A process in which `te.Linear` runs cases: `python -m tests.oracles.te_runtime.process JOB OUT`, both pickles."""

from __future__ import annotations

import importlib
import pickle
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, cast

from tests.oracles.te_runtime.cases import IN, LAYER, OUT, Answer, Call, Case
from tests.oracles.te_runtime.start import HOME, start


def main() -> None:
    job, out = sys.argv[1:3]
    start()
    warnings.simplefilter("ignore")
    asked = pickle.loads(Path(job).read_bytes())
    answers = {name: run(given) if isinstance(given, Case) else fake_quantized(*given) for name, given in asked.items()}
    Path(out).write_bytes(pickle.dumps(answers))


def run(case: Case) -> Answer:
    """Run the steps of a case and tell what was logged, computed and called."""
    import torch
    import transformer_engine.pytorch as te

    answer, dtype = Answer(), getattr(torch, case.dtype)
    with tempfile.TemporaryDirectory() as folder, _engine(case, Path(folder), answer) as api:
        _reset()
        layer = te.Linear(IN, OUT, bias=case.bias, params_dtype=dtype, name=LAYER, device="cuda")
        weight, bias = case.parameters()
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(weight))
            if case.bias:
                layer.bias.copy_(torch.from_numpy(bias))
        for step in range(case.steps):
            for at in range(case.microbatches):
                x, gradient = (torch.from_numpy(given).to(dtype) for given in case.microbatch(step, at))
                x.requires_grad_()
                layer.zero_grad()
                with te.autocast(enabled=True, recipe=_recipe(case.recipe)) if case.recipe else nullcontext():
                    y = layer(x)
                torch.autograd.backward(y, gradient)
                answer.outputs.append(_array(y))
                answer.dgrads.append(_array(x.grad))
                answer.wgrads.append(_array(layer.weight.grad))
            api.step()
    return answer


def fake_quantized(array: Any, dtype: str, quant_format: str) -> Any:
    """The values of FakeQuant's own function; those of MX, which it hands on by a wrong word, as meant."""
    import torch
    from transformer_engine.debug.features.fake_quant import fake_quantize
    from transformer_engine.pytorch import DType, MXFP8Quantizer

    tensor = torch.from_numpy(array).to(getattr(torch, dtype))
    if not quant_format.startswith("MX"):
        return _array(fake_quantize(tensor, quant_format))
    made = MXFP8Quantizer(fp8_dtype=DType["kFloat8" + quant_format.removeprefix("MXFP8")])
    return _array(made(tensor).dequantize())


def _recipe(name: str) -> Any:
    import transformer_engine.common.recipe as recipes

    plain = {"disable_rht": True, "disable_stochastic_rounding": True, "disable_2d_quantization": True}
    made = {
        "delayed": lambda: recipes.DelayedScaling(amax_history_len=1, amax_compute_algo="most_recent"),
        "current": recipes.Float8CurrentScaling,
        "current in E4M3": lambda: recipes.Float8CurrentScaling(fp8_format=recipes.Format.E4M3),
        "mxfp8": recipes.MXFP8BlockScaling,
        "mxfp8 with E5M2": lambda: recipes.MXFP8BlockScaling(fp8_format=recipes.Format.HYBRID),
        "blocks": recipes.Float8BlockScaling,
        "nvfp4": lambda: recipes.NVFP4BlockScaling(**plain),
    }
    return made[name]()


@contextmanager
def _engine(case: Case, folder: Path, answer: Answer) -> Iterator[Any]:
    """nvdlfw-inspect's engine with the config, or bridge's door under its name, and a note of each call."""
    import yaml
    from nvdlfw_inspect.logging import BaseLogger

    class Logger(BaseLogger):  # type: ignore[misc]
        def log_scalar(self, name: str, value: Any, iteration: int, **_: Any) -> None:
            answer.logged[iteration, name.removeprefix(f"{LAYER}_")] = float(value)

    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(case.config))
    features = str(HOME / "transformer_engine" / "debug" / "features")
    with by_door() if case.door else nullcontext(importlib.import_module("nvdlfw_inspect.api")) as api:
        api.initialize(str(file), feature_dirs=[features], statistics_logger=Logger(), log_dir=str(folder))
        manager = api.DEBUG_MANAGER
        if case.door:
            manager.transformer_engine = _Noting(answer.calls, manager.transformer_engine)
        else:
            named = manager.get_extension_api
            manager.get_extension_api = lambda namespace: _Noting(answer.calls, named(namespace))
        try:
            yield api
        finally:
            api.end_debug()


@contextmanager
def by_door() -> Iterator[Any]:
    """`import nvdlfw_inspect.api` gives bridge's door."""
    import nvdlfw_inspect

    import bridge

    name, package = "nvdlfw_inspect.api", cast(Any, nvdlfw_inspect)
    kept = importlib.import_module(name)
    sys.modules[name] = package.api = cast(Any, bridge.dlfw)
    try:
        yield package.api
    finally:
        sys.modules[name] = package.api = kept


class _Noting:
    """The calls of one namespace, noted before they are answered."""

    def __init__(self, calls: list[Call], behind: Any) -> None:
        self._calls, self._behind = calls, behind

    def __getattr__(self, name: str) -> Any:
        asked = getattr(self._behind, name)

        def answered(*given: Any, **words: Any) -> Any:
            plain = (words.get(key) for key in ("tensor_name", "gemm"))
            self._calls.append(Call(name, tuple(word for word in plain if word)))
            return asked(*given, **words)

        return answered


def _reset() -> None:
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    FP8GlobalStateManager.reset()


def _array(tensor: Any) -> Any:
    return tensor.detach().float().numpy().copy()


if __name__ == "__main__":
    main()
