"""What litgpt makes of the tiny Llama's tensors, as digests; run as a script it makes them anew.

pip install litgpt==0.5.13
python -m tests.oracles.litgpt_golden
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

MODEL = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"
GOLDEN = Path(__file__).with_name("litgpt.json")


def digests(tensors: dict[str, Any]) -> dict[str, str]:
    """Tensor -> shape and the beginning of the digest of its bytes."""
    contents = {name: hashlib.sha256(tensors[name].numpy().tobytes()).hexdigest()[:16] for name in sorted(tensors)}
    return {name: f"{list(tensors[name].shape)} {content}" for name, content in contents.items()}


def main() -> None:
    from importlib.metadata import version

    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.scripts.convert_hf_checkpoint import copy_weights_hf_llama
    from safetensors.torch import load_file

    given = json.loads((MODEL / "config.json").read_text())
    config = Config(
        n_layer=given["num_hidden_layers"],
        n_head=given["num_attention_heads"],
        n_query_groups=given["num_key_value_heads"],
        head_size=given["head_dim"],
        n_embd=given["hidden_size"],
        intermediate_size=given["intermediate_size"],
        padded_vocab_size=given["vocab_size"],
        bias=False,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        rotary_percentage=1.0,
        parallel_residual=False,
    )
    made: dict[str, Any] = {}
    copy_weights_hf_llama(config, {}, made, load_file(MODEL / "model.safetensors"))
    GPT(config).load_state_dict(made, strict=True)
    GOLDEN.write_text(json.dumps({"litgpt": version("litgpt"), "tensors": digests(made)}, indent=1) + "\n")


if __name__ == "__main__":
    main()
