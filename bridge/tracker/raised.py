"""Name the module in whose code an exception was raised."""

from __future__ import annotations

from collections.abc import Iterable

from torch.nn import Module


def raised_in(error: BaseException, modules: Iterable[tuple[str, Module]]) -> str:
    """The innermost of modules, as `named_modules` gives them, whose code raised an exception or its cause; "" if none.

    It reads the traceback, so that a run needs no hook for it.

    >>> import torch
    >>> from bridge.tracker import raised_in
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(2, 3))
    >>> try:
    ...     model(torch.ones(1, 2))
    ... except RuntimeError as error:
    ...     print(raised_in(error, model.named_modules()))
    1
    """
    known = {id(module): name for name, module in modules}
    names = [""]
    for one in (error, error.__cause__):
        traceback = one.__traceback__ if one else None
        while traceback:
            names.append(known.get(id(traceback.tb_frame.f_locals.get("self")), ""))
            traceback = traceback.tb_next
    return next((name for name in reversed(names) if name), "")
