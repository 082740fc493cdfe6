"""Answer nvdlfw-inspect's own engine, which gives each feature its words.

Imports nothing of it; the classes that it registers are in the folder `nvdlfw`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bridge.workflows.inspect.dumps import FEATURE as DUMP
from bridge.workflows.inspect.dumps import FOLDER, Dumps, rank
from bridge.workflows.inspect.te.dlfw.engine import Engine, told
from bridge.workflows.inspect.te.dlfw.recipes import CallersSchemes
from bridge.workflows.inspect.te.features import Feature, parse_feature
from bridge.workflows.inspect.te.read import InspectConfig, Section, raise_problems
from bridge.workflows.inspect.te.selectors import Selector
from bridge.workflows.inspect.te.where import Known, Where

WHERE = "config of nvdlfw-inspect"
LOOKS = ("inspect_tensor_enabled", "inspect_tensor")
CHANGES = ("modify_tensor_enabled", "modify_tensor")


def calls_of(name: str) -> tuple[str, ...]:
    """The calls that a feature answers."""
    if name.startswith("Disable"):
        return ("fp8_gemm_enabled",)
    return {"FakeQuant": ("fp8_gemm_enabled", *CHANGES), "PerTensorScaling": CHANGES}.get(name, LOOKS)


class Answers:
    """What the features of one run answer. `log(name, value, step)` takes statistics; `folder` is that of logs."""

    def __init__(self, log: Callable[[str, float, int], None], folder: Path) -> None:
        self._log, self._dumps = log, Dumps(folder / FOLDER, rank())
        self._engines: dict[int, tuple[Any, Feature | None, Engine]] = {}

    def takes(self, name: str, words: Mapping[str, Any], call: Mapping[str, Any]) -> bool:
        """Whether a feature is about the tensor and the GEMM of a call; InspectError lists mistakes of its words."""
        _, feature, _ = self._of(name, words)
        tensor, gemm = call.get("tensor_name", ""), call.get("gemm", "") if call.get("gemm_parsing") else ""
        places = [(use.tensor, use.gemm) for use in feature.uses] if feature else []
        if gemm and not call.get("tensor_parsing"):
            return any(place[1] == gemm for place in places)
        return (tensor, gemm) in places

    def call(self, name: str, call: str, words: Mapping[str, Any], layer: str, given: dict[str, Any]) -> Any:
        """Answer a call of a feature."""
        return getattr(self._of(name, words)[2], call)(layer, **given)

    def step(self, step: int) -> None:
        """Log the statistics of the step."""
        for _, _, engine in self._engines.values():
            for record in engine.records(step):
                self._log(*told(record))

    def _of(self, name: str, words: Mapping[str, Any]) -> tuple[Any, Feature | None, Engine]:
        """The engine of a feature's words, which are the same object at each call."""
        if id(words) not in self._engines:
            where = Where(name, Known(called=True))
            feature = parse_feature(name, words, where)
            raise_problems(WHERE, where.problems)
            section = Section(name, Selector(), (feature,) if feature else ())
            dumps = self._dumps if name == DUMP else None
            engine = Engine(InspectConfig(WHERE, (section,), ""), {}, CallersSchemes(), dumps)
            self._engines[id(words)] = words, feature, engine
        return self._engines[id(words)]


def feature_dir() -> str:
    """The folder to hand to `nvdlfw_inspect.api.initialize(feature_dirs=[...])`."""
    return str(Path(__file__).parent / "nvdlfw")
