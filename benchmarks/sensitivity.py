"""Layer sensitivity of the tiny Llama: seconds against ModelOpt's own ways, and how far rankings agree.

    python benchmarks/sensitivity.py             every unit's cost: bridge, auto_quantize (kl_div, gradient), copies
    python benchmarks/sensitivity.py --ranks     rank correlation between halves of the held-out text, and of methods
    python benchmarks/sensitivity.py --budgets   what budgets buy: sum of the parts against the whole, measured
    python benchmarks/sensitivity.py --auto      several schemes: bridge's choice and auto_quantize's at the same bits
    python benchmarks/sensitivity.py --blocks    method "block" against "kl": ranks, and choices at the same bits

Seconds are of the processor, after the imports, on one thread (OMP_NUM_THREADS=1): a busy machine changes them little.
All measure the same four rows of 128 tokens. `bridge` includes opening the model and calibrating on 32 rows, `copies`
(one for each unit, in which that unit alone is quantized, as a script would do) that calibration each time;
auto_quantize calibrates on the four.

`--auto`: auto_quantize calibrates and scores on all 32 rows, told what each format takes with its scales; bridge
calibrates on 28 of them and measures on the other four. Its budget is what auto_quantize's choice takes. Both choices
are run with the same quantizers on 64 other rows.

`--blocks`: rank correlations with the head quantized, too; both choices are run on 64 other rows.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import re
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr

import bridge
from bridge.api.request import data_of
from bridge.api.sensitivity.budget import parse_budget
from bridge.api.sensitivity.choose import choose
from bridge.api.sensitivity.divergence import kl
from bridge.api.sensitivity.job import Question, make_job
from bridge.api.sensitivity.measure import Bench, block_costs, costs, make_bench
from bridge.calibration.data import Sampling
from bridge.calibration.quantizers import numeric_cfg
from bridge.core.progress import no_progress
from bridge.quant.schemes.load import load_scheme
from bridge.sources.opening import open_source

MODEL = str(Path(__file__).parent.parent / "examples" / "models" / "tiny-llama")
SCHEMES = ("fp8", "int8_wo", "int4_wo", "int4_awq")


def bench(scheme: str, samples: int) -> Bench:
    job = make_job(open_source(MODEL), Question(scheme))
    return make_bench(job, data_of(job.source, None, Sampling(samples, 128)), None, no_progress)


def alone(made: Bench) -> list[float]:
    return list(made.measure([made.variant({unit.name: 0}) for unit in made.job.units]).nats)


def seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        work()
    return time.process_time() - start


def config(scheme: str) -> dict[str, Any]:
    form = load_scheme(scheme).format
    entries = [{"quantizer_name": "*", "enable": False}]
    entries.append({"quantizer_name": "*weight_quantizer", "cfg": numeric_cfg(form.weight[0], weight=True)})
    if form.input:
        entries.append({"quantizer_name": "*input_quantizer", "cfg": numeric_cfg(form.input, weight=False)})
    return {"quant_cfg": entries, "algorithm": {"method": "max"}}


def auto(method: str, scheme: str, made: Bench) -> None:
    import modelopt.torch.quantization as mtq

    def loss(out: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())

    model, held = copy.deepcopy(made.quantized.plain), list(made.data.held_out)
    extra = {"loss_func": loss} if method == "gradient" else {}
    mtq.auto_quantize(
        model, {"effective_bits": 12.0}, [config(scheme)], data_loader=held, method=method, num_calib_steps=len(held),
        forward_step=lambda m, batch: m(**batch, use_cache=False).logits, num_score_steps=len(held),
        disabled_layers=["*lm_head*"], **extra,
    )  # fmt: skip


def copies(scheme: str, made: Bench) -> None:
    import modelopt.torch.quantization as mtq

    def run(model: Any, batch: Any) -> Any:
        with torch.no_grad():
            return model(**batch, use_cache=False).logits

    for unit in made.job.units:
        said = config(scheme)
        others = (site.module for other in made.job.units if other is not unit for site in other.sites)
        said["quant_cfg"] += [{"quantizer_name": f"{name}.*", "enable": False} for name in (*others, "lm_head")]
        loop = (lambda model: [run(model, batch) for batch in made.data.batches]) if scheme == "fp8" else None
        quantized = mtq.quantize(copy.deepcopy(made.quantized.plain), said, loop)
        for batch in made.data.held_out:
            rows = torch.arange(batch["input_ids"].numel())
            kl(run(made.quantized.plain, batch), run(quantized, batch), rows)


def times() -> None:
    bench("int4_wo", 8)  # everything is imported, and ModelOpt set up
    print("| scheme | units | bridge | auto_quantize kl_div | auto_quantize gradient | copies |")
    print("| --- | --- | --- | --- | --- | --- |")
    for scheme in ("fp8", "int4_wo"):
        made = bench(scheme, 32)
        found = [
            seconds(lambda: bridge.sensitivity(MODEL, scheme)),  # noqa: B023
            *(seconds(lambda: auto(method, scheme, made)) for method in ("kl_div", "gradient")),  # noqa: B023
            seconds(lambda: copies(scheme, made)),  # noqa: B023
        ]
        print(f"| `{scheme}` | {len(made.job.units)} | " + " | ".join(f"{value:.1f} s" for value in found) + " |")


def ranks() -> None:
    print(
        "| scheme | tokens a half | rank correlation of halves | five costliest in both | with ModelOpt's gradients |"
    )
    print("| --- | --- | --- | --- | --- |")
    for scheme in SCHEMES:
        made = bench(scheme, 128)
        rows = {name: torch.cat([batch[name] for batch in made.data.held_out]) for name in made.data.held_out[0]}
        half = len(rows["input_ids"]) // 2
        found = []
        for part in (slice(0, half), slice(half, 2 * half)):
            held = ({name: tensor[part] for name, tensor in rows.items()},)
            found.append(alone(replace(made, data=replace(made.data, held_out=held))))
        top = [{sorted(costs, reverse=True).index(cost): at for at, cost in enumerate(costs)} for costs in found]
        both = len({top[0][n] for n in range(5)} & {top[1][n] for n in range(5)})
        gradients = ""
        if load_scheme(scheme).algorithm == "max":
            scores = {la.name: la.cost for la in bridge.sensitivity(MODEL, scheme, method="modelopt").layers}
            whole = [a + b for a, b in zip(*found, strict=True)]
            gradients = f"{spearmanr(whole, [scores[unit.name] for unit in made.job.units]).statistic:.3f}"
        tokens = half * rows["input_ids"].shape[1]
        print(f"| `{scheme}` | {tokens:,} | {spearmanr(*found).statistic:.3f} | {both} of 5 | {gradients} |")


def budgets() -> None:
    print("| scheme | budget | stay | bits | sum of the parts | measured | everything quantized | rounds |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for scheme, budget, fallback in (
        ("int4_awq", "5.5bits", "int8_wo"), ("int4_wo", "8bits", None), ("int4_wo", "kl=0.01", "int8_wo"),
        ("int4_wo", "kl=0.01", None), ("fp8", "kl=0.0005", None),
    ):  # fmt: skip
        found = bridge.sensitivity(MODEL, scheme, budget=budget, fallback=fallback)
        assert found.choice
        lifted = sum(scheme != found.schemes[0] for scheme in found.choice.formats.values())
        stay = f"{lifted} of {len(found.layers)} {fallback or 'unquantized'}"
        figures = f"{found.choice.expected:.4g} | {found.choice.measured:.4g} | {found.whole:.4g}"
        print(f"| `{scheme}` | {budget} | {stay} | {found.choice.bits:.2f} | {figures} | {found.choice.rounds} |")


CANDIDATES = (("int4_wo", "fp8", "int8_wo"), ("int4_awq", "int8_wo"), ("int4_awq", "int4_wo", "fp8", "int8_wo"))


def peer(made: Bench, method: str, bits: float) -> dict[str, int]:
    """The units of ModelOpt's auto_quantize, each with the number of its candidate."""
    import modelopt.torch.quantization as mtq

    def loss(out: Any, batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(out[:, :-1].flatten(0, 1), batch["input_ids"][:, 1:].flatten())

    job, rows = made.job, [*made.data.batches, *made.data.held_out]
    formats = job.candidates.formats
    asked = []
    for candidate in formats[:-1]:
        mean = 8 * sum(unit.bytes for unit in candidate.units.values()) / sum(u.weights for u in job.units)
        algorithm = "awq_lite" if candidate.scheme.format.prescales else "max"
        asked.append({**config(candidate.name), "effective_bits": mean, "algorithm": {"method": algorithm}})
    inside = {name for modules in made.base.modules.values() for name in modules}
    model = copy.deepcopy(made.quantized.plain)
    outside = [name for name, _ in model.named_modules() if name and name not in inside]
    extra = {"loss_func": loss} if method == "gradient" else {}
    # its mean is of all matrices, those included that stay unquantized at 16 bits a weight
    linear = (m for n, m in model.named_modules() if n in outside and type(m).__name__ in ("Linear", "Conv1D"))
    rest, weights = sum(module.weight.numel() for module in linear), sum(unit.weights for unit in job.units)
    bits = (bits * weights + 16 * rest) / (weights + rest)
    _, state = mtq.auto_quantize(
        model, {"effective_bits": bits}, asked, data_loader=rows, method=method, num_calib_steps=len(rows),
        forward_step=lambda m, batch: m(**batch, use_cache=False).logits, num_score_steps=len(rows),
        disabled_layers=outside, **extra,
    )  # fmt: skip
    chosen = {}
    for name, recipe in state["best"]["recipe"].items():
        # it names the formats that are given as settings CUSTOM_0, CUSTOM_1 ..., and unquantized ones NONE
        found = re.match(r"CUSTOM_(\d+)", str(recipe))
        at = int(found[1]) if found else len(formats) - 1
        chosen |= dict.fromkeys(state["candidate_stats"][name]["module_names"], at)
    return {unit: chosen[modules[0]] for unit, modules in made.base.modules.items()}


def other_rows(made: Bench, count: int) -> tuple[dict[str, Any], ...]:
    """Rows of the embedded text that neither calibrates nor is measured on."""
    data = data_of(made.job.source, None, Sampling(4 * count, 128))
    used = {tuple(row.tolist()) for batch in (*made.data.batches, *made.data.held_out) for row in batch["input_ids"]}
    rows = [row for batch in (*data.batches, *data.held_out) for row in batch["input_ids"]]
    fresh = torch.stack([row for row in rows if tuple(row.tolist()) not in used][:count])
    return tuple({"input_ids": part, "attention_mask": torch.ones_like(part)} for part in fresh.split(8))


def chosen_by(work: Callable[[], Any]) -> tuple[Any, float]:
    found: list[Any] = []
    return found, seconds(lambda: found.append(work()))


def automatic(models: list[str]) -> None:
    print("| model | schemes | bits | auto_quantize | bridge | seconds of each |")
    print("| --- | --- | --- | --- | --- | --- |")
    for model in (str(Path(MODEL).parent / name) for name in models):
        for schemes in CANDIDATES:
            job = make_job(open_source(model), Question(list(schemes)))
            # of 16 bits a weight, as auto_quantize counts them: the example is stored in 32
            plain = {unit.name: replace(unit, bytes=2 * unit.weights) for unit in job.units}
            last = replace(job.candidates.formats[-1], units=plain)
            job = replace(job, candidates=replace(job.candidates, formats=(*job.candidates.formats[:-1], last)))
            made = make_bench(job, data_of(job.source, None, Sampling(32, 128)), None, no_progress)
            fresh = replace(made, data=replace(made.data, held_out=other_rows(made, 64)))
            costs_, took = chosen_by(lambda: costs(made))  # noqa: B023
            for bits in (4.8, 5.5, 6.5):
                for method in ("gradient", "kl_div"):
                    (theirs,), other = chosen_by(lambda: peer(made, method, bits))  # noqa: B023
                    nbytes = sum(job.bytes_of(unit, theirs[unit.name]) for unit in job.units)
                    asked = replace(job, budget=parse_budget(f"{job.bits(nbytes) + 1e-9}bits"))
                    pick, _ = choose(asked, costs_[0], replace(made, job=asked).divergence)
                    nats = [fresh.divergence(without(made, formats)) for formats in (theirs, pick.formats)]
                    words = f"| {Path(model).name} | {', '.join(schemes)} | {job.bits(nbytes):.2f} | {method} "
                    figures = f"{nats[0]:.4f} | {nats[1]:.4f} | {other:.1f} s, {took:.1f} s |"
                    print(words + figures, flush=True)


def blocks(models: list[str]) -> None:
    print("| model | scheme | units | rank correlation | with the head | seconds of kl, of block |")
    print("| --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for model in (str(Path(MODEL).parent / name) for name in models):
            for scheme in (*SCHEMES, "int8_sq"):
                path = Path(folder) / f"{scheme}.toml"
                path.write_text(f'base = "{scheme}"\n[[rule]]\nmodules = ["lm_head"]\nquant = "{scheme}"\n')
                found = [
                    chosen_by(partial(bridge.sensitivity, model, path, method=method)) for method in ("kl", "block")
                ]
                kl_, block = ({layer.name: layer.cost for layer in result[0].layers} for result, _ in found)
                head, names = [*kl_], [name for name in kl_ if name != "lm_head"]
                ranks_ = (
                    spearmanr([kl_[n] for n in some], [block[n] for n in some]).statistic for some in (names, head)
                )
                figures = " | ".join(f"{value:.3f}" for value in ranks_)
                took = ", ".join(f"{took:.1f} s" for _, took in found)
                print(f"| {Path(model).name} | `{scheme}` | {len(head)} | {figures} | {took} |", flush=True)
    print("\n| model | schemes | bits | chosen by kl | chosen by block |")
    print("| --- | --- | --- | --- | --- |")
    for model in (str(Path(MODEL).parent / name) for name in models):
        job = make_job(open_source(model), Question(list(CANDIDATES[0])))
        made = make_bench(job, data_of(job.source, None, Sampling(32, 128)), None, no_progress)
        fresh = replace(made, data=replace(made.data, held_out=other_rows(made, 64)))
        both = [costs(made), block_costs(job, made.data, None, no_progress, False)]
        for bits in ("4.8bits", "5.5bits", "6.5bits"):
            asked = replace(job, budget=parse_budget(bits))
            picks = [choose(asked, found, None)[0] for found in both]
            nats = " | ".join(f"{fresh.divergence(without(made, pick.formats)):.4f}" for pick in picks)
            print(f"| {Path(model).name} | {', '.join(CANDIDATES[0])} | {bits} | {nats} |", flush=True)


def without(made: Bench, formats: Any) -> dict[str, int]:
    """Without the units that stay unquantized."""
    return {unit: at for unit, at in formats.items() if at < len(made.copies)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", action="store_true")
    parser.add_argument("--budgets", action="store_true")
    parser.add_argument("--auto", action="store_true")
    parser.add_argument("--blocks", action="store_true")
    parser.add_argument(
        "--models", nargs="+", default=["tiny-llama", "tiny-gpt2"], help="of examples/models, for --auto, --blocks"
    )
    asked = parser.parse_args()
    blocks(asked.models) if asked.blocks else automatic(
        asked.models
    ) if asked.auto else ranks() if asked.ranks else budgets() if asked.budgets else times()
