"""Other programs that quantize on a CPU: each a function in a process of its own.

    python -m benchmarks.evaluation.peers NAME SOURCE OUT ROWS

ROWS is a file of token ids, those rows that bridge calibrates on. A program's packages go before those of this
environment (PYTHONPATH); `INSTALL` says which they are. GPTQModel (asks for a newer torch, and pcre) is not compared;
AWQ of llm-compressor asks for an accelerator. llama.cpp's quantizer writes the bytes of our rows
(tests/oracles/llama_quantize_golden.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

INSTALL = {
    "llm-compressor": "llmcompressor==0.14.0.1 loguru accelerate==1.15.0 py-cpuinfo nvidia-ml-py",
    "AutoRound": "auto-round==0.16.1 auto-round-lib==0.16.0 py-cpuinfo accelerate==1.15.0",
}  # `pip install --no-deps --target DIR`; ModelOpt, onnxruntime and onnxruntime-genai are here already
Peer = Callable[[Path, Path, list[list[int]]], None]


def loaded(source: Path) -> tuple[Any, Any]:
    """The model in float32, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(source)


def group(model: Any) -> int:
    """The largest size of INT4 blocks that divides every row, as bridge takes: 64 for SmolLM2's width of 576."""
    import torch

    linear = [it for name, it in model.named_modules() if isinstance(it, torch.nn.Linear) and name != "lm_head"]
    return next(size for size in (128, 64, 32) if all(it.in_features % size == 0 for it in linear))


def llm_compressor(modifier: Callable[[Any], Any], source: Path, out: Path, rows: list[list[int]]) -> None:
    import datasets
    from llmcompressor import oneshot

    model, tokenizer = loaded(source)
    data = datasets.Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
    length = len(rows[0])
    oneshot(
        model=model, tokenizer=tokenizer, dataset=data, recipe=modifier(model), num_calibration_samples=len(rows),
        max_seq_length=length,
    )  # fmt: skip
    model.bfloat16().save_pretrained(out, save_compressed=True)


def _preset(name: str, model: Any) -> Any:
    from llmcompressor.modifiers.quantization import QuantizationModifier

    return QuantizationModifier(targets="Linear", scheme=name, ignore=["lm_head"])


def _integers(bits: int, model: Any) -> dict[str, Any]:
    """INT4 in blocks, or INT8 by channel: the preset W8A16 has blocks of 128, which do not divide SmolLM2's rows."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    blocks = {"strategy": "group", "group_size": group(model)} if bits == 4 else {"strategy": "channel"}
    weights = QuantizationArgs(num_bits=bits, type="int", **blocks)
    return {"group_0": QuantizationScheme(targets=["Linear"], weights=weights)}


def _round_to_nearest(bits: int, model: Any) -> Any:
    from llmcompressor.modifiers.quantization import QuantizationModifier

    return QuantizationModifier(config_groups=_integers(bits, model), ignore=["lm_head"])


def _gptq(preset: str, model: Any) -> Any:
    """GPTQ with act-order, of INT4 in blocks that divide the rows, or of a preset."""
    from llmcompressor.modifiers.quantization import GPTQModifier

    what = {"targets": "Linear", "scheme": preset} if preset else {"config_groups": _integers(4, model)}
    return GPTQModifier(**what, ignore=["lm_head"], actorder="static")


def auto_round(iterations: int, source: Path, out: Path, rows: list[list[int]]) -> None:
    import torch
    from auto_round import AutoRound

    model, tokenizer = loaded(source)
    made = AutoRound(
        model, tokenizer=tokenizer, bits=4, group_size=group(model), sym=True, iters=iterations, batch_size=8,
        dataset=[torch.tensor([row]) for row in rows], nsamples=len(rows), seqlen=len(rows[0]), device_map="cpu",
    )  # fmt: skip
    made.quantize()
    made.save_quantized(str(out), format="auto_gptq")  # quantize_and_save makes a folder below


def modelopt(name: str, source: Path, out: Path, rows: list[list[int]]) -> None:
    """ModelOpt's own quantization and export."""
    import copy

    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_hf_checkpoint

    model, _ = loaded(source)
    config = copy.deepcopy(getattr(mtq, name))
    text = json.dumps(config["quant_cfg"], default=str)
    if '"-1": 128' in text:
        config["quant_cfg"] = json.loads(text.replace('"-1": 128', f'"-1": {group(model)}'), object_hook=_blocks)

    def loop(it: Any) -> None:
        with torch.no_grad():
            for row in rows:
                it(torch.tensor([row]), use_cache=False)

    mtq.quantize(model, config, loop)
    export_hf_checkpoint(model, torch.bfloat16, export_dir=out)


def _blocks(said: dict[str, Any]) -> dict[Any, Any]:
    """JSON has no numbers as keys."""
    return {int(key) if key.lstrip("-").isdigit() else key: value for key, value in said.items()}


def genai(source: Path, out: Path, rows: list[list[int]]) -> None:
    """The builder's defaults: blocks of 32, and the head in INT4."""
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(source), "-o", str(out)]
    subprocess.run([*builder, "-p", "int4", "-e", "cpu", "-c", str(out / "cache")], check=True)


def ort_quantizer(source: Path, out: Path, rows: list[list[int]]) -> None:
    """ORT's MatMulNBits quantizer, round to nearest in blocks of 32, on the float graph of target ort."""
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    import bridge

    bridge.convert(source, "ort", None, out / "float", progress=False, verify=False, dtype="fp32")
    (graph,) = (out / "float").glob("*.onnx")
    quantizer = MatMulNBitsQuantizer(onnx.load(graph), block_size=32, is_symmetric=True)
    quantizer.process()
    quantizer.model.save_model_to_file(str(out / "model.onnx"), use_external_data_format=True)


PEERS: dict[str, Peer] = {
    "llm-compressor RTN INT8": partial(llm_compressor, partial(_round_to_nearest, 8)),
    "llm-compressor FP8_DYNAMIC": partial(llm_compressor, partial(_preset, "FP8_DYNAMIC")),
    "llm-compressor NVFP4A16": partial(llm_compressor, partial(_preset, "NVFP4A16")),
    "llm-compressor MXFP4A16": partial(llm_compressor, partial(_preset, "MXFP4A16")),
    "llm-compressor RTN": partial(llm_compressor, partial(_round_to_nearest, 4)),
    "llm-compressor GPTQ": partial(llm_compressor, partial(_gptq, "")),
    "llm-compressor GPTQ NVFP4A16": partial(llm_compressor, partial(_gptq, "NVFP4A16")),
    "llm-compressor GPTQ MXFP4A16": partial(llm_compressor, partial(_gptq, "MXFP4A16")),
    "AutoRound 20": partial(auto_round, 20),
    "AutoRound 200": partial(auto_round, 200),
    "ModelOpt INT8_WEIGHT_ONLY_CFG": partial(modelopt, "INT8_WEIGHT_ONLY_CFG"),
    "ModelOpt FP8_DEFAULT_CFG": partial(modelopt, "FP8_DEFAULT_CFG"),
    "ModelOpt INT4_BLOCKWISE_WEIGHT_ONLY_CFG": partial(modelopt, "INT4_BLOCKWISE_WEIGHT_ONLY_CFG"),
    "ModelOpt INT4_AWQ_CFG": partial(modelopt, "INT4_AWQ_CFG"),
    "ModelOpt W4A16_NVFP4_CFG": partial(modelopt, "W4A16_NVFP4_CFG"),
    "onnxruntime-genai int4": genai,
    "ONNX Runtime MatMulNBits": ort_quantizer,
}


def main(name: str, source: Path, out: Path, rows: Path) -> None:
    import torch

    torch.set_num_threads(1)
    PEERS[name](source, out, json.loads(rows.read_text()))


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
