"""Reading a 1.1 B-parameter Llama as Megatron, torchtitan and Meta lay it out, beside the same as safetensors.

    python benchmarks/sources.py                five rounds, in turn, each a share of safetensors' rate in its round

A GPT-2 of Megatron (gpt2-xl, twelve layers) is read, too: all its matrices are stored across the rows asked for; beside
it stands torch turning the same matrices, which lie in memory already, on one thread. Every
tensor through `Source.read_rows` in pieces of a megabyte, into one buffer, in the order of the files, as a
conversion reads; files in the page cache. Opening is timed apart. The checkpoints are written with torch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from checkpoint import SMALL, make_checkpoint

from bridge.core.arrays import aligned_empty
from bridge.core.files.span import read_rows_into
from bridge.sources.opening import open_source
from bridge.sources.source import Source

ROOT = Path(__file__).parent.parent
PIECE = 1 << 20
CONFIG = SMALL | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "head_dim": 64}
HEADS, GROUPS, LAYERS = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], CONFIG["num_hidden_layers"]
GPT2 = {
    "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 12,
    "vocab_size": 50304, "n_positions": 1024, "n_inner": None, "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "layernorm_zero_centered_gamma": False,
}  # fmt: skip
Tensors = dict[str, Any]  # of torch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, default=ROOT / "out/bench-sources")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    made = {name: make(args.work, name, write) for name, write in WRITERS.items()}
    rates: dict[str, list[float]] = {name: [] for name in made}
    for number in range(args.rounds + 1):
        for name, path in made.items():
            start = time.perf_counter()
            source = open_source(path, config=GPT2 if name == "gpt2" else CONFIG)
            opened = time.perf_counter() - start
            rate = read(source)
            if number:  # the first brings the files into the page cache
                rates[name].append(rate)
                share = rate / rates["safetensors"][-1]
                print(f"{name:12} open {opened * 1e3:6.1f} ms  {rate:5.2f} GB/s  {share:4.0%}", flush=True)
    for name, found in rates.items():
        share = statistics.median(rate / base for rate, base in zip(found, rates["safetensors"], strict=True))
        print(f"{name:12} median {statistics.median(found):5.2f} GB/s, {share:4.0%} of safetensors")
    print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB resident")
    whole, *halves = (scattered(made["meta"] / "consolidated.00.pth", row) for row in (PIECE, 5632, 2048))
    print(f"preadv alone: {whole:.0f} us a megabyte; halves of down's and o's rows {halves[0]:.0f} and {halves[1]:.0f}")
    print(f"torch turns GPT-2's matrices in memory at {turned():.2f} GB/s")


def read(source: Source) -> float:
    """Read everything; GB/s."""
    buffer = aligned_empty((PIECE,), np.uint8)
    names = sorted(source.specs, key=source.place)
    total, start = 0, time.perf_counter()
    for name in names:
        spec = source.specs[name]
        total += spec.nbytes
        if spec.across:  # which a conversion reads whole
            source.read(name)
            continue
        row = spec.nbytes // spec.shape[0]
        step = max(1, PIECE // row)
        for begin in range(0, spec.shape[0], step):
            end = min(begin + step, spec.shape[0])
            out = buffer[: (end - begin) * row].view(np.uint16).reshape(end - begin, *spec.shape[1:])
            source.read_rows(name, begin, end, out)
    return total / (time.perf_counter() - start) / 1e9


def scattered(path: Path, row: int) -> float:
    """Microseconds a megabyte that `preadv` takes alone where runs of `row` bytes go to every other place.

    Without gaps where a run is a piece; the best of six.
    """
    buffer, fd = aligned_empty((2 * PIECE,), np.uint8), os.open(path, os.O_RDONLY)
    rows = buffer[: PIECE // row * row * 2].reshape(-1, 2 * row)[:, :row]
    count, best = min(path.stat().st_size, 512 << 20) // rows.size, math.inf
    for _ in range(6):
        start = time.perf_counter()
        for i in range(count):
            read_rows_into(fd, rows, i * rows.size, path)
        best = min(best, time.perf_counter() - start)
    os.close(fd)
    return best / (count * rows.size) * 1e12


def turned() -> float:
    """The rate at which torch makes contiguous transposes of matrices like GPT-2's, the best of three; GB/s."""
    import torch

    torch.set_num_threads(1)
    width, best = GPT2["n_embd"], 0.0
    matrices = [torch.zeros(shape, dtype=torch.bfloat16) for shape in ((3 * width, width), (4 * width, width))]
    for _ in range(3):
        start = time.perf_counter()
        for matrix in matrices:
            matrix.t().contiguous()
        best = max(best, sum(matrix.nbytes for matrix in matrices) / (time.perf_counter() - start) / 1e9)
    return best


def make(work: Path, name: str, write: Callable[[Path, Path], None]) -> Path:
    """Write a checkpoint once; each but the first is made of that."""
    path = work / name
    if not path.exists():
        write(path, work / "safetensors")
        os.sync()
    return path


def load(directory: Path) -> Tensors:
    from safetensors.torch import load_file

    return {
        name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()
    }


def layer(hf: Tensors, number: int, part: str) -> Any:
    return hf[f"model.layers.{number}.{part}.weight"]


def paired(matrix: Any, heads: int) -> Any:
    """RoPE's pairs side by side, as torchtitan and Meta have them."""
    rows, width = matrix.shape
    return matrix.view(heads, 2, rows // heads // 2, width).transpose(1, 2).reshape(rows, width)


def write_safetensors(path: Path, _: Path) -> None:
    make_checkpoint(path, CONFIG)


def write_megatron(path: Path, source: Path) -> None:
    import torch

    hf = load(source)
    norms = {
        "self_attention.linear_qkv.layer_norm_weight": "input",
        "mlp.linear_fc1.layer_norm_weight": "post_attention",
    }
    state = {
        "embedding.word_embeddings.weight": hf["model.embed_tokens.weight"],
        "output_layer.weight": hf["lm_head.weight"],
    }
    state["decoder.final_layernorm.weight"] = hf["model.norm.weight"]
    every = range(LAYERS)
    state |= {
        f"decoder.layers.{name}": torch.stack([layer(hf, n, f"{norm}_layernorm") for n in every])
        for name, norm in norms.items()
    }
    state["decoder.layers.self_attention.linear_qkv.weight"] = torch.stack([interleaved(hf, n) for n in every])
    fc1 = [torch.cat([layer(hf, n, "mlp.gate_proj"), layer(hf, n, "mlp.up_proj")]) for n in every]
    state["decoder.layers.mlp.linear_fc1.weight"] = torch.stack(fc1)
    for name, part in (("self_attention.linear_proj", "self_attn.o_proj"), ("mlp.linear_fc2", "mlp.down_proj")):
        state[f"decoder.layers.{name}.weight"] = torch.stack([layer(hf, n, part) for n in every])
    save(path, state)
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))


def write_gpt2(path: Path, _: Path) -> None:
    import torch

    width = GPT2["n_embd"]
    matrices = {
        "self_attention.linear_qkv": (3 * width, width), "self_attention.linear_proj": (width, width),
        "mlp.linear_fc1": (4 * width, width), "mlp.linear_fc2": (width, 4 * width),
    }  # fmt: skip
    shapes = {"embedding.word_embeddings.weight": (GPT2["vocab_size"], width)}
    shapes["embedding.position_embeddings.weight"] = (GPT2["n_positions"], width)
    vectors = {"decoder.final_layernorm.weight": width, "decoder.final_layernorm.bias": width}
    for n in range(GPT2["n_layer"]):
        for name, shape in matrices.items():
            shapes[f"decoder.layers.{n}.{name}.weight"] = shape
            vectors[f"decoder.layers.{n}.{name}.bias"] = shape[0]
        for name in ("self_attention.linear_qkv.layer_norm", "mlp.linear_fc1.layer_norm"):
            vectors |= dict.fromkeys((f"decoder.layers.{n}.{name}_weight", f"decoder.layers.{n}.{name}_bias"), width)
    state = {name: torch.randn(shape).bfloat16() for name, shape in (shapes | vectors).items()}
    save(path, state)


def interleaved(hf: Tensors, number: int) -> Any:
    import torch

    q, k, v = (layer(hf, number, f"self_attn.{x}_proj") for x in "qkv")
    width = q.shape[1]
    groups = [x.view(GROUPS, -1, width) for x in (q, k, v)]
    return torch.cat(groups, 1).reshape(-1, width)


def write_torchtitan(path: Path, source: Path) -> None:
    save(path, titan(load(source), "attention.qkv_linear.", "lm_head.weight"))


def write_meta(path: Path, source: Path) -> None:
    import torch

    path.mkdir()
    state = titan(load(source), "attention.", "output.weight")
    for rank in range(2):
        torch.save(
            {name: share(name, tensor, rank) for name, tensor in state.items()}, path / f"consolidated.0{rank}.pth"
        )


def share(name: str, tensor: Any, rank: int) -> Any:
    if "norm" in name:
        return tensor
    return tensor.chunk(2, 1 if name.endswith(("wo.weight", "w2.weight")) else 0)[rank].clone()


def titan(hf: Tensors, qkv: str, head: str) -> Tensors:
    state = {"tok_embeddings.weight": hf["model.embed_tokens.weight"], "norm.weight": hf["model.norm.weight"]}
    state[head] = hf["lm_head.weight"]
    names = {
        "attention.wo": "self_attn.o_proj", f"{qkv}wv": "self_attn.v_proj", "feed_forward.w1": "mlp.gate_proj",
        "feed_forward.w3": "mlp.up_proj", "feed_forward.w2": "mlp.down_proj", "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    for n in range(LAYERS):
        state |= {f"layers.{n}.{name}.weight": layer(hf, n, part) for name, part in names.items()}
        for x, heads in (("q", HEADS), ("k", GROUPS)):
            state[f"layers.{n}.{qkv}w{x}.weight"] = paired(layer(hf, n, f"self_attn.{x}_proj"), heads)
    assert sum(math.prod(t.shape) for t in state.values()) == sum(math.prod(t.shape) for t in hf.values())
    return state


def save(path: Path, state: Tensors) -> None:
    import torch.distributed.checkpoint as dcp

    dcp.save(state, storage_writer=dcp.FileSystemWriter(str(path), sync_files=False), no_dist=True)


WRITERS: dict[str, Callable[[Path, Path], None]] = {
    "safetensors": write_safetensors,
    "megatron": write_megatron,
    "torchtitan": write_torchtitan,
    "meta": write_meta,
    "gpt2": write_gpt2,
}

if __name__ == "__main__":
    main()
