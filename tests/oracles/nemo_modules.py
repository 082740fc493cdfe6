"""NeMo's own modules of distillation, as its wheel has them, without the packages around them, which want Lightning."""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

HOME = Path(sys.prefix) / "nemo-2.5.3"  # `make oracles` installs it there
PACKAGES = ("nemo", "nemo.collections", "nemo.collections.llm", "nemo.collections.llm.modelopt")
DISTILL = "nemo.collections.llm.modelopt.distill"


def distillation() -> Any:
    """`nemo.collections.llm.modelopt.distill.utils`; call it only in a process that needs nothing else of NeMo."""
    for name in (*PACKAGES, DISTILL, "nemo.utils"):
        package = sys.modules[name] = ModuleType(name)
        package.__path__ = [str(HOME.joinpath(*name.split(".")))]
    around: Any = sys.modules
    around["nemo.lightning"] = around["nemo"].lightning = ModuleType("nemo.lightning")
    around["nemo.lightning"].Trainer = around["nemo.collections.llm"].GPTConfig = object  # of annotations
    around["nemo.collections"].llm = around["nemo.collections.llm"]
    around["nemo.utils"].logging = logging.getLogger("nemo")
    return importlib.import_module(f"{DISTILL}.utils")
