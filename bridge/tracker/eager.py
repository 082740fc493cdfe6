"""Let compiled models run as they are written, with hooks."""

from __future__ import annotations

import sys
from contextlib import ExitStack, suppress


def run_eagerly(entered: ExitStack) -> bool:
    """Until `entered` is closed; returns whether torch's compiler is loaded, which takes 3 s: before, none is compiled.

    Inside code that runs compiled already, what is in it stays unseen.
    """
    if "torch._dynamo" not in sys.modules:
        return False
    import torch

    with suppress(RuntimeError):
        entered.enter_context(torch.compiler.set_stance("force_eager"))
    return True
