"""Loads checkpoints with vLLM's own code, one request a line of standard input, for tests.oracles.vllm_oracle.

Arguments: rank, ranks, port. It uses no bridge.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import unittest.mock
from typing import Any

os.environ |= {
    "VLLM_TARGET_DEVICE": "cpu",  # vLLM reads this at run time and takes its CPU platform
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
}

import torch
from safetensors.torch import save_file

torch.accelerator.empty_cache = lambda *_, **__: None  # vLLM calls it without asking for an accelerator

from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import destroy_model_parallel, init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.forward_context import set_forward_context  # noqa: E402
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig  # noqa: E402
from vllm.model_executor.model_loader import base_loader, get_model  # noqa: E402
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402

from tests.oracles.vllm_runtime import activations, experts, loading, matrices  # noqa: E402

FLOATS = classmethod(lambda cls: [torch.float32, torch.bfloat16, torch.half])
CONFIGS = (
    "modelopt", "fp8", "auto_awq", "auto_gptq", "moe_wna16", "mxfp4",
    "compressed_tensors.compressed_tensors",
)  # fmt: skip


def start() -> list[loading.Facts]:
    """Replace the kernels; what each load shows is appended to the list."""
    torch.set_num_threads(1)
    activations.install()
    matrices.install()
    experts.install()
    registry._run_in_subprocess = lambda inspect: inspect()  # which imports vLLM once more for each architecture
    for name in CONFIGS:
        __import__(f"vllm.model_executor.layers.quantization.{name}")
    for config in _subclasses(QuantizationConfig):
        config.get_supported_act_dtypes = FLOATS  # float32: only quantization may differ
    return loading.watch(DefaultModelLoader)


def _subclasses(kind: type) -> list[type]:
    return [each for sub in kind.__subclasses__() for each in (sub, *_subclasses(sub))]


def answer(request: dict[str, Any], seen: list[loading.Facts], rank: int, ranks: int, port: int) -> dict[str, Any]:
    directory, ids = request["directory"], torch.tensor(request["ids"])
    matrices.FP8Blocks.apply_input_quant = request.get("inputs", False)
    arguments = EngineArgs(
        model=directory, tokenizer=directory, dtype="float32", enforce_eager=True, max_model_len=len(ids) + 1,
        load_format="safetensors", tensor_parallel_size=ranks, skip_tokenizer_init=True,
        kv_cache_dtype=request.get("kv", "auto"),
        distributed_executor_backend="mp" if ranks > 1 else None,
        speculative_config=request.get("drafts"),
    )  # fmt: skip
    config = arguments.create_engine_config()
    config.compilation_config.custom_ops[:] = ["none"]  # vLLM's torch versions of norms, rotations and activations
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port}", rank, "gloo")
        destroy_model_parallel()  # the group of experts is made for a model that has some, only
        initialize_model_parallel(ranks, 1)
        if request.get("drafts"):
            return _drafts(config, seen)
        model = get_model(vllm_config=config)
        facts = seen[-1]
        with torch.no_grad(), set_forward_context(None, config):
            logits = model.compute_logits(model(input_ids=ids, positions=torch.arange(len(ids))))
    if rank == 0:
        save_file({"logits": logits.float().contiguous()}, request["out"])
    quantization = str(config.model_config.quantization)
    return {
        "quantization": quantization, "unread": facts.unread(), "unset": facts.unset, "changed": facts.changed(model),
    }  # fmt: skip


def _drafts(config: Any, seen: list[loading.Facts]) -> dict[str, Any]:
    """What the loader of draft layers reads; no kernel lays them out, since nothing is computed."""
    chosen = config.speculative_config.draft_model_config
    with unittest.mock.patch.object(base_loader, "process_weights_after_loading"):
        get_model(vllm_config=config, model_config=chosen)
    facts = seen[-1]
    return {"quantization": str(chosen.quantization), "unread": facts.unread(), "unset": facts.unset, "changed": {}}


def main() -> None:
    rank, ranks, port = map(int, sys.argv[1:])
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    seen = start()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = answer(request, seen, rank, ranks, port)
        except Exception as error:  # a refusal is an answer; the test says which one it expects
            reply = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        lines.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
