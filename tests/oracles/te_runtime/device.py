"""A CPU that says it is a Blackwell GPU; only for a process that does nothing else.

From `start` on, every tensor that is asked for on "cuda" lies in main memory and says `is_cuda`.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CAPABILITY = (10, 0)  # the least that has every recipe, MXFP8 and NVFP4 too
CPU = torch.device("cpu")


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {
            name: CPU if name == "device" and isinstance(value, int) else _cpu(value)
            for name, value in (kwargs or {}).items()
        }
        if func is torch.norm:  # a CPU adds float32 one by one: 2e-4 off at a million values; a GPU adds in a tree
            return func(args[0].double(), *args[1:], **named).to(args[0].dtype)
        return func(*map(_cpu, args), **named)


def _cpu(value: Any) -> Any:
    asked = value if isinstance(value, torch.device) else None
    if asked is None and isinstance(value, str) and value.startswith("cuda"):
        asked = torch.device(value)
    return CPU if asked is not None and asked.type == "cuda" else value


def start() -> None:
    """Turn the process into one with a GPU."""
    whole: Any = torch.Tensor
    whole.cuda, whole.is_cuda = lambda self, *_, **__: self, property(lambda self: True)
    cuda: Any = torch.cuda
    cuda.is_available, cuda.device_count, cuda.current_device = lambda: True, lambda: 1, lambda: 0
    cuda.get_device_capability = lambda *_: CAPABILITY
    about = types.SimpleNamespace(major=CAPABILITY[0], minor=CAPABILITY[1], multi_processor_count=148, name="stand-in")
    cuda.get_device_properties = lambda *_: about
    cuda.is_current_stream_capturing = lambda: False
    torch.version.cuda = "13.0"
    _OnCpu().__enter__()
    graph: Any = torch.autograd
    backward = graph._engine_run_backward

    def with_mode(*given: Any, **named: Any) -> Any:
        """torch lays modes aside while it runs backward."""
        with _OnCpu():
            return backward(*given, **named)

    graph._engine_run_backward = with_mode
