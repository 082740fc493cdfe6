"""Check what a caller gives besides the config."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bridge.core.errors import UsageError, WriteError, reason
from bridge.core.output.replace import check_free
from bridge.core.text import described
from bridge.workflows.inspect.result import MARK


def check_arguments(out: Any, sink: Any, feature_dirs: Any) -> None:
    """UsageError for one of another type."""
    if out is not None and not isinstance(out, str | Path):
        raise UsageError(f"out={described(out)} (--out): expected the path of a directory")
    if sink is not None and not callable(sink):
        raise UsageError(f"sink={described(sink)}: expected a function, called as sink(name, value, step)")
    folders = (
        feature_dirs if isinstance(feature_dirs, Sequence) and not isinstance(feature_dirs, str) else [feature_dirs]
    )
    if wrong := [folder for folder in folders if folder is not None and not isinstance(folder, str | Path)]:
        raise UsageError(f"feature_dirs={described(wrong[0])} (--features): expected paths of folders of Python files")


def check_live(model: Any) -> None:
    """UsageError for what is no torch module."""
    if not callable(getattr(model, "named_modules", None)):
        raise UsageError(
            f"inspecting: model = {described(model)}: expected a torch module; bridge.inspect takes the path of a model"
        )


def check_out(out: Path, overwrite: bool) -> None:
    """WriteError if an inspection cannot be written there, before any work."""
    check_free(out, overwrite, MARK)
    parent = out.absolute().parent
    there = next(place for place in (parent, *parent.parents) if os.path.lexists(place))
    try:
        Path(tempfile.mkdtemp(prefix=".", dir=there)).rmdir()
    except OSError as error:
        raise WriteError(
            f"{out}: cannot be written: {there}: {reason(error)}; choose another directory (out=, --out)"
        ) from error
