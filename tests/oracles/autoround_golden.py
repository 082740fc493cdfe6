"""What AutoRound quantizes a matrix to, and how its parameters move, as digests; run as a script it makes them anew.

    python -m tests.oracles.autoround_golden      # in an environment with auto-round 0.16.1

Its parameters are an offset of each value over its scale, and a factor of each scale.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

GOLDEN = Path(__file__).with_name("autoround.json")
ROWS, COLS, BLOCK = 24, 96, 16


def problem() -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """A weight, scales of either sign, factors, offsets, and the gradient of the quantized weight, all float32."""
    random = np.random.Generator(np.random.Philox(5))
    blocks = (ROWS, COLS // BLOCK)
    made = {
        "weight": random.normal(size=(ROWS, COLS)),
        "scales": random.uniform(0.15, 0.4, blocks) * random.choice([-1, 1], blocks),  # some values lie beyond a code
        "factor": random.uniform(0.8, 1.2, blocks),
        "offset": random.uniform(-0.5, 0.5, (ROWS, COLS)),
        "gradient": random.normal(size=(ROWS, COLS)),
    }
    return {name: array.astype(np.float32) for name, array in made.items()}


def digest(array: np.ndarray[Any, Any]) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:32]


def main() -> None:
    import importlib.metadata

    import torch
    from auto_round.data_type.int import quant_tensor_sym

    given = {name: torch.from_numpy(array) for name, array in problem().items()}
    offset = given["offset"].reshape(-1, BLOCK).requires_grad_()
    factor = given["factor"].detach().clone().reshape(-1).requires_grad_()
    values, _, _ = quant_tensor_sym(
        given["weight"], 4, BLOCK, v=offset, max_scale=factor, init_scale=given["scales"].reshape(-1, 1),
        scale_dtype=torch.float32, q_scale_thresh=1e-8,
    )  # fmt: skip
    values.backward(given["gradient"])
    # its rounding adds what it took off, so that a code may be off by its last bits
    codes = (values.detach() / (given["scales"] * given["factor"]).repeat_interleave(BLOCK, 1)).round().to(torch.int8)
    made = {"auto-round": importlib.metadata.version("auto-round"), "codes": digest(codes.numpy())}
    for name, one, shape in (("offset", offset, (ROWS, COLS)), ("factor", factor, (ROWS, COLS // BLOCK))):
        assert one.grad is not None
        made[name] = digest(one.grad.reshape(shape).sign().to(torch.int8).numpy())
    GOLDEN.write_text(json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    main()
