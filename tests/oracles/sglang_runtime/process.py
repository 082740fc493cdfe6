"""Loads checkpoints with SGLang's own code, one request a line of standard input, for tests.oracles.sglang_oracle.

Arguments: rank, ranks, port. It uses no bridge. What importing SGLang on a CPU asks for: triton, sgl_kernel,
torchvision, IPython and gguf have stand-ins, after transformers has looked which of them are there; torch does not
compile, since it would ask triton; SGLang's registry imports every model that it finds, and each wants other packages,
hence MODELS.
"""

from __future__ import annotations

import json
import os
import pkgutil
import sys
import traceback
from collections.abc import Iterator
from typing import Any

os.environ |= {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TORCH_COMPILE_DISABLE": "1",
}

import torch
import transformers.image_utils
import transformers.modeling_utils  # noqa: F401  # before the stand-ins
from safetensors.torch import save_file

from tests.oracles.stand_ins import stand_in
from tests.oracles.vllm_runtime import loading

MODELS = ("llama", "qwen2", "qwen3", "mixtral", "mixtral_quant", "qwen3_moe")
PACKAGE = "sglang.srt.models."
CAPABILITY = (10, 0)  # of the GPU that SGLang is told of, the first that multiplies NVFP4
MODULES = pkgutil.iter_modules


def _modules(path: Any = None, prefix: str = "") -> Iterator[pkgutil.ModuleInfo]:
    found = MODULES(path, prefix)
    return (each for each in found if prefix != PACKAGE or each.name.removeprefix(PACKAGE) in MODELS)


stand_in("triton", "IPython", "torchvision", "gguf", "sgl_kernel")
pkgutil.iter_modules = _modules
torch.cuda.get_device_capability = lambda *_: CAPABILITY

from sglang.srt.configs.load_config import LoadConfig  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.distributed import parallel_state  # noqa: E402
from sglang.srt.layers.dp_attention import initialize_dp_attention  # noqa: E402
from sglang.srt.layers.quantization.base_config import QuantizationConfig  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode  # noqa: E402
from sglang.srt.model_loader import loader as loaders  # noqa: E402
from sglang.srt.model_loader.utils import set_default_torch_dtype  # noqa: E402
from sglang.srt.runtime_context import SpawnRanks, publish  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from tests.oracles.sglang_runtime import matrices  # noqa: E402

FLOATS = classmethod(lambda cls: [torch.float32, torch.bfloat16, torch.half])


def start() -> None:
    """Replace attention, and let every scheme be computed in float32: only quantization may differ."""
    torch.set_num_threads(1)
    matrices.install()
    for config in _subclasses(QuantizationConfig):
        config.get_supported_act_dtypes = FLOATS


def _subclasses(kind: type) -> list[type]:
    return [each for sub in kind.__subclasses__() for each in (sub, *_subclasses(sub))]


def answer(request: dict[str, Any], port: int) -> dict[str, Any]:
    directory, ids = request["directory"], torch.tensor(request["ids"])
    arguments = ServerArgs(
        model_path=directory, device="cpu", dtype="float32", skip_tokenizer_init=True, load_format="safetensors",
        attention_backend="torch_native", max_total_tokens=len(ids), kv_cache_dtype=request["kv"],
        mem_fraction_static=0.5,
    )  # fmt: skip
    publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    if not torch.distributed.is_initialized():
        parallel_state.init_distributed_environment(1, 0, f"tcp://127.0.0.1:{port}", 0, "gloo")
        parallel_state.initialize_model_parallel(backend="gloo")
        initialize_dp_attention(arguments)
    config, options = ModelConfig.from_server_args(arguments), LoadConfig(load_format="safetensors")
    loader = loaders.DefaultModelLoader(options)
    with set_default_torch_dtype(torch.float32):
        quantization = loaders._get_quantization_config(config, options)
        model = loaders._initialize_model(config, options, quantization)
    facts = loading.Facts()
    loading.load(model, lambda: loader._get_all_weights(config, model), facts)
    if not request["load_only"] and not facts.unread():
        save_file({"logits": logits(model, ids)}, request["out"])
    return {
        "quantization": type(quantization).__name__,
        "unread": facts.unread(), "unset": facts.unset, "changed": facts.changed(model),
    }  # fmt: skip


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    matrices.stand_in(model)
    one = torch.zeros(1, dtype=torch.int64)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND, batch_size=1, input_ids=ids, req_pool_indices=one, seq_lens=one + len(ids),
        out_cache_loc=torch.arange(len(ids)), seq_lens_sum=len(ids),
    )  # fmt: skip
    with torch.no_grad():
        hidden = model.model(ids, torch.arange(len(ids)), batch)
        head = model.lm_head.weight[: model.config.vocab_size]  # SGLang fills it up to a multiple of 64
        return torch.nn.functional.linear(hidden, head).contiguous()


def main() -> None:
    port = int(sys.argv[3])
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    start()
    for line in sys.stdin:
        try:
            reply = answer(json.loads(line), port)
        except Exception as error:  # a refusal is an answer; the test says which one it expects
            reply = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        lines.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
