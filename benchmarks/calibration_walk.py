"""Peak memory and processor seconds of a calibration: the whole model against block by block.

    python benchmarks/calibration_walk.py 1b          random Llama of 1.24 B, both ways, and whether the bytes are equal
    python benchmarks/calibration_walk.py 70b 405b    two layers of that shape from a file of holes, block by block
    python benchmarks/calibration_walk.py wide --rows 256 --files    activations larger than the model, in files
    python benchmarks/calibration_walk.py deepseek    a dense layer and one of 256 experts, which are read one by one

Every run is a process of its own. Memory is the peak of the resident set above what the imports took. Data are 4 rows
of 128 tokens in batches of 2, one batch held out, or `--rows`. `--files`: all activations between blocks go to files.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bridge.core.text import size
from tests.models.sparse_checkpoint import (
    DEEPSEEK_V3,
    LLAMA_405B,
    deepseek_specs,
    fill_rows,
    llama_specs,
    write_sparse,
)

# fmt: off
SHAPES: dict[str, dict[str, int]] = {
    "70b": {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 2},
    "405b": {"num_hidden_layers": 2},
    "wide": {
        "hidden_size": 8192, "intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1,
        "num_hidden_layers": 3, "vocab_size": 1024,
    },
}
DEEPSEEK = DEEPSEEK_V3 | {"num_hidden_layers": 2, "first_k_dense_replace": 1}
WORDS = 1024  # ids that occur: their embeddings are no hole, so that tokens have experts of their own
SMALL = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_hidden_layers": 16, "head_dim": 64,
    "tie_word_embeddings": True,
}
# fmt: on


def measure(model: str, scheme: str, kv: str | None, way: str, rows: int, files: bool) -> None:
    """Calibrate in this process, and print the figures as JSON."""
    import resource
    import time

    import torch

    from bridge.calibration.data import prepare
    from bridge.calibration.job import CalibrationJob
    from bridge.calibration.modelopt import fake_quantize, import_frameworks
    from bridge.calibration.walk.budget import Room, calibration_need, tokens_of
    from bridge.calibration.walk.options import Options
    from bridge.calibration.walk.run import calibrate_by_blocks
    from bridge.calibration.walk.states import spill_to
    from bridge.planning.structure import structure_of
    from bridge.quant.schemes.load import load_scheme
    from bridge.sources.opening import open_source

    import_frameworks(with_modelopt=True)
    source = open_source(model)
    structure = structure_of(source)
    bound = load_scheme(scheme, kv=kv).bound(structure.sites)
    random = torch.Generator().manual_seed(1)
    words = min(source.config["vocab_size"], WORDS)
    batches = [torch.randint(0, words, (2, 128), generator=random) for _ in range(rows // 2 + 1)]
    data = prepare([{"input_ids": ids} for ids in batches], source)
    import transformers.models.deepseek_v3.modeling_deepseek_v3
    import transformers.models.llama.modeling_llama  # noqa: F401

    found = calibration_need(source.specs, source.config, bound, tokens_of(data))
    base = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    found = calibration_need(source.specs, source.config, bound, tokens_of(data))
    spill = spill_to(None, 0, found.states) if files else None
    job = CalibrationJob(source, structure, bound, data)
    start = time.process_time()
    if way == "whole":
        calibration = fake_quantize(job).calibration
    else:
        room = Room(found.experts.nbytes, found.blocks.in_files) if way == "experts" else None
        options = Options(spill=spill, room=room)
        calibration = calibrate_by_blocks(job, options)
    seconds = time.process_time() - start
    # getrusage counts the parent's memory, too: the peak is kept over exec
    status = Path("/proc/self/status").read_text()
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024 - base
    least = {"whole": found.whole, "blocks": found.blocks.in_files, "experts": found.experts.in_files}
    held = {"whole": found.whole, "blocks": found.blocks.held, "experts": found.experts.held}
    told = least[way] if files else held[way]
    figures = {
        "peak": peak,
        "seconds": seconds,
        "digest": calibration.digest,
        "told": told,
        "block": (found.experts if way == "experts" else found.blocks).nbytes,
        "states": found.states,
        "experts": sum(int((counts > 0).sum()) for counts in calibration.expert_tokens.values()),
    }
    print(json.dumps(figures))


def run(model: Path, scheme: str, kv: str | None, way: str, rows: int, files: bool) -> dict[str, Any]:
    """Measure in a process of its own."""
    command = [sys.executable, __file__, "--child", str(model), scheme, kv or "", way, str(rows), str(int(files))]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    figures: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    kind = f"{scheme}{' + kv' if kv else ''}"
    held = f"{size(figures['states'])}{' in files' if files else ''}"
    print(
        f"{model.name:6} {kind:14} {way:6} peak {size(figures['peak']):>8}  largest block {size(figures['block'])}, "
        f"activations {held}, told {size(figures['told']):>8}  {figures['seconds']:.0f} s of the processor"
        + (f", {figures['experts']} experts ran" if figures["experts"] else ""),
        flush=True,
    )
    return figures


def random_llama(root: Path) -> Path:
    """A random model of 1.24 B parameters in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**LLAMA_405B | SMALL)
    model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(root)
    return root


def sparse_deepseek(root: Path, vocabulary: int) -> Path:
    """Two layers of DeepSeek-V3 whose experts are holes; norms, router and the embeddings of some words are not."""
    import ml_dtypes
    import numpy as np

    config = DEEPSEEK | {"vocab_size": vocabulary}
    write_sparse(root, config, deepseek_specs(config))
    random = np.random.default_rng(0)
    hidden, experts = DEEPSEEK["hidden_size"], DEEPSEEK["n_routed_experts"]
    for spec in deepseek_specs(config):
        if "norm" in spec.name:
            fill_rows(root, spec.name, np.ones(spec.shape, ml_dtypes.bfloat16))
    words = random.standard_normal((WORDS, hidden))
    fill_rows(root, "model.embed_tokens.weight", words.astype(ml_dtypes.bfloat16))
    router = random.standard_normal((experts, hidden)) / hidden**0.5
    fill_rows(root, "model.layers.1.mlp.gate.weight", router.astype(ml_dtypes.bfloat16))
    return root


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=["1b", "deepseek", *SHAPES], default=["1b"])
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=DEEPSEEK["vocab_size"], help="of the model deepseek")
    parser.add_argument("--schemes", nargs="+", default=["fp8+fp8"])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--files", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for name in arguments.models:
            root = Path(folder) / name
            if name == "1b":
                random_llama(root)
            elif name == "deepseek":
                sparse_deepseek(root, arguments.vocabulary)
            else:
                config = LLAMA_405B | SHAPES[name]
                write_sparse(root, config, llama_specs(config))
            for word in arguments.schemes:
                scheme, _, kv = word.partition("+")
                ways = {"1b": ("whole", "blocks"), "deepseek": ("experts",)}.get(name, ("blocks",))
                rows, files = arguments.rows, arguments.files
                digests = {run(root, scheme, kv or None, way, rows, files)["digest"] for way in ways}
                if name == "1b":
                    print("the same bytes" if len(digests) == 1 else "DIFFERENT BYTES")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        measure(sys.argv[2], sys.argv[3], sys.argv[4] or None, sys.argv[5], int(sys.argv[6]), sys.argv[7] == "1")
    else:
        main()
