"""Calibrate static FP8 in small memory: bridge, ModelOpt layer by layer, llm-compressor, auto-round.

    python benchmarks/calibration_peers.py --llm-compressor DIR --auto-round DIR
    python benchmarks/calibration_peers.py --families --llm-compressor DIR --auto-round DIR

DIR is a folder of packages that goes before those of this environment: `pip install --no-deps --target DIR` with
llmcompressor==0.14.0.1 compressed-tensors==0.19.0 transformers==5.17.0 'huggingface_hub<2' auto-round==0.15.1, and with
auto-round==0.16.1, and what their imports still ask for (datasets, accelerate, py-cpuinfo, nvidia-ml-py, httpx).
Without a folder that program is left out.

Every run is a process of its own. The model is a random Llama of 1.10 B in bfloat16 with an untied head, the data are 4
rows of 128 tokens in batches of 2, and every program measures the inputs of all linear layers but the head. Memory is
the peak of the resident set above what the imports took. `--families` counts the tiny models that each can calibrate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROWS, LENGTH = 4, 128
WORDS = Path(__file__).parents[1] / "examples" / "models" / "tiny-llama"  # a tokenizer, which two of them ask for
SIZES = {
    "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
    "num_hidden_layers": 16, "head_dim": 64, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip
RECIPE = 'base = "fp8"\n[[rule]]\nmodules = ["lm_head"]\nquant = "none"\n'


def batches(vocabulary: int) -> list[Any]:
    """Random ids, the same for every program."""
    import torch

    random = torch.Generator().manual_seed(1)
    return [torch.randint(3, vocabulary, (2, LENGTH if vocabulary > 97 else 24), generator=random) for _ in "12"]


def loaded(model: Path) -> Any:
    """The model as transformers loads it, on the CPU."""
    import transformers

    config = json.loads((model / "config.json").read_text())
    return getattr(transformers, config["architectures"][0]).from_pretrained(model, dtype="auto").eval()


def bridge_run(model: Path, ids: list[Any]) -> int:
    """Block by block; returns, as the others do, how many matrices have a measured input."""
    from dataclasses import replace

    from bridge.calibration.data import prepare
    from bridge.calibration.job import CalibrationJob
    from bridge.calibration.walk.run import calibrate_by_blocks
    from bridge.planning.structure import structure_of
    from bridge.quant.schemes.load import load_scheme
    from bridge.sources.opening import open_source

    source = open_source(model)
    structure = structure_of(source)
    recipe = model.parent.parent / "recipe.toml"
    recipe.write_text(RECIPE)
    scheme = load_scheme(recipe if any(site.module == "lm_head" for site in structure.sites) else "fp8")
    data = replace(prepare([{"input_ids": one} for one in [*ids, ids[0]]], source), held_out=())
    return len(calibrate_by_blocks(CalibrationJob(source, structure, scheme, data)).input_amax)


def modelopt_run(model: Path, ids: list[Any]) -> int:
    """ModelOpt's layer-wise mode; the model is in memory."""
    import copy

    import modelopt.torch.quantization as mtq

    config = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
    config["algorithm"] = {"method": "max", "layerwise": {"enable": True}}
    made = mtq.quantize(loaded(model), config, lambda it: [it(input_ids=one, use_cache=False) for one in ids])
    return sum(name.endswith("input_quantizer") and hasattr(part, "_amax") for name, part in made.named_modules())


def llm_compressor_run(model: Path, ids: list[Any]) -> int:
    """The sequential pipeline of `oneshot`."""
    import torch
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoTokenizer

    rows = [{"input_ids": one, "attention_mask": torch.ones_like(one)} for one in ids]
    data = torch.utils.data.DataLoader(rows, batch_size=None)
    made = loaded(model)
    oneshot(
        model=made, processor=AutoTokenizer.from_pretrained(WORDS), dataset=data, batch_size=2,
        num_calibration_samples=ROWS, max_seq_length=LENGTH, pipeline="sequential",
        recipe=QuantizationModifier(targets="Linear", scheme="FP8", ignore=["lm_head"]),
    )  # fmt: skip
    return sum(hasattr(part, "input_scale") for part in made.modules())


def auto_round_run(model: Path, ids: list[Any]) -> int:
    """Scheme FP8_STATIC without training, blocks offloaded to disk."""
    from auto_round import AutoRound
    from transformers import AutoTokenizer

    made, _ = AutoRound(
        loaded(model), tokenizer=AutoTokenizer.from_pretrained(WORDS), scheme="FP8_STATIC", iters=0, batch_size=2,
        low_cpu_mem_usage=True, dataset=list(ids), nsamples=ROWS, seqlen=ids[0].shape[1], device_map="cpu",
    ).quantize()  # fmt: skip
    return sum(hasattr(part, "act_scale") or hasattr(part, "act_max") for part in made.modules())


RUNS: dict[str, Callable[[Path, list[Any]], int]] = {
    "bridge": bridge_run,
    "ModelOpt layer-wise": modelopt_run,
    "llm-compressor": llm_compressor_run,
    "auto-round": auto_round_run,
}


def imports(program: str) -> None:
    """Load what a program needs, so that it is not counted."""
    import torch  # noqa: F401
    import transformers.models.llama.modeling_llama  # noqa: F401

    if program == "llm-compressor":
        import llmcompressor
        import llmcompressor.modifiers.quantization  # noqa: F401
    elif program == "auto-round":
        import auto_round  # noqa: F401
    else:
        import modelopt.torch.quantization  # noqa: F401


def measure(program: str, model: Path) -> None:
    """Calibrate in this process, and print the figures as JSON."""
    import resource
    import time

    imports(program)
    ids = batches(SIZES["vocab_size"])
    base = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    start = time.process_time()
    RUNS[program](model, ids)
    seconds = time.process_time() - start
    peak = int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024 - base
    print("\n" + json.dumps({"peak": peak, "seconds": seconds}))


def count(program: str, folder: Path) -> None:
    """Calibrate every model of a folder in this process; print the matrices, which failed, and why."""
    imports(program)
    failed: dict[str, str] = {}
    measured: dict[str, int] = {}
    for model in sorted(folder.iterdir()):
        try:
            measured[model.name] = RUNS[program](model, batches(97))
            if not measured[model.name]:
                failed[model.name] = "nothing measured"
        except BaseException as error:  # a count must not end at the first
            failed[model.name] = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"[:160]
    print("\n" + json.dumps({"failed": failed, "matrices": sum(measured.values())}))


def child(word: str, program: str, model: Path, packages: Path | None) -> dict[str, Any]:
    """Run in a process of its own."""
    before = [str(packages)] if packages else []
    path = os.pathsep.join([*before, *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    command = [sys.executable, __file__, word, program, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["?"])[-1][:200]}
    figures: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return figures


def tiny_models(folder: Path) -> int:
    """Save the tiny models of many families; return how many."""
    import torch

    from tests.models.decoder_families import DECODERS, build

    for family in DECODERS:
        build(family, torch.float32).save_pretrained(folder / family)
    return len(DECODERS)


def random_model(root: Path) -> None:
    """A random model of 1.10 B parameters in bfloat16."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM._from_config(LlamaConfig(**SIZES), dtype=torch.bfloat16).save_pretrained(root)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llm-compressor", type=Path)
    parser.add_argument("--auto-round", type=Path)
    parser.add_argument("--families", action="store_true")
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    packages = {"llm-compressor": arguments.llm_compressor, "auto-round": arguments.auto_round}
    programs = [name for name in RUNS if name not in packages or packages[name]]
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        models = Path(folder) / "models"
        models.mkdir()
        total = tiny_models(models) if arguments.families else 0
        if not arguments.families:
            random_model(models / "1b")
        for program in programs:
            if arguments.families:
                counts = child("--count", program, models, packages.get(program))
                failed, matrices = counts.get("failed", counts), counts.get("matrices", 0)
                told = f"{program:20} {total - len(failed)} of {total}, {matrices} matrices"
                print(told, *map(" ".join, failed.items()), sep="\n    ", flush=True)
            else:
                print(f"{program:20}", child("--measure", program, models / "1b", packages.get(program)), flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2], Path(sys.argv[3]))
    elif sys.argv[1:2] == ["--count"]:
        count(sys.argv[2], Path(sys.argv[3]))
    else:
        main()
