"""Convert a checkpoint of litgpt, whose names `qbridge_litgpt/dialects/litgpt.toml` says, to FP8 for inference runtimes

pip install ./examples/adding_a_dialect
python examples/adding_a_dialect/convert.py checkpoints/meta-llama/Llama-3.2-1B --out llama-fp8

Without a checkpoint it makes one of the tiny Llama that the other examples use.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import shutil
import tempfile
from pathlib import Path

from rich.console import Console

import bridge

MODEL = Path(__file__).parent.parent / "models" / "tiny-llama"
NAMES = {
    "model.embed_tokens.": "transformer.wte.", "model.layers.": "transformer.h.", "model.norm.": "transformer.ln_f.",
    "input_layernorm.": "norm_1.", "post_attention_layernorm.": "norm_2.", "self_attn.o_proj.": "attn.proj.",
    "mlp.gate_proj.": "mlp.fc_1.", "mlp.up_proj.": "mlp.fc_2.", "mlp.down_proj.": "mlp.proj.",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoint", nargs="?", type=Path, help="a directory with lit_model.pth and config.json")
    parser.add_argument("--quant", default="fp8_pc_pt", help="a scheme: qbridge show schemes")
    parser.add_argument("--out", type=Path, default=Path("litgpt-fp8"))
    given = parser.parse_args()
    if not any(importlib.metadata.distributions(name="qbridge-litgpt")):
        parser.error("its package is not installed: pip install ./examples/adding_a_dialect")
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = given.checkpoint or as_litgpt(MODEL, Path(scratch) / "tiny-llama")
        report = bridge.convert(checkpoint, target="hf", quant=given.quant, out=given.out)
    Console(markup=False, highlight=False).print(report)


def as_litgpt(model: Path, out: Path) -> Path:
    """Write what `litgpt convert_to_litgpt` would: q, k and v of a layer in one matrix, other names for the rest."""
    import torch
    from safetensors.torch import load_file

    theirs = load_file(model / "model.safetensors")
    ours: dict[str, torch.Tensor] = {}
    for name, tensor in theirs.items():
        if ".q_proj." in name:
            parts = [theirs[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            ours[_litgpt(name.replace("self_attn.q_proj.", "attn.qkv."))] = torch.cat(parts)
        elif not any(part in name for part in (".k_proj.", ".v_proj.")):
            ours[_litgpt(name)] = tensor
    out.mkdir(parents=True)
    torch.save(ours, out / "lit_model.pth")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, out / name)
    return out


def _litgpt(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


if __name__ == "__main__":
    main()
