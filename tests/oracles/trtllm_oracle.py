"""ModelOpt's TensorRT-LLM checkpoint of a tiny model, and ours made from the same calibration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers as T

import bridge
from tests.models import export_families
from tests.models.export_families import GQA, TEXT
from tests.oracles.export_oracle import DTYPES, ask_modelopt, differences, exceptions, scheme_of
from tests.oracles.modelopt_oracle import Answer

# Groups of 128 still fit when `in` is cut in four.
WIDE: dict[str, Any] = TEXT | {
    "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 1024,
}  # fmt: skip
ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
OWN: dict[str, Callable[[], Any]] = {
    "llama-wide": lambda: T.LlamaForCausalLM(T.LlamaConfig(**WIDE)),
    "llama-rope": lambda: T.LlamaForCausalLM(T.LlamaConfig(**GQA, rope_parameters=ROPE)),
}
EXCEPTIONS = exceptions("trtllm")
ROWS = ("weight", "bias", "weights_scaling_factor", "per_channel_scale")  # what follows the rows of a matrix
SIDE = "generation_config.json: only ours"  # carried with the tokenizer; ModelOpt leaves that to its user


def build(family: str, dtype: torch.dtype) -> Any:
    """A family of `tests.models.export_families`, or one of our own."""
    if family not in OWN:
        return export_families.build(family, dtype)
    torch.manual_seed(0)
    model = OWN[family]().to(dtype).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            tensor.normal_(0, 0.05)
            tensor += 0.7 * ("norm" in name)
    return model


def convert(directory: Path, scheme: str, kv: str | None, answer: Answer, out: Path, **options: Any) -> Path:
    """Ours, from the checkpoint on disk and the same calibration."""
    bridge.convert(directory, "trtllm", scheme_of(scheme, kv), out, calib=answer.calibration, verify=False, **options)
    return out


def export(answer: Answer, out: Path, dtype: str, tp: int, pp: int) -> Path:
    """ModelOpt's own export; the answer's model is used up."""
    from modelopt.torch.export import export_tensorrt_llm_checkpoint
    from modelopt.torch.export.model_utils import get_model_type

    model, kind = answer.model, get_model_type(answer.model)
    ask_modelopt(
        lambda: export_tensorrt_llm_checkpoint(
            model, kind, DTYPES[dtype], out, inference_tensor_parallel=tp, inference_pipeline_parallel=pp
        )
    )
    return out


def compared(ours: Path, theirs: Path) -> list[str]:
    """In what two checkpoints differ."""
    return [line for line in differences(ours, theirs) if line != SIDE]


def expected(family: str, scheme: str, tp: int, pp: int) -> list[dict[str, Any]]:
    """The exceptions that speak of a case."""
    return [
        entry
        for entry in EXCEPTIONS.values()
        if (not entry["families"] or family in entry["families"])
        and (not entry["schemes"] or scheme in entry["schemes"])
        and tp >= entry.get("tp", 1)
        and pp >= entry.get("pp", 1)
    ]


def assert_slices(whole: dict[str, Any], parts: list[dict[str, Any]], heads: int, kv_heads: int) -> None:
    """The tensors of every rank are those of one rank, cut; fewer key and value heads than ranks are repeated."""
    tp = len(parts)
    for name, one in whole.items():
        many = [part[name].view(torch.uint8) if one.element_size() == 1 else part[name] for part in parts]
        one = one.view(torch.uint8) if one.element_size() == 1 else one
        if ".qkv." in name and name.rpartition(".")[2] in ROWS and one.numel() > 1:
            each, rows = heads // tp, one.shape[0] // (heads + 2 * kv_heads)
            for number, found in enumerate(many):
                kv = number * kv_heads // tp
                held = [(number * each, each), (heads + kv, max(kv_heads // tp, 1))]
                held.append((held[1][0] + kv_heads, held[1][1]))
                expected = torch.cat([one[first * rows : (first + count) * rows] for first, count in held])
                assert torch.equal(found, expected), (name, number)
        elif one.shape == many[0].shape:
            assert all(torch.equal(found, one) for found in many), name
        else:
            axis = 0 if one.shape[1:] == many[0].shape[1:] else 1
            assert torch.equal(torch.cat(many, axis), one), name
