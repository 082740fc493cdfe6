"""The frames that nvtripy's messages show are its own function's."""

from __future__ import annotations

import importlib
import sys
from dataclasses import asdict
from typing import Any

from tests.oracles.tripy_runtime import frames, install


def test_frames_are_those_of_nvtripy() -> None:
    install()
    theirs = _original()

    def both() -> tuple[Any, Any]:
        return frames.get_stack_info(1), theirs.get_stack_info(1)  # one line: it is a field of the first frame

    ours, expected = both()
    assert len(ours) > 5 and ours.include_code_index == expected.include_code_index == 1
    for found, wanted in zip(ours, expected, strict=True):
        assert {**asdict(found), "column_range": None} == {**asdict(wanted), "column_range": None}
    assert [frame.column_range for frame in ours[1:]] == [frame.column_range for frame in expected[1:]]


def _original() -> Any:
    """nvtripy's module as it is written, without the function that takes its place."""
    name = "nvtripy.utils.stack_info"
    replaced = sys.modules.pop(name)
    try:
        return importlib.import_module(name)
    finally:
        sys.modules[name] = replaced
