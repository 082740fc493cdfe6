"""Loggers of nvdlfw-inspect: files, a TensorBoard writer, the caller's own."""

from __future__ import annotations

import logging
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from bridge.workflows.inspect.features.dumps import rank

STATISTICS, MESSAGES = "nvdlfw_inspect_statistics_logs", "nvdlfw_inspect_logs"  # folders in `log_dir`


class Logger(Protocol):
    """What nvdlfw-inspect's BaseLogger has."""

    def log_scalar(self, name: str, value: float, iteration: int, **words: Any) -> None: ...


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


class TensorBoard:
    """A SummaryWriter as a logger."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log_scalar(self, name: str, value: float, iteration: int, **_: Any) -> None:
        self._writer.add_scalar(name, value, iteration)


def loggers_of(statistics_logger: Logger | None, writer: Any, default: bool, folder: Path) -> list[Logger]:
    """The caller's logger, else a TensorBoard writer; the file without either, or with `default`."""
    found: list[Logger] = [statistics_logger] if statistics_logger is not None else []
    if not found and writer is not None:
        found = [TensorBoard(writer)]
    return [*found, LogFile(folder / STATISTICS)] if default or not found else found
