"""Make a model smaller in one chain, and draw perplexity, bytes and seconds of each step.

    python examples/shrink.py            # examples/shrunk: four outputs and shrink.svg, some five minutes
    python examples/shrink.py --quick    # a twentieth of the training, on shorter rows

The text is what the models were trained on; perplexity is over 30 windows of 512 tokens of the embedded text.
"""

from __future__ import annotations

import argparse
import math
import re
import tempfile
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch
from train_tiny import HELD_OUT, training_documents

import bridge
from bridge.sources.opening import open_source
from bridge.workflows.chain.result import StepDone

HERE = Path(__file__).resolve().parent
WHOLE = HERE / "models/tiny-llama"
WINDOWS, LONG, QUICK = 30, 512, 20
WIDTH, ROW, LABEL, BAR = 760, 44, 150, 150


@dataclass(frozen=True)
class Measured:
    """One row of the plot."""

    name: str
    perplexity: float
    nbytes: int
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a twentieth of the training")
    parser.add_argument("--out", type=Path, default=HERE / "shrunk", help="folder of the outputs")
    given = parser.parse_args()
    out = given.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    (out / "text.txt").write_text("\n\n".join(training_documents()), encoding="utf-8")
    report = bridge.chain(chain_file(out, QUICK if given.quick else 1))
    print(report)
    rows = [Measured("whole", perplexity(WHOLE), weights(WHOLE), 0.0)]
    rows += [measured(step) for step in report.steps]
    for row in rows:
        print(f"{row.name:8} perplexity {row.perplexity:6.2f}  {row.nbytes / 1e6:5.2f} MB  {row.seconds:6.1f} s")
    (out / "shrink.svg").write_text(drawn(rows), encoding="utf-8")
    print(f"drawn: {out / 'shrink.svg'}")


def chain_file(out: Path, less: int) -> Path:
    """The chain with paths of this machine, and a part of its steps of training."""
    text = (HERE / "shrink.toml").read_text(encoding="utf-8")
    text = re.sub(r"(steps\s*= )(\d+)", lambda found: f"{found[1]}{max(1, int(found[2]) // less)}", text)
    if less > 1:
        text = re.sub(r"(batch\s*= \d+)", r"\1\nsequence = 128", text)
    text = text.replace('"models/', f'"{HERE.as_posix()}/models/').replace('"shrunk/', f'"{out.as_posix()}/')
    path = out / "shrink.toml"
    path.write_text(text.replace('out = "shrunk"', f'out = "{out.as_posix()}"'), encoding="utf-8")
    return path


def measured(step: StepDone) -> Measured:
    """Perplexity of a step's output; of ONNX, that of the codes that it copied."""
    directory = Path(step.report.out)
    read = directory.with_name("coded") if step.report.target == "trt" else directory
    return Measured(step.name, perplexity(read), step.report.bytes, step.seconds)


def weights(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


def perplexity(directory: Path) -> float:
    """Of a model in transformers' layout; codes are decoded first."""
    source: Any = open_source(directory)
    with tempfile.TemporaryDirectory() as name:
        if source.quantized:
            bridge.convert(source, "hf", "none", Path(name) / "decoded", verify=False, progress=False)
            source = open_source(Path(name) / "decoded")
        model, tokenizer = source.load_model().float(), source.load_tokenizer()
    ids = torch.tensor(tokenizer(HELD_OUT.read_text(encoding="utf-8"), verbose=False)["input_ids"])
    total = 0.0
    with torch.no_grad():
        for at in range(0, WINDOWS * LONG, LONG):
            window = ids[at : at + LONG + 1]
            logits = model(input_ids=window[None, :-1]).logits[0]
            total += torch.nn.functional.cross_entropy(logits, window[1:]).item()
    return math.exp(total / WINDOWS)


def drawn(rows: list[Measured]) -> str:
    """One SVG: a line for each step, a bar for each figure, as a part of the largest."""
    columns = (
        ("perplexity", [row.perplexity for row in rows], "{:.1f}"),
        ("weights, MB", [row.nbytes / 1e6 for row in rows], "{:.2f}"),
        ("seconds", [row.seconds for row in rows], "{:.0f}"),
    )
    height = ROW * (len(rows) + 1) + 10
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">']
    parts += [f'<rect width="{WIDTH}" height="{height}" fill="white"/>']
    for at, row in enumerate(rows):
        parts.append(f'<text x="10" y="{ROW * (at + 1) + 26}" font-size="15">{escape(row.name)}</text>')
    for number, (title, values, form) in enumerate(columns):
        left, most = LABEL + number * (BAR + 50), max(values) or 1
        parts.append(f'<text x="{left}" y="26" font-size="15" font-weight="bold">{title}</text>')
        for at, value in enumerate(values):
            y, long = ROW * (at + 1) + 10, BAR * value / most
            parts.append(f'<rect x="{left}" y="{y}" width="{long:.1f}" height="20" fill="#4c78a8"/>')
            parts.append(f'<text x="{left + long + 6:.1f}" y="{y + 15}" font-size="13">{form.format(value)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    main()
