"""What distillation brings: perplexity of the tiny Llama, pruned to 57 % and trained, and trained through its codes.

    python benchmarks/distill.py pruned     from two cuts: live teacher, stored answers, hidden states
    python benchmarks/distill.py codes      int4_wo and nvfp4 before and after, and as read back from disk

Models train on their own training text and are measured on 30 windows of 512 tokens of the embedded text. Seconds are
of training alone, in one thread.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from prune import HELD_OUT, ROOT, perplexity

import bridge
from bridge.planning.structure import structure_of
from bridge.quant.calibration import Calibration
from bridge.sources.live_models.checkpoint_names import live_names, tied_names
from bridge.sources.opening import open_source
from bridge.verification.simulated.inputs import FakeInputs, input_codes

LLAMA = ROOT / "examples/models/tiny-llama"
KEEP: dict[str, int | str] = {"ffn": 192, "heads": 4, "layers": 4}
SHORT: dict[str, Any] = {"steps": 80, "batch": 2, "sequence": 512, "lr": 2e-3, "eval_every": 40}
LONG = SHORT | {"steps": 400, "batch": 4, "eval_every": 100}


def pruned(folder: Path, text: Path, measure: Callable[[Any], float]) -> None:
    """Print perplexity and seconds of each way to train a smaller model."""
    minitron = bridge.pruned(LLAMA, KEEP, data=text, importance="minitron", progress=False)
    repaired = bridge.pruned(LLAMA, KEEP, data=text, repair=True, progress=False)
    print(f"minitron {measure(minitron.load_model()):.2f}; repaired {measure(repaired.load_model()):.2f}", flush=True)
    ways: dict[str, tuple[Any, dict[str, Any]]] = {
        "KL": (minitron, SHORT | {"pairs": None}),
        "KL, T = 2": (minitron, SHORT | {"pairs": None, "temperature": 2.0}),
        "KL and last hidden states": (minitron, SHORT),
        "64 stored answers": (minitron, SHORT | {"top_k": 64, "teacher_cache": folder / "64"}),
        "repaired, KL and hidden": (repaired, SHORT),
        "repaired, 400 steps of 2048": (repaired, LONG),
    }
    for name, (student, how) in ways.items():
        report = bridge.distill(student, LLAMA, text, folder / "out", overwrite=True, progress=False, **how)
        told = report.distillation
        assert told
        model = open_source(folder / "out").load_model()
        print(f"{name:28} {measure(model):6.2f} {told.seconds:6.0f} s, teacher {told.teacher_share:.0%}", flush=True)


def codes(folder: Path, text: Path, measure: Callable[[Any], float]) -> None:
    """Print perplexities of quantized models, before and after training, from their files."""
    for scheme in ("int4_wo", "nvfp4"):
        bridge.convert(LLAMA, "hf", scheme, folder / "plain", data=text, overwrite=True, progress=False)
        before = measure(read_back(folder / "plain", scheme, folder))
        how = SHORT | {"lr": 3e-4, "pairs": None}
        report = bridge.distill(LLAMA, LLAMA, text, folder / "out", quant=scheme, overwrite=True, progress=False, **how)
        told, after = report.distillation, measure(read_back(folder / "out", scheme, folder))
        assert told
        print(f"{scheme:8} {before:.3f} -> {after:.3f}, {told.seconds:.0f} s", flush=True)


def read_back(directory: Path, scheme: str, folder: Path) -> Any:
    """The model that the files hold, with the inputs of its matrices quantized."""
    bridge.convert(directory, "hf", "none", folder / "read", overwrite=True, verify=False, progress=False)
    model = open_source(folder / "read").load_model()
    saved = directory / "bridge/calibration.safetensors"
    if saved.is_file():
        source = open_source(LLAMA)
        plan, structure = bridge.plan(source, "hf", scheme), structure_of(source)
        origins = live_names(model, source.specs)
        FakeInputs(model, input_codes(plan, Calibration.load(saved), structure, origins, tied_names(model)))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pruned", "codes"))
    torch.set_num_threads(1)
    sys.path.insert(0, str(ROOT / "examples"))
    from train_tiny import training_documents

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "training.txt"
        text.write_text("\n\n".join(training_documents()), encoding="utf-8")
        ids = open_source(LLAMA).load_tokenizer()(HELD_OUT.read_text(encoding="utf-8"), verbose=False)["input_ids"]
        tokens = torch.tensor(ids)
        (pruned if parser.parse_args().what == "pruned" else codes)(folder, text, lambda m: perplexity(m, tokens))


if __name__ == "__main__":
    main()
