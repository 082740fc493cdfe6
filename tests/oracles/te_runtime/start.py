"""Start Transformer Engine 2.20.2 on a CPU, in a process that does nothing else."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from pathlib import Path

HOME = Path(sys.prefix) / "te"  # `make oracles` installs it there


def start() -> None:
    """Make `import transformer_engine.pytorch` work. Statistics are not compiled, amaxes are updated in its Python."""
    os.environ |= {"NVTE_PROJECT_BUILDING": "1", "TORCHDYNAMO_DISABLE": "1", "NVTE_UNFUSED_FP8_UPDATE": "1"}
    os.environ |= {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0", "NVTE_MASKED_SOFTMAX_FUSION": "0"}  # torch's
    sys.path.insert(0, str(HOME))

    from tests.oracles.te_runtime import device, extension

    device.start()
    extension.install()
    with warnings.catch_warnings(action="ignore"):  # that there are no compiled parts
        import transformer_engine.common as common

    assert Path(common.__file__).is_relative_to(HOME)
    common.load_framework_extension = lambda _: None
    importlib.import_module("transformer_engine.pytorch")
