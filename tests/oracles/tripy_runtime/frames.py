"""Where a tensor was made, for the messages of nvtripy, which walks the bytecode of 100 frames for each operation.

That takes 60 % of the time of a compiled module. A place in a code object has one range of columns, which is kept here.
"""

from __future__ import annotations

import sys
from functools import cache
from types import CodeType
from typing import Any

MAX_FRAMES = 100  # nvtripy's limit


@cache
def _columns(code: CodeType, line: int) -> tuple[int, int] | None:
    """The range of columns of a line, if there is one only."""
    found = {
        (start, end)
        for first, _, start, end in code.co_positions()
        if first == line and start is not None and end is not None
    }
    return found.pop() if len(found) == 1 else None


def get_stack_info(include_code_index: int | None = None) -> Any:
    """The frames above the caller, as nvtripy's function of this name gives them."""
    from nvtripy.utils import function_registry
    from nvtripy.utils.stack_info import SourceInfo, StackInfo

    frames, frame = [], sys._getframe().f_back
    while frame and len(frames) < MAX_FRAMES:
        code, module = frame.f_code, frame.f_globals.get("__name__")
        dispatches = module == function_registry.__name__ and code.co_name == "wrapper"
        frames.append(
            SourceInfo(
                module=module,
                file=code.co_filename,
                line=frame.f_lineno,
                function=code.co_name,
                code=None,
                _dispatch_target=frame.f_locals["key"] if dispatches else "",
                column_range=_columns(code, frame.f_lineno),
            )
        )
        frame = frame.f_back
    return StackInfo(frames, include_code_index)
