"""Convert the tiny trained Llama to ONNX in FP8, measure it, and let the written file speak.

make demo
python examples/demo.py [--quant int4_awq] [--kv fp8]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

import bridge
from bridge.targets.onnx.run.runtime import Runtime

MODEL = Path(__file__).parent / "models" / "tiny-llama"
PROMPTS = ("The value of the expression is", "This function returns the", "If the argument is a string,")
TOKENS = 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quant", default="fp8", help="a scheme: qbridge show schemes")
    parser.add_argument("--kv", help="fp8 or int8: the KV cache")
    parser.add_argument("--out", type=Path, help="keep what is written in this directory")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out = given.out or Path(scratch) / f"tiny-llama-{given.quant}"
        convert(given.quant, given.kv, out)
        generate(out)


def convert(quant: str, kv: str | None, out: Path) -> None:
    """One call converts, verifies and measures; the report prints itself as a table."""
    with Progress(transient=True) as bars:
        tasks: dict[str, int] = {}

        def progress(done: int, total: int, text: str) -> None:
            if text not in tasks:
                tasks[text] = bars.add_task(text, total=None)
            bars.update(tasks[text], completed=done, total=total or None)

        report = bridge.convert(MODEL, target="trt", quant=quant, kv=kv, out=out, progress=progress)
    Console(markup=False, highlight=False).print(report)


def generate(out: Path) -> None:
    """Greedy decoding, token by token through the KV cache inputs of the converted file."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(out)
    runtime = Runtime(out)
    print(f"\ntext from {out.name}/model.onnx in ONNX Runtime:")
    for prompt in PROMPTS:
        ids = np.array([tokenizer(prompt)["input_ids"]])
        print(f"  {prompt!r} -> {tokenizer.decode(runtime.generate(ids, max_new_tokens=TOKENS)[0])!r}")


if __name__ == "__main__":
    main()
