"""Make models without memory for their parameters."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


@contextmanager
def parameters_on_meta(dtype: torch.dtype) -> Iterator[None]:
    """Put every parameter that this thread makes on the meta device, floats in `dtype`; buffers are computed.

    torch calls the hook for every thread; a model that the caller builds meanwhile keeps its parameters.
    """
    here = threading.get_ident()

    def to_meta(_module: Any, _name: str, parameter: Any) -> Any:
        if parameter is None or parameter.device.type == "meta" or threading.get_ident() != here:
            return None  # keeps the identity of tied parameters
        return nn.Parameter(parameter.to("meta"), requires_grad=False)

    before = torch.get_default_dtype()
    hook = register_module_parameter_registration_hook(to_meta)
    try:
        torch.set_default_dtype(dtype)
        yield
    finally:
        torch.set_default_dtype(before)
        hook.remove()
