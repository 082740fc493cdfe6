"""A written file -> a model in float32, by other programs' readers, or by formulas that stand here.

compressed-tensors decompresses its layouts, transformers loads GGUF, ONNX Runtime runs its graphs. FP4, ModelOpt's
layout, GPTQ's and MLX's, which nothing dequantizes to float32 on a CPU here, are decoded by formulas. No decoder of the
package is used.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from benchmarks.evaluation import inputs
from benchmarks.evaluation.inputs import Quantize

Parts = Mapping[str, torch.Tensor]
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
CODES = ("weight_packed", "qweight", "weight_scale", "scales")  # a module that has one of them is quantized


def load(path: Path, language: bool, **config: Any) -> Any:
    """A model that is not quantized, in float32."""
    from transformers import AutoModel, AutoModelForCausalLM

    kind = AutoModelForCausalLM if language else AutoModel
    return kind.from_pretrained(path, dtype=torch.float32, **config).eval()


def read(out: Path, source: Path, language: bool) -> Any:
    """The model of a directory that bridge or a peer wrote; `source` has the same classes and names."""
    if gguf := list(out.glob("*.gguf")):
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(out, gguf_file=gguf[0].name, dtype=torch.float32).eval()
    config = json.loads((out / "config.json").read_text())
    untied = config.get("tie_word_embeddings") is False  # a rotated model has a head of its own
    model = load(source, language, **({"tie_word_embeddings": False} if untied else {}))
    quantization = config.get("quantization_config")
    _fill(model, tensors(out), Layout(quantization) if quantization else None)
    return model


def tensors(out: Path) -> dict[str, torch.Tensor]:
    """All tensors of the directory's weight files."""
    found: dict[str, torch.Tensor] = {}
    for path in sorted(out.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


class Layout:
    """What a `quantization_config` says: how to decode a matrix, and how its inputs are quantized."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.method, self.config = config.get("quant_method", "mlx"), config  # MLX's has no name
        if self.method == "compressed-tensors":
            from compressed_tensors.quantization import QuantizationConfig

            self.compressed = QuantizationConfig.model_validate(dict(config))
            self.group, *_ = self.compressed.config_groups.values()

    def of(self, module: str) -> Layout:
        """The same with the group of one module, which a mixed recipe names."""
        if self.method != "compressed-tensors" or len(self.compressed.config_groups) == 1:
            return self
        one = copy.copy(self)
        (one.group,) = [group for group in self.compressed.config_groups.values() if module in group.targets]
        return one

    def weight(self, parts: Parts) -> torch.Tensor:
        """Float32 [out, in] of one module."""
        if self.method == "compressed-tensors":
            from compressed_tensors.compressors import BaseCompressor

            if (codes := parts.get("weight_packed")) is not None and codes.dtype == torch.uint8:
                above = 1 / parts.get("weight_global_scale", torch.ones(())).float()  # its decompressor rounds to bf16
                return modelopt_weight(
                    {"weight": codes, "weight_scale": parts["weight_scale"], "weight_scale_2": above}
                )
            wide = {name: _wide(part) for name, part in parts.items()}
            compressor = BaseCompressor.get_value_from_registry(self.group.format or self.compressed.format)
            return compressor.decompress(wide, self.group)["weight"].float()
        if self.method == "mlx":
            return mlx_weight(parts, self.config["bits"])
        return gptq_weight(parts, self.config["bits"]) if self.method == "gptq" else modelopt_weight(parts)

    def input(self, parts: Parts) -> Quantize | None:
        """How inputs are quantized; None if they are not."""
        if self.method in ("gptq", "mlx"):
            return None
        found = self._compressed_input(parts) if self.method == "compressed-tensors" else self._modelopt_input(parts)
        if "pre_quant_scale" not in parts:
            return found
        scale = parts["pre_quant_scale"].float()
        return lambda x: (found or (lambda y: y))(x * scale)

    def _compressed_input(self, parts: Parts) -> Quantize | None:
        said = self.group.input_activations
        if said is None:
            return None
        type_, strategy = (str(getattr(word, "value", word)) for word in (said.type, said.strategy))
        kind = (type_, said.num_bits, strategy, bool(said.dynamic))
        kinds: dict[Any, Callable[[], Quantize]] = {
            ("float", 8, "token", True): lambda: inputs.fp8_token,
            ("float", 8, "tensor", False): lambda: inputs.fp8_static(parts["input_scale"].float()),
            ("float", 8, "group", True): lambda: _groups(said.group_size),
            ("int", 8, "token", True): lambda: inputs.int8_token,
            ("int", 8, "tensor", False): lambda: inputs.int8_static(parts["input_scale"].float()),
            ("float", 4, "tensor_group", True): lambda: inputs.nvfp4(1 / parts["input_global_scale"].float()),
            ("float", 4, "group", True): lambda: inputs.mx(inputs.e2m1, inputs.E2M1),
        }
        return kinds[kind]()

    def _modelopt_input(self, parts: Parts) -> Quantize | None:
        algorithm = self.config["quant_algo"]
        if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
            return inputs.fp8_token
        if algorithm == "MXFP8":
            return inputs.mx(inputs.e4m3, inputs.E4M3)
        if "input_scale" not in parts:
            return None
        scale = parts["input_scale"].float()
        if algorithm.startswith("NVFP4"):
            return inputs.nvfp4(scale)
        return inputs.int8_static(scale) if parts["weight"].dtype == torch.int8 else inputs.fp8_static(scale)


def _groups(size: int) -> Quantize:
    return inputs.mx(inputs.e4m3, inputs.E4M3) if size == 32 else inputs.fp8_group(size)


def _wide(part: torch.Tensor) -> torch.Tensor:
    """Scales in float32, so that the product with codes is not rounded to them."""
    return part.float() if part.dtype in (torch.bfloat16, torch.float16) else part


def modelopt_weight(parts: Parts) -> torch.Tensor:
    """ModelOpt's unified layout: what the codes are follows from the dtypes and the numbers of rows."""
    codes, scale = parts["weight"], parts["weight_scale"]
    if scale.dtype == torch.uint8:
        scale = torch.exp2(scale.float() - 127)
    four = codes.dtype == torch.uint8 and len(scale) == len(codes)
    scale = scale.float() * (parts["weight_scale_2"].float() if four and "weight_scale_2" in parts else 1)
    if four:  # FP4, two columns a byte
        values = FP4[torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()]
    elif codes.dtype == torch.uint8:  # INT4, two rows a byte; a second scale is that of a later cast to FP8
        nibbles = torch.stack((codes & 15, codes >> 4), 1).flatten(0, 1)
        values = ((nibbles.int() ^ 8) - 8).float()
    else:
        values = codes.float()
    if scale.ndim == 4:  # tiles
        scale = scale.flatten(2).flatten(1).repeat_interleave(128, 0).repeat_interleave(128, 1)
        return values * scale[: len(values), : values.shape[1]]
    if scale.ndim == 2:
        return values * scale.repeat_interleave(values.shape[1] // scale.shape[1], 1)
    return values * (scale[:, None] if scale.ndim else scale)


def gptq_weight(parts: Parts, bits: int) -> torch.Tensor:
    """GPTQ's layout: codes along `in`, zero points along `out`, stored less one."""
    shifts = torch.arange(0, 32, bits)
    last = 2**bits - 1
    codes = ((parts["qweight"][:, None, :] >> shifts[None, :, None]) & last).flatten(0, 1)  # in, out
    zeros = (((parts["qzeros"][:, :, None] >> shifts) & last) + 1).flatten(1)  # groups, out
    each = len(codes) // len(zeros)
    group = parts["g_idx"].long() if "g_idx" in parts else torch.arange(len(codes)) // each
    return ((codes - zeros[group]) * parts["scales"].float()[group]).T


def mlx_weight(parts: Parts, bits: int) -> torch.Tensor:
    """MLX's layout: codes follow each other in the bits of 32-bit words, the lowest first; MXFP8 has no biases."""
    words, scales = parts["weight"].view(torch.uint8), parts["scales"]
    if "biases" not in parts:
        values, scale = words.view(torch.float8_e4m3fn).float(), torch.exp2(scales.float() - 127)
        return values * scale.repeat_interleave(values.shape[1] // scale.shape[1], 1)
    ones = (words[..., None] >> torch.arange(8)) & 1  # out, bytes, bits
    codes = (ones.flatten(1).unflatten(1, (-1, bits)) << torch.arange(bits)).sum(-1)
    each = codes.shape[1] // scales.shape[1]
    scale, bias = (parts[name].float().repeat_interleave(each, 1) for name in ("scales", "biases"))
    return codes * scale + bias


def _fill(model: Any, stored: dict[str, torch.Tensor], layout: Layout | None) -> None:
    """Replace every parameter by what is stored, and quantize the inputs of quantized modules."""
    from transformers.pytorch_utils import Conv1D

    modules: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in stored.items():
        module, _, part = name.rpartition(".")
        modules.setdefault(module, {})[part] = tensor
    missing = {name for name, _ in model.named_parameters()}
    for name, parts in modules.items():
        module = _module(model, name)
        if module is None:
            continue
        if layout and parts.keys() & set(CODES):
            of = layout.of(name)
            weight = of.weight({part: tensor for part, tensor in parts.items() if part != "bias"})
            parts = parts | {"weight": weight.T if isinstance(module, Conv1D) else weight}
            if quantize := of.input(parts | {"weight": stored.get(f"{name}.weight", weight)}):
                module.register_forward_pre_hook(lambda _, args, quantize=quantize: (quantize(args[0]), *args[1:]))
        for part, parameter in module.named_parameters(recurse=False):
            if part in parts:
                assert parameter.shape == parts[part].shape, (name, part, parameter.shape, parts[part].shape)
                parameter.data = parts[part].float().contiguous()
                missing -= {key for key, other in model.named_parameters() if other is parameter}
    assert not missing, f"not in the file: {sorted(missing)[:5]}"
    model.tie_weights()


def _module(model: Any, name: str) -> Any:
    """A module by its name in the file; None if the class has none, as a head that is left out."""
    try:
        return model.get_submodule(name)
    except AttributeError:
        inner = name.removeprefix(f"{model.base_model_prefix}.")
        try:
            return model.get_submodule(inner)
        except AttributeError:
            return None


def ort_logits(out: Path, ids: list[int]) -> torch.Tensor:
    """Logits of one window from an ONNX graph with a key-value cache, which is empty at first."""
    import numpy as np
    import onnxruntime

    (path,) = out.glob("*.onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options)
    row = np.array([ids], np.int64)
    known = {"input_ids": row, "attention_mask": np.ones_like(row), "position_ids": np.arange(len(ids))[None]}
    decoder = json.loads((out / "genai_config.json").read_text())["model"]["decoder"]
    empty = (1, decoder["num_key_value_heads"], 0, decoder["head_size"])  # axes of its inputs may have names alone
    feed = {}
    for value in session.get_inputs():
        kind = np.float16 if "float16" in value.type else np.float32
        feed[value.name] = known[value.name] if value.name in known else np.zeros(empty, kind)
    (logits,) = session.run(["logits"], feed)
    return torch.from_numpy(logits[0].astype(np.float32))
