"""Run mlx and mlx-lm on a CPU, in a process of its own: they are in `.venv/mlx` (`make oracles`).

python -m tests.oracles.mlx_process convert BITS SOURCE ...      what mlx_lm.convert does but tokenizers: SOURCE-mlx
python -m tests.oracles.mlx_process run IDS.npy DIRECTORY ...    logits and dequantized weights: DIRECTORY.npz
python -m tests.oracles.mlx_process quantize IN.npz OUT.npz      `mx.quantize` of `w`, all affine groups
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
PLACE = ROOT / ".venv" / "mlx"
AFFINE = [(bits, group) for bits in (2, 3, 4, 5, 6, 8) for group in (32, 64, 128)]
DTYPES = ("float32", "float16", "bfloat16")


def has_mlx() -> bool:
    return (PLACE / "mlx_lm").is_dir()


def run(*arguments: object) -> str:
    """Run one of the commands above; its output, or the end of its errors."""
    words = [sys.executable, "-m", "tests.oracles.mlx_process", *map(str, arguments)]
    path = os.pathsep.join([str(PLACE), str(ROOT)])
    done = subprocess.run(words, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def _convert(bits: str, *sources: str) -> None:
    from mlx_lm.utils import load_model, quantize_model, save_config, save_model

    for source in sources:
        model, config = load_model(Path(source), lazy=True)
        model, config = quantize_model(model, config, None, int(bits))
        save_model(Path(f"{source}-mlx"), model)
        save_config(config, Path(f"{source}-mlx") / "config.json")


def _dequantized(model: Any) -> dict[str, np.ndarray]:
    """Weights by module, dequantized with float32 scales, so that nothing is rounded on the way."""
    import mlx.core as mx

    found = {}
    for name, module in model.named_modules():
        if not hasattr(module, "bits"):
            continue
        parts = [part.astype(mx.float32) if part.dtype != mx.uint8 else part for part in (module.scales,)]
        biases = module.biases.astype(mx.float32) if module.biases is not None else None
        weight = mx.dequantize(module.weight, *parts, biases, module.group_size, module.bits, module.mode)
        found[name] = np.array(weight.astype(mx.float32))
    return found


def _run(ids: str, *directories: str) -> None:
    import mlx.core as mx
    from mlx_lm.utils import load_model

    for directory in directories:
        model, _ = load_model(Path(directory))
        logits = model(mx.array(np.load(ids).astype(np.int32)))
        np.savez(f"{directory}.npz", logits=np.array(logits.astype(mx.float32)), **_dequantized(model))


def _quantize(given: str, out: str) -> None:
    import mlx.core as mx

    found, weight = {}, np.load(given)["w"]
    for dtype in DTYPES:
        array = mx.array(weight).astype(getattr(mx, dtype))
        found[dtype] = np.array(array.view(mx.uint16) if dtype == "bfloat16" else array)
        for bits, group in AFFINE:
            for name, part in zip(("words", "scales", "biases"), mx.quantize(array, group, bits), strict=True):
                stored = part.view(mx.uint16) if part.dtype == mx.bfloat16 else part
                found[f"{dtype} {bits} {group} {name}"] = np.array(stored)
    np.savez(out, **found)


if __name__ == "__main__":
    {"convert": _convert, "run": _run, "quantize": _quantize}[sys.argv[1]](*sys.argv[2:])
