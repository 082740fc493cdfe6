"""Seconds of a step in which a trainer's weights reach a server, by scheme, beside other ways to hand them over.

    python benchmarks/live.py --processes 2      # a Llama of 1.1 B random bfloat16 parameters, in shards of FSDP2
    python benchmarks/live.py --processes 1      # the same model, whole
    python benchmarks/live.py --layers 4         # a smaller one

Each way runs in new processes with one thread each, on a CPU, over gloo. `first` is the first step with what it
imports, `step` the second, of the slower process, and `processor` its processor seconds. `received` are bytes that a
process got from others in a step; `memory` is by how much it grew at most; `plans` are plans and imports of the second
step. Tensors are dropped as they come. Ways beside ours: `gather`, `full_tensor` of every parameter; `megatron-bridge`,
`export_hf_weights` of Megatron-Bridge in bfloat16, from a GPTModel whose matrices the processes share.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
SIZES = {
    "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": False,
}  # fmt: skip
SCHEMES = ("none", "fp8_pc_pt", "fp8_block", "nvfp4_wo", "int4:rtn")
WAYS = (*SCHEMES, "gather", "megatron-bridge")
ROUNDS = 2
Step = Callable[[], Iterator[tuple[str, Any]]]


def resident() -> int:
    """Bytes of this process that are no file's pages."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("RssAnon", "RssShmem")))


class Peak:
    """The most bytes that this process had, looked at every 5 ms."""

    def __init__(self) -> None:
        self.before = self.most = resident()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._end.wait(0.005):
            self.most = max(self.most, resident())

    def end(self) -> int:
        self._end.set()
        self._thread.join()
        return self.most - self.before


def llama(layers: int) -> Any:
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | {"num_hidden_layers": layers}))


def trained(layers: int, ranks: int) -> Any:
    """The model of a trainer, in shards if it has several ranks."""
    import torch
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = llama(layers).bfloat16()
    if ranks > 1:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in model.parameters():
            local = tensor.to_local() if ranks > 1 else tensor
            local.normal_(0, 0.02)
        for _, tensor in model.named_buffers():
            tensor.fill_(1.0)
    return model


def whole(tensor: Any, received: list[int]) -> Any:
    """All of a parameter; what came from others is counted."""
    if not hasattr(tensor, "full_tensor"):
        return tensor.detach().clone()
    full = tensor.full_tensor()
    received[0] += full.nbytes - tensor.to_local().nbytes
    return full.detach()


def gathering(model: Any, received: list[int]) -> Step:
    def step() -> Iterator[tuple[str, Any]]:
        for name, tensor in model.named_parameters():
            yield name, whole(tensor, received)

    return step


def exporting(layers: int, ranks: int, store: Path, rank: int, received: list[int]) -> Step:
    """Megatron-Bridge's own export of a GPTModel whose matrices the ranks share (TP)."""
    import torch
    import transformers

    from tests.oracles import megatron_bridge_process, megatron_process

    megatron_process.start(rank, ranks, 1, str(store))
    importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")  # it asks for Transformer Engine: first truly
    megatron_bridge_process.stand_in("transformer_engine")
    from megatron.bridge import AutoBridge
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = transformers.LlamaConfig(**SIZES | {"num_hidden_layers": layers}, architectures=["LlamaForCausalLM"])
    gpt = TransformerConfig(
        num_layers=layers, hidden_size=SIZES["hidden_size"], ffn_hidden_size=SIZES["intermediate_size"],
        num_attention_heads=SIZES["num_attention_heads"], num_query_groups=SIZES["num_key_value_heads"],
        kv_channels=SIZES["head_dim"], normalization="RMSNorm", gated_linear_unit=True, add_bias_linear=False,
        activation_func=torch.nn.functional.silu, tensor_model_parallel_size=ranks, params_dtype=torch.bfloat16,
        bf16=True, **megatron_process.UNFUSED,
    )  # fmt: skip
    model = GPTModel(
        gpt, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=SIZES["vocab_size"], max_sequence_length=64,
        position_embedding_type="rope", share_embeddings_and_output_weights=False, parallel_output=False,
    ).bfloat16()  # fmt: skip
    auto = AutoBridge.from_hf_config(config)
    with torch.device("meta"):
        config.state = Names([*llama(layers).state_dict()])
    gather = torch.distributed.all_gather

    def counted(parts: Any, own: Any, *rest: Any, **named: Any) -> Any:
        received[0] += sum(part.nbytes for part in parts) - own.nbytes
        return gather(parts, own, *rest, **named)

    torch.distributed.all_gather = counted
    return lambda: iter(auto.export_hf_weights([model], cpu=True, show_progress=False))


def stepping(way: str, layers: int, ranks: int, rank: int, root: Path) -> tuple[Step, Callable[[], int]]:
    """A way's step, and the bytes that this process got so far."""
    import torch

    received = [0]
    if way == "megatron-bridge":
        return exporting(layers, ranks, root / "store", rank, received), lambda: received[0]
    torch.distributed.init_process_group("gloo", init_method=f"file://{root}/store", rank=rank, world_size=ranks)
    model = trained(layers, ranks)
    if way == "gather":
        return gathering(model, received), lambda: received[0]
    import bridge

    source = bridge.tensors(model, "vllm", None if way == "none" else way)
    return source.__iter__, lambda: source.received


def planned() -> list[int]:
    """A count of the plans that are made from now on."""
    from bridge.planning import make

    plans, make_plan = [0], make.make_plan

    def counted(*args: Any, **named: Any) -> Any:
        plans[0] += 1
        return make_plan(*args, **named)

    make.make_plan = counted
    return plans


def process(rank: int, ranks: int, way: str, layers: int, root: Path, out: Any) -> None:
    warnings.simplefilter("ignore")
    os.environ["LOCAL_RANK"] = str(rank)
    import torch

    torch.set_num_threads(1)
    try:
        step, received = stepping(way, layers, ranks, rank, root)
        plans, modules, seconds, made = planned(), len(sys.modules), list[float](), 0
        got, processor, peak = 0, 0.0, Peak()
        for _ in range(ROUNDS):
            torch.distributed.barrier()
            plans[0], modules, got = 0, len(sys.modules), received()
            begun, processor, made = time.perf_counter(), time.process_time(), 0
            for _, tensor in step():
                made += tensor.nbytes
            seconds.append(time.perf_counter() - begun)
            processor = time.process_time() - processor
        again = plans[0] + len(sys.modules) - modules
        out.put({
            "first": round(seconds[0], 2), "step": round(seconds[1], 2), "processor": round(processor, 2),
            "received": received() - got, "made": made, "memory": peak.end(), "plans": again,
        })  # fmt: skip
        torch.distributed.barrier()
    except Exception as error:
        out.put({"error": f"{type(error).__name__}: {error}"[:300]})
    out.close()
    out.join_thread()
    os._exit(0)  # a group that lost a rank would wait for it


class Names(dict[str, Any]):
    """Stands for the checkpoint that Megatron-Bridge asks for the order of names."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(dict.fromkeys(names))
        self.source = self

    def get_all_keys(self) -> list[str]:
        return [*self]


def measured(way: str, ranks: int, layers: int) -> dict[str, Any]:
    """The figures of a way: of the process that has the largest."""
    context = multiprocessing.get_context("spawn")
    out = context.Queue()
    with tempfile.TemporaryDirectory() as root:
        started = [
            context.Process(target=process, args=(rank, ranks, way, layers, Path(root), out)) for rank in range(ranks)
        ]
        for one in started:
            one.start()
        results = [out.get(timeout=900) for _ in started]
        for one in started:
            one.join()
    if errors := [result for result in results if "error" in result]:
        return {"way": way, "processes": ranks, **errors[0]}
    return {"way": way, "processes": ranks} | {key: max(result[key] for result in results) for key in results[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--layers", type=int, default=SIZES["num_hidden_layers"])
    parser.add_argument("--ways", nargs="*", default=WAYS)
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    for way in given.ways:
        print(json.dumps(measured(way, given.processes, given.layers)), flush=True)


if __name__ == "__main__":
    main()
