"""Tokens a second of target `ort` in onnxruntime-genai, beside the output of onnxruntime-genai's own builder.

    python -m benchmarks.ort                                   # the tiny Llama
    python -m benchmarks.ort --shape 1b --tokens 24 --rounds 3 # random weights of Llama 3.2 1B's shape (5 GB of disk)

First it tells the seconds and the peak of memory of making each output, in a process of its own. Then each round times
every directory once, in turn, so that a busy machine slows all alike; medians of the rounds and of their ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checkpoint import run, size

TINY = Path(__file__).parents[1] / "examples" / "models" / "tiny-llama"
LLAMA_1B: dict[str, Any] = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip
INT4_ONLY = ("builder-128", "ort-exact")  # the builder's own blocks are of 32, ours of 128
NAMES = ("builder", "trt", "ort", *INT4_ONLY)
INT4 = """base = "int4_wo"
[[rule]]
roles = ["head.weight"]
quant = "int4_wo"
override = true
"""


def main() -> None:
    """Print tokens a second of each output, and ours over the builder's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=("tiny", "1b"), default="tiny")
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processor-time", action="store_true", help="tokens per second of it: robust to other work")
    parser.add_argument("--precisions", nargs="+", choices=("fp32", "int4"), default=("fp32", "int4"))
    parser.add_argument("--outputs", nargs="+", choices=NAMES, default=NAMES)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        source = TINY if given.shape == "tiny" else random_llama(root / "source")
        for precision in given.precisions:
            outputs = written(source, root, precision, given.outputs)
            for directory in outputs.values():
                fix_threads(directory, given.threads)
            print_row(precision, outputs, given)


def random_llama(path: Path) -> Path:
    """A directory with random weights of the 1 B shape and the tiny Llama's tokenizer."""
    import shutil

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**LLAMA_1B, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    LlamaForCausalLM(config).save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, path)
    return path


def written(source: Path, root: Path, precision: str, names: Sequence[str]) -> dict[str, Path]:
    """Name -> directory, with the head quantized too, as the builder does it."""
    recipe = root / "int4.toml"
    recipe.write_text(INT4)
    scheme = {"fp32": "none", "int4": str(recipe)}[precision]
    outputs = {name: root / f"{name}-{precision}" for name in names if name not in INT4_ONLY or precision == "int4"}
    for name, directory in outputs.items():
        if name.startswith("builder"):
            command = ["onnxruntime_genai.models.builder", "-m", source, "-o", directory, "-p", precision]
            command += ["-e", "cpu", "-c", root / "cache"]
            command += ["--extra_options", "block_size=128"] if name == "builder-128" else []
        else:
            command = ["bridge", "convert", source, "--target", name.partition("-")[0], "--quant", scheme]
            command += ["--out", directory, "--no-verify", "-q", *(["--exact"] if name == "ort-exact" else [])]
        seconds, resident, own = run([sys.executable, "-m", *map(str, command)])
        print(
            f"{precision}  {name:11} made in {seconds:.1f} s, {own:.2f} GB of memory of its own at most, "
            f"{resident:.2f} GB with the files it reads; {size(directory):.2f} GB on disk",
            flush=True,
        )
    return outputs


def fix_threads(directory: Path, threads: int) -> None:
    """Give every session the same number of threads."""
    path = directory / "genai_config.json"
    content = json.loads(path.read_text())
    options = content["model"]["decoder"]["session_options"]
    options |= {"intra_op_num_threads": threads, "inter_op_num_threads": 1}
    path.write_text(json.dumps(content))


def print_row(precision: str, outputs: dict[str, Path], given: argparse.Namespace) -> None:
    """Time every output in turn, `rounds` times."""
    import onnxruntime_genai as og

    clock = time.process_time if given.processor_time else time.perf_counter
    models = {name: og.Model(str(directory)) for name, directory in outputs.items()}
    rates: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(given.rounds):
        for name, model in models.items():
            rates[name].append(rate(model, given.prompt, given.tokens, clock))
    for name, values in rates.items():
        if "builder" not in rates:
            print(f"{precision}  {name:11} {statistics.median(values):9.1f} tokens/s", flush=True)
            continue
        share = statistics.median(ours / theirs for ours, theirs in zip(values, rates["builder"], strict=True))
        typical = statistics.median(values)
        print(f"{precision}  {name:11} {typical:9.1f} tokens/s  {share:.2f} of the builder's", flush=True)


def rate(model: Any, prompt: int, tokens: int, clock: Callable[[], float]) -> float:
    """Tokens a second of greedy decoding after a prompt, whose time does not count."""
    import onnxruntime_genai as og

    params = og.GeneratorParams(model)
    params.set_search_options(max_length=prompt + tokens + 1, min_length=prompt + tokens + 1, do_sample=False)
    generator = og.Generator(model, params)
    generator.append_tokens(np.arange(5, 5 + prompt, dtype=np.int32))
    generator.generate_next_token()
    begin = clock()
    for _ in range(tokens):
        generator.generate_next_token()
    return tokens / (clock() - begin)


if __name__ == "__main__":
    main()
