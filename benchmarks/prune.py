"""What pruning costs: perplexity of the tiny models by what is kept, memory and seconds on the shape of a 70 B Llama.

    python benchmarks/prune.py examples    both tiny models: cuts, importances, repair and chance
    python benchmarks/prune.py search      both tiny models: bridge.search beside ModelOpt's grid, at the same budget
    python benchmarks/prune.py sparse      both tiny models with 2:4 zeros, and ModelOpt's SparseGPT
    python benchmarks/prune.py 70b         two layers of that shape from a file of holes beside cp, and a plan of all 80

`examples` and `sparse` score on what the models were trained on and measure on 30 windows of 512 tokens of the
embedded text.
`search` reproduces ModelOpt 0.47's grid: sizes above 60 % of each width and 80 % of the depth, of all combinations
within the budget the ten with most parameters, of these the least loss. Both choose on the same rows of the training
text with the same scores; `wide` is the same grid without its floors. Perplexity is on text that neither has seen.
`70b` times whole processes, in turn; `start-up` is the same command on the tiny Llama. Memory is anonymous.
"""

from __future__ import annotations

import argparse
import itertools
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from checkpoint import run, size

import bridge
from bridge.api.request import data_of
from bridge.calibration.data import Sampling
from bridge.sources.opening import open_source
from bridge.sources.pruned.opening import Cut, plan_cut, whole_of
from bridge.sources.pruned.sparse import METHODS
from bridge.workflows.prune.searched import Searched
from bridge.workflows.prune.trial import Trial
from bridge.workflows.prune.verbs import SAMPLES, SEQUENCE
from tests.models.sparse_checkpoint import LLAMA_405B, llama_specs, write_sparse
from tests.oracles.prune_grid import best_of_grid, combinations_of

ROOT = Path(__file__).resolve().parent.parent
HELD_OUT = ROOT / "bridge/calibration/data/default_text.txt"
WINDOWS, LONG, CHOICES = 30, 512, 3
IMPORTANCES = ("output", "minitron", "weights")
SHARES = ("85%", "70%", "60%")
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

    text = training_text(folder)
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


def training_text(folder: Path) -> Path:
    """A file of what both models were trained on."""
    sys.path.insert(0, str(ROOT / "examples"))
    from train_tiny import training_documents

    text = folder / "training.txt"
    text.write_text("\n\n".join(training_documents()), encoding="utf-8")
    return text


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


def searches(folder: Path, shares: Sequence[str]) -> None:
    """Print what the search and both grids choose, and its perplexity on text that neither has seen."""
    import torch

    text = training_text(folder)
    for name in CUTS:
        source = open_source(ROOT / "examples/models" / name)
        ids = source.load_tokenizer()(HELD_OUT.read_text(encoding="utf-8"), verbose=False)["input_ids"]
        tokens = torch.tensor(ids)
        print(f"{name}: whole {perplexity(source.load_model(), tokens):.2f}")
        whole = whole_of(source)
        grids = {"grid": combinations_of(whole), "wide": combinations_of(whole, 1.0, 1.0)}
        for share, importance in itertools.product(shares, ("minitron", "output")):
            begin = time.perf_counter()
            found = bridge.search(source, {"parameters": share}, data=text, importance=importance, progress=False)
            print(f"{share} {importance}: {len(found.tried)} measured in {time.perf_counter() - begin:.0f} s")
            report("search", found.keep, found.size / found.whole, found.pruned, tokens)
            if importance == "output":
                repaired = bridge.search(source, {"parameters": share}, data=text, repair=True, progress=False)
                report("repaired", repaired.keep, repaired.size / found.whole, repaired.pruned, tokens)
            trial = trial_of(source, whole, found, text)
            for label, combinations in grids.items():
                if best := best_of_grid(whole, combinations, found.limit, trial.cost):
                    report(label, best[0], best[1] / found.whole, trial.result(best[0])[0], tokens)
                else:
                    print(f"  {label:10}nothing fits", flush=True)


def report(label: str, keep: Mapping[str, int], part: float, smaller: Any, tokens: Any) -> None:
    words = " ".join(f"{dim}={size}" for dim, size in keep.items())
    print(f"  {label:10}{words:44}{part:>7.1%}{perplexity(smaller.load_model(), tokens):>9.2f}", flush=True)


def trial_of(source: Any, whole: Cut, found: Searched, text: Path) -> Trial:
    """What `search` measures with: its rows and its scores."""
    data = data_of(source, text, Sampling(SAMPLES, SEQUENCE))
    trial = Trial(whole, data, found.importance, False, None)
    trial.prepare(None, found.scores.scores if found.scores else ())
    return trial


def sparse(folder: Path) -> None:
    """Print the perplexities of both tiny models by how zeros are chosen."""
    import torch

    text = training_text(folder)
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
    parser.add_argument("what", choices=["examples", "search", "sparse", "70b"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--share", action="append", help="of parameters, for search; default: 85%%, 70%%, 60%%")
    parser.add_argument("--folder", type=Path, help="a disk with room for 15 GB")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        if arguments.what == "examples":
            examples(Path(folder))
        elif arguments.what == "search":
            searches(Path(folder), arguments.share or SHARES)
        elif arguments.what == "sparse":
            sparse(Path(folder))
        else:
            large(Path(folder), arguments.rounds)


if __name__ == "__main__":
    main()
