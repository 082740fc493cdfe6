"""How vLLM packs codes for its AWQ and GPTQ kernels, as digests; run as a script it makes them anew.

    VLLM_TARGET_DEVICE=cpu python -m tests.oracles.packing_golden      # in an environment with vllm 0.33

`awq_pack` and `gptq_pack` of vLLM take unsigned codes (in, out), as AutoAWQ and GPTQModel store them.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).with_name("packing.json")
SHAPE = (256, 48)  # in, out
KINDS = {"awq": 4, "gptq4": 4, "gptq8": 8}


def codes(kind: str) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Unsigned codes (in, out)."""
    random = np.random.Generator(np.random.Philox(11))
    made = random.integers(0, 1 << KINDS[kind], SHAPE, np.int32)
    made[0] = 0  # the largest of each column, as a signed code
    return made


def digest(words: np.ndarray[Any, Any]) -> str:
    return f"{list(words.shape)} {hashlib.sha256(np.ascontiguousarray(words).tobytes()).hexdigest()[:32]}"


def main() -> None:
    import importlib.metadata

    import torch
    from vllm.model_executor.layers.quantization.utils.quant_utils import awq_pack, gptq_pack

    made = {"vllm": importlib.metadata.version("vllm")}
    for kind, bits in KINDS.items():
        pack = awq_pack if kind == "awq" else gptq_pack
        made[kind] = digest(pack(torch.from_numpy(codes(kind)), bits, *SHAPE).numpy())
    GOLDEN.write_text(json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    main()
