"""A tiny Llama as Megatron-Bridge, NeMo, torchtitan and Meta lay it out: directories written by torch itself.

Tensors are by the formulas of `tests.tables.foreign`; no process is started.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from tests.sources.weights.dcp_saves import save
from tests.tables import foreign
from tests.tables.checkpoints import LLAMA, headers

ROPE = {"rope_type": "default", "rope_theta": 5000.0}
CONFIG = LLAMA | {
    "model_type": "llama", "max_position_embeddings": 112, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "rope_parameters": ROPE, "tie_word_embeddings": False,
}  # fmt: skip
# What Megatron-Bridge's run_config.yaml says of it.
MODEL: dict[str, Any] = {
    "_target_": "megatron.bridge.models.llama.llama_provider.LlamaModelProvider", "num_layers": 3, "hidden_size": 48,
    "ffn_hidden_size": 80, "num_attention_heads": 6, "num_query_groups": 2, "kv_channels": 10, "vocab_size": 97,
    "normalization": "RMSNorm", "layernorm_epsilon": 1e-5, "gated_linear_unit": True, "add_bias_linear": False,
    "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False}, "position_embedding_type": "rope",
    "rotary_base": 5000.0, "seq_length": 112, "share_embeddings_and_output_weights": False,
}  # fmt: skip

Tensors = dict[str, torch.Tensor]


def llama(dtype: torch.dtype = torch.float32) -> Tensors:
    """Its tensors in Hugging Face's names."""
    numbers = torch.Generator().manual_seed(0)
    specs = headers(CONFIG)
    return {name: (torch.randn(spec.shape, generator=numbers) * 0.15).to(dtype) for name, spec in specs.items()}


def spelled(hf: Tensors, dialect: str) -> Tensors:
    """The same in another dialect; layers one by one."""
    arrays = {name: tensor.float().numpy() for name, tensor in hf.items()}
    made = {"megatron": lambda: foreign.megatron("llama", arrays), "meta": lambda: foreign.meta(arrays)}
    made["torchtitan"] = lambda: foreign.torchtitan("llama", arrays)
    dtype = next(iter(hf.values())).dtype
    return {name: torch.from_numpy(np.ascontiguousarray(array)).to(dtype) for name, array in made[dialect]().items()}


def stacked(state: Tensors) -> Tensors:
    """The same with all layers of a kind in one tensor."""
    found = {name: tensor for name, tensor in state.items() if ".layers." not in name}
    for name in [name for name in state if ".layers.0." in name]:
        layers = [state[name.replace(".layers.0.", f".layers.{layer}.")] for layer in range(3)]
        found[name.replace(".layers.0.", ".layers.")] = torch.stack(layers)
    return found


def megatron_bridge(root: Path, state: Tensors, **model: Any) -> Path:
    """A run's directory with one iteration."""
    iteration = root / "iter_0000100"
    save(iteration, state)
    (iteration / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    torch.save({"iteration": 100, "checkpoint_version": 3.0}, iteration / "common.pt")
    (iteration / "run_config.yaml").write_text(yaml.safe_dump({"model": MODEL | model, "train": {"seed": 1}}))
    (root / "latest_checkpointed_iteration.txt").write_text("100")
    return root


def nemo_archive(root: Path, shares: dict[str, Tensors], **changes: Any) -> Path:
    """A .nemo of the files of its ranks."""
    root.mkdir(parents=True, exist_ok=True)
    for name, state in shares.items():
        (root / name).parent.mkdir(exist_ok=True)
        torch.save({f"model.{key}": tensor for key, tensor in state.items()}, root / name)
    config = {
        "mcore_gpt": True, "num_layers": 3, "hidden_size": 48, "ffn_hidden_size": 80, "num_attention_heads": 6,
        "num_query_groups": 2, "kv_channels": 10, "normalization": "rmsnorm", "activation": "fast-swiglu",
        "bias": False, "position_embedding_type": "rope", "rotary_base": 5000.0, "encoder_seq_length": 112,
        "share_embeddings_and_output_weights": False, "override_vocab_size": 97,
    } | changes  # fmt: skip
    (root / "model_config.yaml").write_text(yaml.safe_dump(config))
    archive = root.with_suffix(".nemo")
    with tarfile.open(archive, "w:") as tar:
        tar.add(root, arcname=".")
    return archive


def meta(root: Path, state: Tensors, ranks: int = 1, **params: Any) -> Path:
    """params.json and a file for each rank; the embedding along the vocabulary, as Llama 3 has it."""
    root.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        torch.save(
            {name: _share(name, t, rank, ranks) for name, t in state.items()}, root / f"consolidated.{rank:02}.pth"
        )
    said = {"dim": 48, "n_layers": 3, "n_heads": 6, "n_kv_heads": 2, "head_dim": 10, "hidden_dim": 80, "norm_eps": 1e-5}
    said |= {"rope_theta": 5000.0, "vocab_size": 97, "max_seq_len": 112}
    (root / "params.json").write_text(json.dumps(said | params))
    return root


def _share(name: str, tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    if "norm" in name or "freqs" in name:
        return tensor
    return tensor.chunk(ranks, 1 if name.endswith(("wo.weight", "w2.weight")) else 0)[rank].clone()
