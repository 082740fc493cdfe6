"""A process with diffusers, which `make oracles` installs apart: what it and ModelOpt make of tiny models.

`python -m tests.oracles.diffusers_process FOLDER CASE...`: a case is the name of a function here and of its arguments,
`export:flux:fp8`; the answer of each is a line of JSON.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

HOME = Path(sys.prefix) / "diffusers"  # `make oracles` installs it there
sys.path.append(str(HOME))  # behind the environment's own packages

import diffusers  # noqa: E402
import torch  # noqa: E402
from diffusers.quantizers.quantization_config import BFLQuantizationConfig  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

import bridge  # noqa: E402
from bridge.sources.configs.diffusion import FLOAT32, nested  # noqa: E402
from bridge.sources.live_models.diffusion_inputs import example_inputs  # noqa: E402
from bridge.targets.hf.runtime import Runtime  # noqa: E402
from tests.models import diffusion_models  # noqa: E402

NAMED = "_name_or_path"
WEIGHTS = "diffusion_pytorch_model.safetensors"
CONFIGS = {
    "fp8": "FP8_DEFAULT_CFG", "nvfp4": "NVFP4_DEFAULT_CFG", "int8_wo": "INT8_WEIGHT_ONLY_CFG",
    "fp8_pc_pt": "FP8_PER_CHANNEL_PER_TOKEN_CFG", "int8_sq": "INT8_SMOOTHQUANT_CFG",
}  # fmt: skip


def main() -> None:
    folder, *cases = sys.argv[1:]
    warnings.simplefilter("ignore")
    for case in cases:
        name, *arguments = case.split(":")
        at = Path(folder, case.replace(":", "-"))
        at.mkdir()
        with contextlib.redirect_stdout(io.StringIO()):
            answer = CASES[name](at, *arguments)
        print("answer", json.dumps([case, answer]))


def batches(model: Any, count: int = 3) -> list[dict[str, Any]]:
    """Batches of two rows; the last one is held out."""
    found = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        found.append(
            {
                name: torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
                if tensor.is_floating_point() and name not in FLOAT32
                else tensor
                for name, tensor in example_inputs(model, 2).items()
            }
        )
    return found


def preset(mtq: Any, scheme: str) -> dict[str, Any]:
    """ModelOpt's preset without its rows for `proj_out`, made for Whisper; its examples for diffusers have none."""
    config: dict[str, Any] = copy.deepcopy(getattr(mtq, CONFIGS[scheme]))
    config["quant_cfg"] = [row for row in config["quant_cfg"] if "proj_out" not in str(row.get("quantizer_name"))]
    return config


def load(directory: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    config = json.loads((directory / "config.json").read_text())
    return getattr(diffusers, config["_class_name"]).from_pretrained(directory, torch_dtype=dtype).eval()


def export(at: Path, name: str, scheme: str, shard: str = "10GB") -> Any:
    """What differs between the files of bridge and those of ModelOpt's export; [] if none of their bytes does."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    diffusion_models.save(name, at / "model", torch.bfloat16)
    model = load(at / "model")
    data = batches(model)
    report = bridge.convert(
        at / "model", "hf", scheme, at / "ours", data=data, own_scales=True, shard_size=shard, progress=False
    )
    kept = [s.site.module for s in bridge.plan(at / "model", "hf", scheme).steps if s.site and not s.format]
    config = preset(mtq, scheme)
    config["quant_cfg"] += [{"quantizer_name": f"{module}.*", "enable": False} for module in kept]

    def loop(model: Any) -> None:
        for batch in data[:-1]:
            given = {n: t if n in FLOAT32 or not t.is_floating_point() else t.bfloat16() for n, t in batch.items()}
            model(**nested(given))

    with torch.no_grad():
        mtq.quantize(model, config, loop)
        export_hf_checkpoint(model, export_dir=at / "theirs", max_shard_size=shard)
    return [*([] if report.passed else ["verification failed"]), *_differences(at / "ours", at / "theirs")]


def _differences(ours: Path, theirs: Path) -> list[str]:
    found = []
    for path in theirs.iterdir():
        same = ours / path.name
        if not same.exists():
            found.append(f"{path.name}: missing")
        elif path.name == "config.json":
            a, b = ([*json.loads(file.read_text()).items()] for file in (same, path))
            # the directory that a model was loaded from, which save_pretrained of diffusers writes down
            if [row for row in a if row[0] != NAMED] != [row for row in b if row[0] != NAMED]:
                found.append(path.name)
        elif path.name.endswith("index.json"):
            if json.loads(same.read_text())["weight_map"] != json.loads(path.read_text())["weight_map"]:
                found.append(path.name)
        elif same.read_bytes() != path.read_bytes():
            mine, other = load_file(same), load_file(path)
            found += mine.keys() ^ other.keys()
            found += [name for name in mine if name in other and not torch.equal(mine[name], other[name])]
    return found


def loaded(at: Path, name: str, scheme: str) -> Any:
    """Quantized modules that diffusers loads from our file, and how far its outputs are from those of our weights."""
    diffusion_models.save(name, at / "model")
    data = batches(load(at / "model", torch.float32))
    bridge.convert(at / "model", "hf", scheme, at / "out", data=data, progress=False)
    kind = getattr(diffusers, json.loads((at / "out" / "config.json").read_text())["_class_name"])
    model = kind.from_single_file(
        str(at / "out" / WEIGHTS), config=str(at / "out"), torch_dtype=torch.float32,
        quantization_config=BFLQuantizationConfig(compute_dtype=torch.float32),
    )  # fmt: skip
    ours, inputs = Runtime(at / "out").model, nested(data[0])
    with torch.no_grad():
        apart = float((model(**inputs)[0] - ours(**inputs)[0]).abs().max())
    return [sum("BFL" in type(module).__name__ for module in model.modules()), apart]


def memory(at: Path, name: str) -> Any:
    """Whether a live model gives the same files as its directory."""
    model = diffusion_models.made(name)
    model.save_pretrained(at / "model")
    for source, out in ((model, "live"), (at / "model", "disk")):
        bridge.convert(source, "hf", "fp8_pc_pt", at / out, progress=False)
    return [(at / "live" / file).read_bytes() == (at / "disk" / file).read_bytes() for file in (WEIGHTS, "config.json")]


def pipeline(at: Path, name: str) -> Any:
    """Problems of a pipeline that is converted as a directory, and loaded by diffusers with its quantized model."""
    made = getattr(diffusion_models, f"{name}_pipeline")()
    made.save_pretrained(at / "model")
    report = bridge.convert(at / "model", "hf", "fp8_pc_pt", at / "out", progress=False)
    problems = [*report.findings, *([] if report.passed else ["verification failed"])]
    part = "unet" if hasattr(made, "unet") else "transformer"
    for path in (path for path in (at / "model").rglob("*") if path.is_file()):
        relative = path.relative_to(at / "model")
        if relative.parts[0] != part and (at / "out" / relative).read_bytes() != path.read_bytes():
            problems.append(f"{relative}: changed")
    model = Runtime(at / "out").model
    again = type(made).from_pretrained(at / "out", **{part: model})
    given = {"class_labels": [1, 2]} if name == "dit" else {"prompt": "a lighthouse in the snow"}
    steps = {"num_inference_steps": 2, "generator": torch.Generator().manual_seed(0), "output_type": "np"}
    if not torch.isfinite(torch.from_numpy(again(**given, **steps).images)).all():
        problems.append("the images are not finite")
    return problems


def prompts(at: Path, name: str) -> Any:
    """What of the amax over prompts and steps differs from ModelOpt's, which runs the pipeline itself."""
    import modelopt.torch.quantization as mtq

    made = getattr(diffusion_models, f"{name}_pipeline")()
    made.save_pretrained(at / "model")
    words = ["a cat", "two dogs in the snow", "a red boat", "held out"]
    (at / "prompts.txt").write_text("\n".join(words))
    ours = bridge.calibrate(at / "model", "fp8", at / "prompts.txt", samples=3, progress=False)
    loaded = type(made).from_pretrained(at / "model")
    loaded.set_progress_bar_config(disable=True)
    model = loaded.unet if hasattr(loaded, "unet") else loaded.transformer

    def loop(_: Any) -> None:
        for seed, prompt in enumerate(words[:-1]):
            given = {"class_labels": [seed]} if name == "dit" else {"prompt": prompt}
            loaded(**given, num_inference_steps=20, generator=torch.Generator().manual_seed(seed))

    mtq.quantize(model, preset(mtq, "fp8"), loop)
    theirs = {module: float(model.get_submodule(module).input_quantizer.amax) for module in ours.input_amax}
    return [module for module, amax in ours.input_amax.items() if float(amax) != theirs[module]] + [len(theirs)]


def graph(at: Path, name: str, scheme: str) -> Any:
    """Findings on a graph, its largest difference from the model for one row and for three, and compared outputs."""
    from bridge.targets.onnx.run.runtime import Runtime as OnnxRuntime

    model = diffusion_models.made(name)
    model.save_pretrained(at / "model")
    quant = None if scheme == "none" else scheme
    report = bridge.convert(at / "model", "trt", quant, at / "out", data=batches(model), progress=False)
    runtime, apart = OnnxRuntime(at / "out"), []
    for rows in (1, 3):
        inputs = example_inputs(model, rows)
        ours = runtime.run({name: tensor.numpy() for name, tensor in inputs.items()})["out_sample"]
        with torch.no_grad():
            apart.append(float((torch.from_numpy(ours) - model(**nested(inputs))[0]).abs().max()))
    return [[*report.findings], apart, [output.passed for output in report.parity.outputs]]


CASES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in list(globals().values())
    if inspect.isfunction(function) and function.__module__ == __name__
}

if __name__ == "__main__":
    main()
