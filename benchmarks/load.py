"""Seconds and bytes of `bridge.load` into a model that two processes share, beside what the programs have for it.

    python benchmarks/load.py --build DIR      a random Llama of 0.5 B in DIR, once; then each way in two processes

Each way fills one `fully_shard` model in bfloat16 from the page cache, with one thread a process: `bridge.load` of the
Hugging Face directory; transformers' `from_pretrained` in every process, then torch's `set_model_state_dict`; torch's
own checkpoint of the same shards. Bytes are those that system calls read (`rchar`); `from_pretrained` maps the whole
file instead. Prints a line a way, of the slower process; `again` is a second load.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
CONFIG = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "tie_word_embeddings": False,
}  # fmt: skip
TINY = Path(__file__).parent.parent / "examples/models/tiny-llama"
WAYS = ("bridge", "from_pretrained", "dcp")


def model(sharded: bool = True) -> Any:
    import torch
    import transformers
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).bfloat16()
    for layer in made.model.layers if sharded else ():
        fully_shard(layer)
    made = fully_shard(made) if sharded else made
    return made.to_empty(device="cpu")


def build(root: Path) -> None:
    """Write the model's checkpoint of transformers, from random values."""
    import torch

    made = model(sharded=False)
    with torch.no_grad():
        for tensor in made.parameters():
            tensor.normal_(0, 0.02)
    made.save_pretrained(root / "hf")


def read_bytes() -> int:
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["rchar"])


def process(rank: int, root: Path, way: str, out: Any) -> None:
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from transformers import AutoModelForCausalLM

    import bridge

    torch.set_num_threads(1)
    store = f"file://{root}/store-{way}"
    torch.distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    made = model()
    bridge.load(AutoModelForCausalLM.from_pretrained(TINY), TINY, workers=1)  # imports are not measured
    if way == "dcp" and not (root / "dcp").exists():
        bridge.load(made, root / "hf")
        dcp.save(made.state_dict(), checkpoint_id=root / "dcp")
    torch.distributed.barrier()
    begun, before = time.perf_counter(), read_bytes()
    if way == "bridge":
        bridge.load(made, root / "hf")
    elif way == "dcp":
        dcp.load(made.state_dict(), checkpoint_id=root / "dcp")
    else:
        import transformers

        transformers.utils.logging.disable_progress_bar()
        whole = transformers.LlamaForCausalLM.from_pretrained(root / "hf", dtype=torch.bfloat16)
        set_model_state_dict(made, whole.state_dict(), options=StateDictOptions(full_state_dict=True))
    seconds, nbytes = time.perf_counter() - begun, read_bytes() - before
    torch.distributed.barrier()
    again = time.perf_counter()
    if way == "bridge":
        bridge.load(made, root / "hf")
    again = time.perf_counter() - again
    out.put((seconds, nbytes, again if way == "bridge" else 0.0))
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, required=True)
    root = parser.parse_args().build
    os.environ["OMP_NUM_THREADS"] = "1"
    if not (root / "hf").exists():
        build(root)
    size = sum(file.stat().st_size for file in (root / "hf").glob("*.safetensors"))
    print(json.dumps({"checkpoint": size}))
    context = multiprocessing.get_context("spawn")
    for way in WAYS:
        (root / f"store-{way}").unlink(missing_ok=True)
        out = context.Queue()
        started = [context.Process(target=process, args=(rank, root, way, out)) for rank in range(2)]
        for one in started:
            one.start()
        results = [out.get(timeout=600) for _ in started]
        for one in started:
            one.join()
        seconds, nbytes, again = (max(values) for values in zip(*results, strict=True))
        print(json.dumps({"way": way, "seconds": round(seconds, 2), "read": nbytes, "again": round(again, 2)}))


if __name__ == "__main__":
    main()
