"""What the benchmarks share: random Llama checkpoints of any size, and whole processes timed with their memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

SMALL: dict[str, Any] = {  # 1.1 B parameters
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
LARGE = SMALL | {  # 8 B parameters
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SAMPLE = 0.01  # seconds between two looks at a process's memory


def make_checkpoint(directory: Path, config: dict[str, Any], shards: int = 2) -> None:
    """Write a bf16 checkpoint with NumPy alone: normal weights of standard deviation 0.02, norms of one."""
    import numpy as np

    from bridge.core.dtypes import from_float32
    from bridge.core.formats.safetensors import layout
    from bridge.core.values import TensorSpec

    shapes = _shapes(config)
    names = sorted(shapes)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    index: dict[str, str] = {}
    rng = np.random.default_rng(0)
    for number in range(1, shards + 1):
        part = names[(number - 1) * len(names) // shards : number * len(names) // shards]
        file = f"model-{number:05d}-of-{shards:05d}.safetensors"
        header, offsets, _ = layout([TensorSpec(n, shapes[n], "bfloat16") for n in part], {"format": "pt"})
        with (directory / file).open("wb") as out:
            out.write(header)
            for name in part:
                shape = shapes[name]
                values = np.ones(shape, np.float32)
                if len(shape) == 2:
                    values = rng.standard_normal(shape, np.float32) * np.float32(0.02)
                out.seek(offsets[name])
                out.write(from_float32(values, "bfloat16").tobytes())
        index |= dict.fromkeys(part, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def make_calibration(checkpoint: Path, path: Path, scheme: str = "fp8") -> None:
    """Write a calibration for every matrix of a checkpoint; its values do not matter for the time."""
    import numpy as np

    import bridge
    from bridge.quant.calibration import Calibration, Provenance

    plan = bridge.plan(checkpoint, target="hf", quant=scheme)
    provenance = Provenance(scheme, plan.scheme_digest, plan.architecture, "", "bfloat16", "", 0, 0)
    steps = {step.site.module: step for step in plan.quantized if step.site}
    amax = {module: np.array(8.0, np.float32) for module in steps}
    if scheme != "int4_awq":
        Calibration(provenance, input_amax=amax).save(path)
        return
    widths = {module: plan.sources[step.source].shape[1] for module, step in steps.items()}
    factors = {module: np.linspace(0.5, 2, width, dtype=np.float32) for module, width in widths.items()}
    Calibration(provenance, input_amax=amax, awq_scale=factors).save(path)


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, ffn, vocab = (int(config[key]) for key in ("hidden_size", "intermediate_size", "vocab_size"))
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        heads = (("q", hidden), ("k", kv), ("v", kv), ("o", hidden))
        shapes |= {f"{at}self_attn.{p}_proj.weight": (n, hidden) for p, n in heads}
        shapes |= {f"{at}mlp.gate_proj.weight": (ffn, hidden), f"{at}mlp.up_proj.weight": (ffn, hidden)}
        shapes |= {f"{at}mlp.down_proj.weight": (hidden, ffn)}
        shapes |= {f"{at}{norm}_layernorm.weight": (hidden,) for norm in ("input", "post_attention")}
    return shapes


def run(command: list[str]) -> tuple[float, float, float]:
    """Run a whole process; return its wall time in seconds, its peak resident set and its peak anonymous memory in GB.

    Anonymous memory is sampled every 10 ms: pages of files that are read through mmap are not the process's own.
    """
    os.sync()
    complaint = tempfile.TemporaryFile()  # noqa: SIM115  closed with the process
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=complaint)
    most = [0]
    watcher = threading.Thread(target=_watch, args=(process.pid, most), daemon=True)
    watcher.start()
    _, status, usage = os.wait4(process.pid, 0)
    wall = time.perf_counter() - start
    process.returncode = status
    watcher.join()
    if status:
        complaint.seek(0)
        sys.exit(f"{' '.join(command[:4])} failed:\n{complaint.read().decode()[-2000:]}")
    return wall, usage.ru_maxrss / 1e6, most[0] / 1e6


def _watch(pid: int, most: list[int]) -> None:
    status = Path(f"/proc/{pid}/status")
    while True:
        try:
            lines = status.read_text().splitlines()
        except OSError:
            return
        anonymous = next((int(line.split()[1]) for line in lines if line.startswith("RssAnon")), None)
        if anonymous is None:  # a zombie has no memory
            return
        most[0] = max(most[0], anonymous)
        time.sleep(SAMPLE)


def size(path: Path) -> float:
    """GB on disk."""
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file()) / 1e9
