"""Convert a model of Arcee's, by the table `qbridge_arcee/arch/arcee.toml`, to FP8, and to Megatron and back

pip install ./examples/adding_an_architecture
python examples/adding_an_architecture/convert.py arcee-ai/AFM-4.5B --out afm

Without a model it makes a tiny one with random weights, which answers the same after the way to Megatron and back.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import tempfile
from pathlib import Path

from rich.console import Console

import bridge


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", help="a directory or a hub id")
    parser.add_argument("--quant", default="fp8_pc_pt", help="a scheme: qbridge show schemes")
    parser.add_argument("--out", type=Path, default=Path("arcee"))
    given = parser.parse_args()
    if not any(importlib.metadata.distributions(name="qbridge-arcee")):
        parser.error("its package is not installed: pip install ./examples/adding_an_architecture")
    with tempfile.TemporaryDirectory() as scratch:
        model = given.model or tiny(Path(scratch) / "tiny-arcee")
        reports = [
            bridge.convert(model, target="hf", quant=given.quant, out=given.out / given.quant),
            bridge.convert(model, target="megatron", out=given.out / "megatron"),
        ]
        (given.out / "megatron/config.json").unlink()  # so that Megatron's own configuration must tell
        reports.append(bridge.convert(given.out / "megatron", target="hf", out=given.out / "back"))
    for report in reports:
        Console(markup=False, highlight=False).print(report)


def tiny(directory: Path) -> Path:
    """Save a model whose extents differ pairwise, so that no two axes can be taken for each other."""
    import torch
    from transformers import ArceeConfig, ArceeForCausalLM

    torch.manual_seed(0)
    config = ArceeConfig(
        vocab_size=112, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, head_dim=10, max_position_embeddings=96, attention_bias=True, mlp_bias=True,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    ArceeForCausalLM(config).save_pretrained(directory)
    return directory


if __name__ == "__main__":
    main()
