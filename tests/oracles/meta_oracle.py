"""Meta's checkpoints: a tiny Llama in shards as its model parallelism cuts it, converted by transformers' own script.

Its tensors are those of torchtitan 0.2's Llama 3, which keeps Meta's names and layout and answers with logits.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.models import torchtitan_families as F
from tests.oracles import torchtitan_oracle

# The last transformers whose wheel carries the script, beside the environment's own; see the Makefile.
SCRIPT = Path(sys.prefix) / "transformers-4.45/transformers/models/llama/convert_llama_weights_to_hf.py"
COLUMNS = ("wo.weight", "w2.weight")  # cut along their input; the rest along its output, norms not at all


def family() -> torchtitan_oracle.Made:
    """The model: `native` holds Meta's tensors, `config_hf` and `logits` the same as Hugging Face has it."""
    return torchtitan_oracle.family("llama3", "0.2")


def save(directory: Path, shards: int = 2, version: str = "3.1", dtype: torch.dtype = torch.float32) -> Path:
    """Write params.json and `consolidated.NN.pth`. Llama 2 cuts the embedding along its width and stores the
    frequencies of RoPE, Llama 3 cuts it along the vocabulary.
    """
    directory.mkdir(parents=True, exist_ok=True)
    whole = {name: torch.from_numpy(array).to(dtype) for name, array in family().native.items()}
    for shard in range(shards):
        state = {name: _cut(name, tensor, shard, shards, version) for name, tensor in whole.items()}
        if version == "2":
            size = F.DIM // F.HEADS
            state["rope.freqs"] = 1.0 / F.BASE ** (torch.arange(0, size, 2).float() / size)
        torch.save(state, directory / f"consolidated.{shard:02d}.pth")
    (directory / "params.json").write_text(json.dumps(_params(version)))
    return directory


def _params(version: str) -> dict[str, Any]:
    same = {"dim": F.DIM, "n_layers": F.LAYERS, "n_heads": F.HEADS, "n_kv_heads": F.KV_HEADS, "multiple_of": 8}
    same |= {"norm_eps": 1e-5, "rope_theta": F.BASE}
    # Llama 2's file leaves the vocabulary to the tokenizer.
    return same | ({"vocab_size": F.VOCAB, "use_scaled_rope": True} if version != "2" else {"vocab_size": -1})


def _cut(name: str, tensor: torch.Tensor, shard: int, shards: int, version: str) -> torch.Tensor:
    if "norm" in name:
        return tensor
    columns = name.endswith(COLUMNS) or (name.startswith("tok_embeddings") and version == "2")
    return tensor.chunk(shards, 1 if columns else 0)[shard].clone()


def converted(directory: Path, shards: int = 2, version: str = "3.1") -> dict[str, np.ndarray]:
    """The tensors under Hugging Face names, by transformers' own script, uncast."""
    script, found = _script(), {}

    def take(path: str, **_: Any) -> Any:
        for part in sorted(Path(path).glob("*.bin")):
            found.update(torch.load(part))
        config = SimpleNamespace(_name_or_path=path, torch_dtype=None)
        return SimpleNamespace(config=config, save_pretrained=lambda *_, **__: None)

    # It would load what it wrote, in bfloat16, and write it again.
    script.LlamaForCausalLM = SimpleNamespace(from_pretrained=take)
    out = directory / "converted"
    script.write_model(str(out), str(directory), llama_version=version, vocab_size=F.VOCAB, num_shards=shards)
    shutil.rmtree(out)
    return {name: tensor.numpy() for name, tensor in found.items() if not name.endswith("inv_freq")}


@functools.cache
def _script() -> Any:
    if not SCRIPT.is_file():
        raise RuntimeError(f"{SCRIPT} is missing: the Makefile installs transformers 4.45 there")
    spec = importlib.util.spec_from_file_location("convert_llama_weights_to_hf", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
