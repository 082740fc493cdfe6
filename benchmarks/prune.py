"""What pruning costs: perplexity of the tiny models by what is kept, memory and seconds on the shape of a 70 B Llama.

    python benchmarks/prune.py examples    both tiny models: cuts, importances, repair and chance
    python benchmarks/prune.py sparse      both tiny models with 2:4 zeros, and ModelOpt's SparseGPT
    python benchmarks/prune.py 70b         two layers of that shape from a file of holes beside cp, and a plan of all 80

`examples` and `sparse` score on what the models were trained on, and measure on 30 windows of 512 tokens of the
embedded text.
`70b` times whole processes, in turn; `start-up` is the same command on the tiny Llama. Memory is anonymous.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from checkpoint import run, size

import bridge
from bridge.sources.opening import open_source
from bridge.sources.pruned.opening import plan_cut
from bridge.sources.pruned.sparse import METHODS
from tests.models.sparse_checkpoint import LLAMA_405B, llama_specs, write_sparse

ROOT = Path(__file__).resolve().parent.parent
HELD_OUT = ROOT / "bridge/calibration/default_text.txt"
WINDOWS, LONG, CHOICES = 30, 512, 3
IMPORTANCES = ("output", "minitron", "weights")
# fmt: off
LLAMA_70B = LLAMA_405B | {
    "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 2,
}
CUT = {"ffn": "75%", "heads": "75%"}
# In numbers: of widths this small, a share that is rounded to a multiple of 64 is another share.
CUTS: Mapping[str, list[dict[str, int | str]]] = {
    "tiny-llama": [
        {"ffn": 288}, {"ffn": 192}, {"ffn": 96}, {"heads": 4}, {"kv_heads": 1}, {"layers": 4}, {"hidden": 96},
    ],
    # no field of its config is the width of a head, so that hidden and heads are cut together
    "tiny-gpt2": [{"ffn": 384}, {"ffn": 256}, {"ffn": 128}, {"layers": 3}, {"hidden": 96, "heads": 3}],
}
# fmt: on


def perplexity(model: Any, tokens: Any) -> float:
    """Perplexity a token over windows that do not overlap."""
    import torch

    losses = []
    with torch.no_grad():
        for at in range(0, WINDOWS * LONG, LONG):
            window = tokens[at : at + LONG + 1]
            logits = model(input_ids=window[None, :-1]).logits[0]
            losses.append(torch.nn.functional.cross_entropy(logits, window[1:]).item())
    return math.exp(statistics.fmean(losses))


def examples(folder: Path) -> None:
    """Print a table of perplexities for each tiny model."""
    import torch

    sys.path.insert(0, str(ROOT / "examples"))
    from train_tiny import training_documents

    text = folder / "training.txt"
    text.write_text("\n\n".join(training_documents()), encoding="utf-8")
    for name, cuts in CUTS.items():
        source = open_source(ROOT / "examples/models" / name)
        ids = source.load_tokenizer()(HELD_OUT.read_text(encoding="utf-8"), verbose=False)["input_ids"]
        tokens = torch.tensor(ids)
        print(f"{name}: whole {perplexity(source.load_model(), tokens):.2f}")
        print(f"{'':24}" + "".join(f"{way:>20}" for way in ("output", "minitron", "weights", "chance (3)")))
        for keep in cuts:
            figures = [measured(source, keep, tokens, text, importance) for importance in IMPORTANCES]
            label = " ".join(f"{dim} {kept}" for dim, kept in keep.items())
            print(f"{label:24}" + "".join(f"{f:>20}" for f in [*figures, chance(source, keep, tokens)]), flush=True)


def measured(source: Any, keep: dict[str, int | str], tokens: Any, text: Path, importance: str) -> str:
    """The perplexity of a cut, and after `/` that of the repaired one; empty where either does not apply."""
    run_alone = {"hidden", "layers"} & {*keep}
    if importance == "weights":
        if run_alone:
            return ""
        return f"{perplexity(bridge.pruned(source, keep, importance=importance).load_model(), tokens):.2f}"
    found = []
    for repair in (False,) if run_alone else (False, True):
        smaller = bridge.pruned(source, keep, data=text, importance=importance, repair=repair, progress=False)
        found.append(f"{perplexity(smaller.load_model(), tokens):.2f}")
    return " / ".join(found)


def chance(source: Any, keep: dict[str, int | str], tokens: Any) -> str:
    """The mean perplexity of three random choices."""
    import numpy as np

    cut, random = plan_cut(source, keep, None), np.random.default_rng(0)
    dims = {"heads" if dim == "kv_heads" else dim for dim in cut.dims}
    figures = []
    for _ in range(CHOICES):
        scores = {
            dim: {
                (None if dim in ("hidden", "layers") else layer, None): random.random(cut.before[dim])
                for layer in range(cut.before["layers"])
            }
            for dim in dims
        }
        figures.append(perplexity(cut.pruned(scores).load_model(), tokens))
    return f"{statistics.fmean(figures):.2f}"


def sparse(folder: Path) -> None:
    """Print the perplexities of both tiny models by how zeros are chosen."""
    import torch

    sys.path.insert(0, str(ROOT / "examples"))
    from train_tiny import training_documents

    text = folder / "training.txt"
    text.write_text("\n\n".join(training_documents()), encoding="utf-8")
    for name in CUTS:
        source = open_source(ROOT / "examples/models" / name)
        ids = source.load_tokenizer()(HELD_OUT.read_text(encoding="utf-8"), verbose=False)["input_ids"]
        tokens = torch.tensor(ids)
        print(f"{name}: whole {perplexity(source.load_model(), tokens):.2f}")
        for method in METHODS:
            made = bridge.pruned(source, sparse="2:4", sparse_method=method, data=text, progress=False)
            live = made.load_model()
            print(f"{method:24}{perplexity(live, tokens):.2f}", flush=True)
            if method == "sparsegpt":  # ModelOpt takes its zeros, and no weight makes up for them
                whole = source.load_model()
                with torch.no_grad():
                    for weight in made.sparse.axes if made.sparse else ():
                        whole.get_parameter(weight).mul_(live.get_parameter(weight) != 0)
                print(f"{'  its zeros alone':24}{perplexity(whole, tokens):.2f}", flush=True)


PLAN = """
import sys, time, bridge
from pathlib import Path
bridge.plan(sys.argv[1], "hf", keep={"ffn": 256})  # what is imported on the way
read = lambda: int(Path("/proc/self/io").read_text().split()[1])
before, start = read(), time.perf_counter()
plan = bridge.plan(sys.argv[2], "hf", keep={"ffn": "75%", "heads": "75%", "layers": 64})
print(f"{time.perf_counter() - start:.2f} s, {(read() - before) / 1e6:.2f} MB read, {len(plan.steps)} steps")
"""


def large(folder: Path, rounds: int) -> None:
    """Print the figures of the shape of 70 B."""
    tiny, out, copy = str(ROOT / "examples/models/tiny-llama"), folder / "out", folder / "copy"
    for layers in (LLAMA_70B["num_hidden_layers"], 80):
        config = LLAMA_70B | {"num_hidden_layers": layers}
        write_sparse(folder / str(layers), config, llama_specs(config))
    model = str(folder / str(LLAMA_70B["num_hidden_layers"]))
    start, _, least = run(pruning(tiny, out))
    print(f"start-up (tiny model): {start:.2f} s, {least * 1000:.0f} MB")
    for _ in range(rounds):
        wall, _, most = timed(pruning(model, out), out)
        kept = size(out)
        shutil.rmtree(out)
        base, _, _ = timed(["cp", "-r", "--sparse=never", model, str(copy)], copy)
        print(
            f"prune {wall:.1f} s, {most * 1000:.0f} MB, {(most - least) * 1000:.0f} MB above start-up, {kept:.2f} GB "
            f"written; cp of {size(copy):.2f} GB {base:.1f} s; beside start-up {(wall - start) / base:.2f} x cp",
            flush=True,
        )
        shutil.rmtree(copy)
    command = [sys.executable, "-c", PLAN, tiny, str(folder / "80")]
    print(f"plan of 80 layers: {subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()}")


def pruning(model: str, out: Path) -> list[str]:
    """The command that prunes `model` by its weights."""
    keep = [word for dim, share in CUT.items() for word in ("--keep", f"{dim}={share}")]
    words = ["prune", model, *keep, "--importance", "weights", "--out", str(out), "--no-verify", "--quiet"]
    return [sys.executable, "-m", "bridge", *words]


def timed(command: list[str], out: Path) -> tuple[float, float, float]:
    shutil.rmtree(out, ignore_errors=True)
    return run(command)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["examples", "sparse", "70b"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="a disk with room for 15 GB")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        if arguments.what == "examples":
            examples(Path(folder))
        elif arguments.what == "sparse":
            sparse(Path(folder))
        else:
            large(Path(folder), arguments.rounds)


if __name__ == "__main__":
    main()
