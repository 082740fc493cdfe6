"""Generate text with Tripy: convert a model for it, compile the ready module, and let it continue a sentence.

python examples/tripy_generate.py --input-text "This function returns" --quant-mode int8-weight-only --seed 0

Needs nvtripy and an NVIDIA GPU. `--model` is a checkpoint, a hub id, or a directory that target tripy wrote already.
Like Tripy's nanoGPT example it keeps no cache of keys and values: every token costs a run over the whole text.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

import bridge
from bridge.core.errors import BridgeError
from bridge.targets.tripy import build
from bridge.targets.tripy.frontend import nvtripy
from bridge.targets.tripy.models.build import READY

MODEL = Path(__file__).parent / "models" / "tiny-gpt2"
MODES = ("none", "int8-weight-only", "int4-weight-only", "float8")
TEMPERATURE, CANDIDATES = 0.8, 5  # as in Tripy's nanoGPT example


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=str(MODEL), help="a checkpoint, a hub id, or what target tripy wrote")
    parser.add_argument("--quant-mode", choices=MODES, default="none", help="no effect on what is written already")
    parser.add_argument("--dtype", choices=("fp16", "bf16", "fp32"), default="fp16", help="of the Tripy module")
    parser.add_argument("--input-text", required=True, help="what to continue")
    parser.add_argument("--max-new-tokens", type=int, default=10)
    parser.add_argument("--seed", type=int, help="the same text for the same seed")
    given = parser.parse_args(arguments)
    nvtripy()  # says what is missing before a model is converted
    try:
        tokenizer, tokens = prompt(given.model, given.input_text, given.max_new_tokens)
    except (OSError, ValueError) as error:  # transformers', too: no such model, no tokenizer
        parser.error(str(error))
    with tempfile.TemporaryDirectory() as scratch:
        module = build(written(given.model, given.quant_mode, given.dtype, Path(scratch) / "tripy"))
        print(tokenizer.decode(generate(module, tokens, given.max_new_tokens, given.seed)[0]))


def prompt(model: str, text: str, count: int) -> tuple[Any, torch.Tensor]:
    """The tokenizer and the tokens to continue; ValueError where `model` cannot continue them, before it is read."""
    config = AutoConfig.from_pretrained(model)
    architecture = (config.architectures or ["none"])[0]
    if architecture not in READY or not architecture.endswith(("ForCausalLM", "LMHeadModel")):
        raise ValueError(f"{model}: no ready Tripy module that writes text for {architecture}")
    tokenizer = AutoTokenizer.from_pretrained(model)
    if not tokenizer.vocab_size:  # transformers makes an empty one where there is none
        raise ValueError(f"{model}: no tokenizer beside the weights")
    tokens = tokenizer(text, return_tensors="pt")["input_ids"].to(torch.int32)
    length, limit = tokens.shape[1], config.max_position_embeddings
    if not length or count < 1:
        raise ValueError(f"{length} tokens to continue and {count} new ones: at least one of each is needed")
    if length + count > limit:
        raise ValueError(f"{length} + {count} tokens; the model has {limit} positions")
    return tokenizer, tokens


def written(model: str, quant_mode: str, dtype: str, out: Path) -> Path:
    """The directory to load: `model` itself if target tripy wrote it, else what it is converted to."""
    config = Path(model) / "config.json"
    if config.exists() and "tripy" in json.loads(config.read_text()):
        return Path(model)
    quant = None if quant_mode == "none" else quant_mode
    bridge.convert(model, target="tripy", quant=quant, out=out, dtype=dtype)
    return out


def generate(module: Any, tokens: torch.Tensor, count: int, seed: int | None) -> torch.Tensor:
    """Append `count` tokens, each drawn from the likeliest few; the module is compiled once for all lengths."""
    tp = nvtripy()
    length = tokens.shape[1]
    run = tp.compile(module, args=[tp.InputInfo((1, (1, length, length + count)), dtype=tp.int32)])
    generator = torch.Generator()
    generator.seed() if seed is None else generator.manual_seed(seed)
    for _ in range(count):
        logits = run(tp.copy(tp.Tensor(tokens), tp.device("gpu")))
        last = torch.from_dlpack(tp.copy(logits, tp.device("cpu")))[:, -1].float()
        likeliest, candidates = torch.topk(last / TEMPERATURE, CANDIDATES)
        drawn = torch.multinomial(likeliest.softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, candidates.gather(1, drawn).to(torch.int32)], dim=1)
    return tokens


if __name__ == "__main__":
    try:
        main()
    except BridgeError as error:
        sys.exit(str(error))
