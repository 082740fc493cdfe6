"""The state behind nvdlfw-inspect's functions: config, step, loggers, engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from bridge.core.errors import InspectError, UsageError, warn
from bridge.quant.schemes.load import load_scheme
from bridge.workflows.inspect.collect import Seen, Sums
from bridge.workflows.inspect.dumps import FEATURE as DUMP
from bridge.workflows.inspect.dumps import FOLDER, Dumps, rank
from bridge.workflows.inspect.layers import Layer
from bridge.workflows.inspect.ranks import ranks_of
from bridge.workflows.inspect.te.classes import load_features, unnamed
from bridge.workflows.inspect.te.dlfw.engine import Engine, told
from bridge.workflows.inspect.te.dlfw.recipes import CallersSchemes
from bridge.workflows.inspect.te.dlfw.reduction import over
from bridge.workflows.inspect.te.features import KINDS
from bridge.workflows.inspect.te.read import InspectConfig, read_config
from bridge.workflows.inspect.te.resolve import generic_uses

STATISTICS, MESSAGES = "nvdlfw_inspect_statistics_logs", "nvdlfw_inspect_logs"  # folders in `log_dir`
UPSTREAM = ("transformer_engine", "debug", "features")  # the end of the path of features that are bridge's here
MORE = ("tb_writer", "default_logging_enabled", "quant")


class Logger(Protocol):
    """What nvdlfw-inspect's BaseLogger has."""

    def log_scalar(self, name: str, value: float, iteration: int, **words: Any) -> None: ...


Log = Callable[[str, float, int], None]


class LogFile:
    """A text file a rank, whose lines have upstream's form. Numbers are whole: upstream's 0.0000 is an mse of 1e-6."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"nvdlfw_inspect_globalrank-{rank()}.log"
        folder.mkdir(parents=True, exist_ok=True)
        self.path.touch()  # lines of an earlier run stay

    def log_scalar(self, name: str, value: float, iteration: int, **_: Any) -> None:
        self.write(f"{name} \t\t\t\t iteration={iteration:06d} \t\t\t\t value={value!r}")

    def write(self, text: str, level: int = logging.INFO) -> None:
        now = datetime.now().strftime("%Y-%m-%d %H:%M:%S,%f")[:-3]
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{now} - {logging.getLevelName(level)} - {text}\n")


def logs_of(statistics_logger: Logger | None, writer: Any, default: bool, folder: Path) -> list[Log]:
    """The caller's logger, else a TensorBoard writer; the file without either, or with `default`."""
    own = statistics_logger.log_scalar if statistics_logger is not None else None
    found = own or (writer.add_scalar if writer is not None else None)
    return [*([found] if found else ()), *([LogFile(folder / STATISTICS).log_scalar] if default or not found else ())]


class TransformerEngine:
    """The seven calls, with upstream's words; `layer_name` and the others may be keywords."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def fp8_gemm_enabled(self, layer_name: str, **words: Any) -> tuple[bool, int | None]:
        """gemm, iteration -> whether its inputs are quantized, and the next step to ask at; None: never."""
        return self._engine.fp8_gemm_enabled(layer_name, **words)

    def modify_tensor_enabled(self, layer_name: str, **words: Any) -> tuple[bool, int | None]:
        """gemm, tensor_name, iteration -> whether `modify_tensor` is to be called, and when to ask again."""
        return self._engine.modify_tensor_enabled(layer_name, **words)

    def inspect_tensor_enabled(self, layer_name: str, **words: Any) -> tuple[bool, int | None]:
        """tensor_name, iteration -> whether `inspect_tensor` is to be called, and when to ask again."""
        return self._engine.inspect_tensor_enabled(layer_name, **words)

    def inspect_tensor_postquantize_enabled(self, layer_name: str, **words: Any) -> tuple[bool, int | None]:
        """gemm, tensor_name, iteration; deprecated."""
        return self._engine.inspect_tensor_postquantize_enabled(layer_name, **words)

    def modify_tensor(self, layer_name: str, **words: Any) -> Any:
        """gemm, tensor_name, tensor, default_quantizer, iteration, out, dtype -> the tensor, None if `out` is given."""
        return self._engine.modify_tensor(layer_name, **words)

    def inspect_tensor(self, layer_name: str, **words: Any) -> None:
        """tensor_name, tensor, rowwise_quantized_tensor, columnwise_quantized_tensor, quantizer, iteration, tp_*."""
        self._engine.inspect_tensor(layer_name, **words)

    def inspect_tensor_postquantize(self, layer_name: str, **words: Any) -> None:
        """tensor_name, tensor, rowwise or gemm, iteration, tp_group; deprecated."""
        self._engine.inspect_tensor_postquantize(layer_name, **words)


class Run:
    """One config that is in force, from `initialize` to `end_debug`."""

    def __init__(
        self,
        config: str | Path | Mapping[str, Any],
        feature_dirs: Sequence[str] | str | None,
        statistics_logger: Logger | None,
        log_dir: Path,
        first: int,
        **more: Any,
    ) -> None:
        if unknown := sorted({*more} - {*MORE}):
            raise UsageError(f"initialize({unknown[0]}=): unknown; known besides upstream's: {', '.join(MORE)}")
        folders = [feature_dirs] if isinstance(feature_dirs, str | Path) else [*(feature_dirs or ())]
        self._own = load_features([folder for folder in folders if not _is_upstream(folder)] or None)
        scheme = None if more.get("quant") is None else load_scheme(more["quant"])
        none = InspectConfig("no config", (), "")
        self.config = none if config == "" else read_config(config, scheme, self._own.values(), called=True)
        _check_layers(self.config)
        self._schemes = CallersSchemes(scheme)
        self._dumps = Dumps(log_dir / FOLDER, rank()) if _dumps(self.config) else None
        if self._dumps:
            self._dumps.check_from(first)
        self.engine = Engine(self.config, self._own, self._schemes, self._dumps)
        self.transformer_engine = TransformerEngine(self.engine)
        self._trainer_iteration_count = first
        self._messages = LogFile(log_dir / MESSAGES)
        self._said: set[tuple[Any, ...]] = set()
        features = (feature.name for section in self.config.sections for feature in section.features)
        for note in unnamed(self._own, features):
            self.log_message(note, None, logging.WARNING, None)
        writer, default = more.get("tb_writer"), bool(more.get("default_logging_enabled"))
        self._logs = logs_of(statistics_logger, writer, default, log_dir)

    @property
    def features(self) -> list[str]:
        return [f"transformer_engine.{name}" for name in (*KINDS, *self._own)]

    def explained(self, features: str | Sequence[str] | None) -> list[str]:
        chosen = self.features if features == "all" else [features] if isinstance(features, str) else features or ()
        return [self._explained(feature) for feature in chosen]

    def step(self) -> None:
        """Log the statistics of the step, and go to the next."""
        for record in self.engine.records(self._trainer_iteration_count):
            self._log(*told(record))
        for note in self._schemes.note_lines():
            self.log_message(note, None, logging.WARNING, None)
        self._trainer_iteration_count += 1

    def log_tensor_stats(
        self, layer_name: str, tensor: Any, tensor_name: str, iteration: int | None = None, **words: Any
    ) -> dict[str, float]:
        step = self._trainer_iteration_count if iteration is None else iteration
        uses = [use for use in generic_uses(self.config, layer_name, tensor_name) if use.schedule.due(step)]
        values: dict[str, float] = {}
        if uses:
            stats = [stat for use in uses for stat in use.options.stats]
            sums = Sums(Layer(layer_name), tensor_name, stats, self._schemes)
            sums.add(Seen(tensor.detach(), None, False))
            if (where := over(tensor_name, words, self.engine.group)) and (ranks := ranks_of(where.group)):
                ranks.add_up({tensor_name: sums}, where.shards)
            for record in sums.records(step):
                name, values[record.stat], at = told(record)
                self._log(name, values[record.stat], at)
        return values

    def log_message(self, text: str, layer: str | None, level: int, more: Any) -> None:
        key = (text, layer, level, str(more))
        if key not in self._said:
            self._said.add(key)
            self._messages.write(f"LAYER={layer}: {text}" if layer else text, level)

    def close(self) -> None:
        """Drop the unfinished step, and warn of sections that matched no layer."""
        if self._dumps:
            self._dumps.drop()
        if idle := self.engine.idle:
            warn(f"{self.config.where}: no layer called that {', '.join(map(repr, idle))} is about")

    def _log(self, name: str, value: float, step: int) -> None:
        for log in self._logs:
            log(name, value, step)

    def _explained(self, feature: str) -> str:
        name = feature.removeprefix("transformer_engine.")
        if name in self._own:
            return f"{feature}: {type(self._own[name].object).__doc__ or 'no docstring'}"
        if name not in KINDS:
            return f"{feature}: is not known; list_features prints those that are"
        kind = KINDS[name]
        return f"{feature}: {', '.join((*kind.keys, *kind.options)) or 'the whole layer'}"


def _is_upstream(folder: str | Path) -> bool:
    return Path(folder).absolute().parts[-3:] == UPSTREAM


def _dumps(config: InspectConfig) -> bool:
    features: Iterable[Any] = (feature for section in config.sections for feature in section.features)
    return any(feature.name == DUMP and not feature.own for feature in features)


def _check_layers(config: InspectConfig) -> None:
    """InspectError for what only a model tells: roles, and layers that count from the end."""
    for section in config.sections:
        chosen, where = section.selector, f"{config.where}: section {section.name!r}: layers"
        if chosen.roles:
            raise InspectError(
                f"{where}: roles need a model (bridge.inspecting); name layers by layer_types or modules"
            )
        if any(a < 0 or b < 0 for a, b in chosen.layer_numbers):
            raise InspectError(f"{where}: layer_numbers from the end need a model (bridge.inspecting); count from 0")
