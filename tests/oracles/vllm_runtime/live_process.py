"""A trainer and a server in one process: weights pass from `bridge.tensors` into vLLM's model by vLLM's own code.

One request a line of standard input, as JSON: `work` (a directory) and `scheme`, with `family` and `fields` of its
config; without a family it is the policy of examples/train_live.py.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from pathlib import Path
from typing import Any

from tests.oracles.vllm_runtime import process  # before vLLM: it sets the environment

# isort: split
import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import destroy_model_parallel, init_distributed_environment, initialize_model_parallel
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

import bridge
from tests.models.decoder_families import build

IDS = torch.randint(3, 90, (24,), generator=torch.Generator().manual_seed(7))


class Server:
    """vLLM's model of one directory."""

    def __init__(self, directory: Path, load_format: str = "safetensors") -> None:
        self.config = EngineArgs(
            model=str(directory), tokenizer=str(directory), dtype="float32", enforce_eager=True,
            max_model_len=len(IDS) + 1, load_format=load_format, skip_tokenizer_init=True,
        ).create_engine_config()  # fmt: skip
        self.config.compilation_config.custom_ops[:] = ["none"]
        with set_current_vllm_config(self.config):
            if not torch.distributed.is_initialized():
                init_distributed_environment(1, 0, f"file://{directory.absolute()}.store", 0, "gloo")
            destroy_model_parallel()  # the group of experts is made for a model that has some, only
            initialize_model_parallel(1, 1)
            self.model = get_model(vllm_config=self.config)

    def update(self, source: Any) -> None:
        """What its engine does with the tensors of one step, each of them checked against metadata."""
        with set_current_vllm_config(self.config), torch.no_grad():
            initialize_layerwise_reload(self.model)
            self.model.load_weights(NCCLTrainerWeightTransferEngine._checked_iter(source, source.metadata))
            finalize_layerwise_reload(self.model, self.config.model_config)

    def logits(self, ids: torch.Tensor = IDS) -> torch.Tensor:
        with torch.no_grad(), set_current_vllm_config(self.config), set_forward_context(None, self.config):
            hidden = self.model(input_ids=ids.reshape(-1), positions=torch.arange(ids.numel()))
            return self.model.compute_logits(hidden).float()


def trained(work: Path, scheme: str) -> dict[str, Any]:
    """The example's policy, whose server is vLLM's model; each step's digest beside that of what `convert` writes."""
    work.mkdir(parents=True)
    equal: list[bool] = []

    class Example(Server):
        def update(self, source: Any) -> None:
            super().update(bridge.live.vllm(source))

    def start(_: Any, source: Any) -> Example:
        for name, content in source.files.items():
            (work / name).write_bytes(content)
        return Example(work, "dummy")

    def check(policy: Any, digest: str) -> None:
        bridge.convert(policy, "vllm", scheme, work / "cold", verify=False, overwrite=True)
        equal.append(digest == bridge.live.digest(work / "cold"))

    train = runpy.run_path("examples/train_live.py")["train"]
    return {"rewards": train(start, scheme, check), "equal": equal}


def answer(work: Path, family: str, fields: dict[str, Any], scheme: str | None) -> dict[str, Any]:
    """Two updates of a server that started with weights of its own, each beside a server that loads the directory."""
    trainer = build(family, torch.float32, **fields)
    source = bridge.tensors(trainer, "vllm", scheme)
    first = work / "first"
    first.mkdir(parents=True)
    for name, content in source.files.items():
        (first / name).write_bytes(content)
    server = Server(first, "dummy")
    reply: dict[str, Any] = {"differs": [], "moved": [], "equal": []}
    for step in range(2):
        with torch.no_grad():
            for tensor in trainer.parameters():
                tensor.mul_(1 + 0.1 * torch.randn(tensor.shape))
        before = server.logits()
        server.update(bridge.live.vllm(source))
        cold = work / f"cold-{step}"
        bridge.convert(trainer, "vllm", scheme, cold, verify=False)
        live, loaded = server.logits(), Server(cold).logits()
        reply["differs"].append(float((live - loaded).abs().max()))
        reply["moved"].append(float((live - before).abs().max()))
        reply["equal"].append(source.digest() == bridge.live.digest(cold))
    return reply


def main() -> None:
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    process.start()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            reply = (answer if "family" in request else trained)(Path(request.pop("work")), **request)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
        lines.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
