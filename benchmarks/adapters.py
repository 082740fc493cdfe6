"""What merging an adapter costs: rank 16 over all linear layers of a 1.1 B bf16 Llama, with fp8.

    python benchmarks/adapters.py [--rounds 3]

Whole processes in turn: the base converted alone, the adapter converted, and peft's merge_and_unload with
save_pretrained, which quantizes nothing (`make oracles`). Time is processor time; memory is anonymous.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import sys
import tempfile
from pathlib import Path

from checkpoint import SMALL, make_calibration, make_checkpoint, run

ROOT = Path(__file__).resolve().parent.parent
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PEFT = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, transformers
from peft import PeftModel
base = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16)
PeftModel.from_pretrained(base, sys.argv[2]).merge_and_unload().save_pretrained(sys.argv[3])
"""


def make_adapter(base: Path, out: Path, rank: int = 16) -> None:
    """Random factors of each linear layer of the blocks, as peft stores them."""
    import numpy as np
    from safetensors.numpy import save_file

    from bridge.sources.opening import open_source

    random, state = np.random.default_rng(0), {}
    for name, spec in open_source(base).specs.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in LAYERS:
            shapes = {"lora_A": (rank, spec.shape[1]), "lora_B": (spec.shape[0], rank)}
            for factor, shape in shapes.items():
                values = random.standard_normal(shape, np.float32) * np.float32(0.02)
                state[f"base_model.model.{module}.{factor}.weight"] = values
    out.mkdir()
    save_file(state, out / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 32, "bias": "none"}
    settings |= {"target_modules": list(LAYERS), "base_model_name_or_path": str(base)}
    (out / "adapter_config.json").write_text(json.dumps(settings))


def processor() -> float:
    """Processor time of all finished processes that this one started."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        base, adapter, calib = work / "base", work / "adapter", work / "calib.safetensors"
        make_checkpoint(base, SMALL)
        make_adapter(base, adapter)
        make_calibration(base, calib)
        words = ["--target", "hf", "--quant", "fp8", "--calib", str(calib), "-q", "--out"]
        plain = [sys.executable, "-m", "bridge", "convert"]
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / ".venv" / "peft")])
        commands = {
            "base alone": [*plain, str(base), *words, str(work / "out")],
            "base alone, --no-verify": [*plain, str(base), "--no-verify", *words, str(work / "out")],
            "adapter": [*plain, str(adapter), *words, str(work / "out")],
            "adapter, --no-verify": [*plain, str(adapter), "--no-verify", *words, str(work / "out")],
            "peft": [sys.executable, "-c", PEFT, str(base), str(adapter), str(work / "out")],
        }
        for _ in range(rounds):
            for label, command in commands.items():
                shutil.rmtree(work / "out", ignore_errors=True)
                before = processor()
                seconds, _, memory = run(command)
                took = processor() - before
                print(f"{label:26} {took:7.1f} s of processor {seconds:7.1f} s {memory * 1e3:8.0f} MB", flush=True)


if __name__ == "__main__":
    main()
