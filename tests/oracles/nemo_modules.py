"""NeMo's own modules, as its wheel has them, without the packages around them, which want Lightning."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.oracles.stand_ins import stand_in

HOME = Path(sys.prefix) / "nemo-2.5.3"  # `make oracles` installs it there
MODELOPT = "nemo.collections.llm.modelopt"
PACKAGES = ("nemo", "nemo.collections", "nemo.collections.llm", "nemo.utils")
PACKAGES += (MODELOPT, f"{MODELOPT}.distill", f"{MODELOPT}.prune")


def distillation() -> Any:
    """`distill.utils`; call it only in a process that needs nothing else of NeMo."""
    _around()
    return importlib.import_module(f"{MODELOPT}.distill.utils")


def pruning(validate: Callable[..., None]) -> Any:
    """`prune.pruner`, which runs the model on data by `validate(model, data, trainer, tokenizer)`."""
    _around().validate = validate
    return importlib.import_module(f"{MODELOPT}.prune.pruner")


def _around() -> Any:
    """Packages without what they import; NeMo's collection `llm`, whose classes are names in annotations."""
    around: dict[str, Any] = {name: ModuleType(name) for name in PACKAGES}
    for name, package in around.items():
        package.__path__ = [str(HOME.joinpath(*name.split(".")))]
    sys.modules |= around
    stand_in("pytorch_lightning", "nemo.lightning", "nemo.utils.get_rank")
    around["nemo.utils"].logging = logging.getLogger("nemo")
    llm = around["nemo.collections"].llm = around["nemo.collections.llm"]
    llm.GPTConfig = llm.GPTModel = object
    return llm
