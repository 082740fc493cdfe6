"""What TensorRT Edge-LLM loads of checkpoints: python -m tests.oracles.edgellm_process OUT DIRECTORY ...

It runs in a process of its own with `.venv/edgellm` on its path. Two programs of the package read a checkpoint: the
exporter, in torch, and the experimental builder, in NumPy. OUT/results.json has, by directory and program, the type
of each projection and of the KV cache, or the error; OUT/NAME.PROGRAM.npz what each weight is worth, float32
(out, in) times its pre-scale, and `input_scale` where one was read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from experimental.builder.core import quantization, weights
from experimental.builder.core.numpy_dtypes import fp8_e4m3_bytes_to_f32
from experimental.builder.weight_packing import int4, nvfp4
from tensorrt_edgellm import AutoModel
from tensorrt_edgellm.checkpoint import repacking

Loaded = tuple[str, str, np.ndarray | None, Any]  # module, type, values, scale of the input
SUFFIXES = ("weight", "qweight", "weight_packed")
FUSED = "qkv_proj_fused"
ZERO = 8  # of the unsigned codes that both programs pack for their kernels


def codes(nibbles: np.ndarray, _version: int = 0) -> np.ndarray:
    """Stands in for the packing of kernels, which permutes: signed codes (out, in)."""
    return (nibbles.astype(np.int16) - ZERO).astype(np.int8)


int4._pack_for_gemm = codes
repacking.repack_to_cutedsl_fragment = codes


def blocks(values: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Codes (out, in) times scales (out / a, in / b)."""
    for axis in (0, 1):
        scale = np.repeat(scale, -(-values.shape[axis] // scale.shape[axis]), axis)
    return values * scale[: values.shape[0], : values.shape[1]]


def by_builder(directory: Path) -> Iterator[Loaded]:
    """The projections as `experimental/builder` loads them."""
    config = json.loads((directory / "config.json").read_text())
    quant = quantization.parse_quantization(str(directory), config, config)
    store = weights.Weights(str(directory), quant=quant)
    yield "kv", str(quant.kv_cache_quant), None, None
    for key in store.keys():  # noqa: SIM118 - no mapping
        module, _, suffix = key.rpartition(".")
        if suffix not in SUFFIXES or not module.endswith(("_proj", "lm_head")):
            continue
        kind = store.module_quant_type(module)
        linear = store.linear(module, kind)
        yield module, kind, built(kind, linear), linear.input_scale


def built(kind: str, linear: Any) -> np.ndarray:
    """What a weight of the builder is worth."""
    weight, scale = linear.weight, linear.weight_scale
    if kind == "fp16":
        return weight.astype(np.float32)
    if kind.startswith("int4"):
        if linear.activation_permutation is not None:
            assert np.array_equal(linear.activation_permutation, np.arange(linear.in_features))
        values = blocks(weight.astype(np.float32), scale.astype(np.float32).T)
    elif kind == "int8_sq":
        values = weight.astype(np.float32) * scale[:, None]
    elif kind.startswith("nvfp4"):
        return nvfp4.decode_modelopt_nvfp4(weight, scale, linear.weight_scale_2, linear.group_size)
    elif kind == "mxfp8":
        return blocks(fp8_e4m3_bytes_to_f32(weight), np.exp2(scale.astype(np.float32) - 127))
    elif kind == "fp8_block":
        return blocks(fp8_e4m3_bytes_to_f32(weight), scale[:, 0, :, 0])
    else:
        return fp8_e4m3_bytes_to_f32(weight) * np.float32(scale)
    return values if linear.pre_quant_scale is None else values * linear.pre_quant_scale.astype(np.float32)


def by_exporter(directory: Path) -> Iterator[Loaded]:
    """The projections as the exporter's `AutoModel` loads them."""
    model = AutoModel.from_pretrained(str(directory), device="cpu")
    yield "kv", str(model.config.quant.kv_cache_quant), None, None
    for module, linear in model.named_modules():
        if not module.endswith(("_proj", "lm_head", FUSED)) or not hasattr(linear, "in_features"):
            continue
        kind = type(getattr(linear, "quant_method", linear)).__name__
        values, scale = exported(kind, linear), getattr(linear, "input_scale", None)
        if not module.endswith(FUSED):
            yield module, kind, values, scale
            continue
        config, parent = model.config, module.removesuffix(FUSED)
        q = config.num_attention_heads * config.head_dim
        rows = (0, q, (q + linear.out_features) // 2, linear.out_features)
        for name, begin, end in zip(("q_proj", "k_proj", "v_proj"), rows, rows[1:], strict=False):
            yield parent + name, kind, None if values is None else values[begin:end], scale


def exported(kind: str, linear: Any) -> np.ndarray | None:
    """What a weight of the exporter is worth; None if its tensors do not have the shapes of its type."""
    shape = (linear.out_features, linear.in_features)
    if kind in ("AWQLinear", "GPTQLinear"):
        values = blocks(linear.qweight.numpy().astype(np.float32), linear.scales.float().numpy().T)
    elif kind == "ModelOptAWQPrepackedLinear":
        values = blocks(linear.weight.numpy().astype(np.float32), linear.weight_scale.float().numpy().T)
    elif kind == "NVFP4LinearMethod":
        if linear.weight_scale.shape != (shape[0], shape[1] // 16):
            return None
        return repacking.decode_modelopt_nvfp4(linear.weight, linear.weight_scale, linear.weight_scale_2)
    elif kind == "MXFP8Linear":
        if linear.weight_scale.dtype != torch.uint8:
            return None
        return blocks(linear.weight.float().numpy(), np.exp2(linear.weight_scale.float().numpy() - 127))
    elif kind == "FP16Linear":
        return linear.weight.detach().float().numpy()
    elif tuple(linear.weight.shape) != shape:
        return None
    else:
        scale = np.atleast_1d(linear.weight_scale.float().numpy())
        values = linear.weight.float().numpy() * scale[:, None]
    scale = getattr(linear, "pre_quant_scale", None)
    return values if scale is None else values * scale.float().numpy()


def load(program: Callable[[Path], Iterator[Loaded]], directory: Path, out: Path) -> dict[str, str]:
    """The types by module, or the error; the values go to a file."""
    types, arrays = {}, {}
    try:
        for module, kind, values, scale in program(directory):
            types[module] = kind
            if values is not None:
                arrays[module] = values
            if scale is not None:
                arrays[f"{module}.input_scale"] = np.asarray(scale, np.float32)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    np.savez(out, **arrays)
    return types


def main(out: str, *directories: str) -> None:
    results: dict[str, dict[str, dict[str, str]]] = {}
    for directory in map(Path, directories):
        for name, program in (("builder", by_builder), ("exporter", by_exporter)):
            file = Path(out) / f"{directory.name}.{name}.npz"
            results.setdefault(directory.name, {})[name] = load(program, directory, file)
    (Path(out) / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
