"""FP8 as servers hold it: KL divergence from the source, for fused matrices with a scale each and with one scale.

vLLM, SGLang and TensorRT-LLM bring q, k and v, and gate and up, to the largest of their scales at load. This does the
same to both outputs, in float32, and runs the result. Activations stay unquantized, so that only weights differ.

    python benchmarks/served.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import bridge
from bridge.core.formats.safetensors import SafetensorsFile

MODEL = Path(__file__).parent.parent / "examples" / "models" / "tiny-llama"
TEXT = MODEL.parent.parent.parent / "bridge" / "calibration" / "data" / "default_text.txt"
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
TOKENS = 4096


def weights(directory: Path, refit: bool) -> tuple[dict[str, torch.Tensor], int, int]:
    """The dequantized weights, as served if `refit`; codes that changed, and how many there are."""
    file = SafetensorsFile(directory / "model.safetensors")
    tensors = {name: torch.from_numpy(file.read(name)) for name in file.specs}
    values, changed, count = {}, 0, 0
    for name in (name.removesuffix("_scale") for name in tensors if name.endswith(".weight_scale")):
        module = name.removesuffix(".weight")
        block, _, leaf = module.rpartition(".")
        members = next((names for names in FUSED if leaf in names), (leaf,))
        largest = max(tensors[f"{block}.{member}.weight_scale"] for member in members)
        codes = tensors[name].view(torch.float8_e4m3fn)
        scale = tensors[f"{name}_scale"]
        again = (codes.float() * scale / largest).clamp(-448, 448).to(torch.float8_e4m3fn)
        changed += int((again.view(torch.uint8) != codes.view(torch.uint8)).sum()) if len(members) > 1 else 0
        count += codes.numel() if len(members) > 1 else 0
        values[name] = again.float() * largest if refit else codes.float() * scale
    return values, changed, count


def main() -> None:
    """Print one line for each output."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    ids = AutoTokenizer.from_pretrained(MODEL)(TEXT.read_text())["input_ids"][-TOKENS:]
    batch = torch.tensor(ids).reshape(-1, 128)
    with torch.no_grad():
        source = model(batch).logits.log_softmax(-1)
    plain = {name: value.clone() for name, value in model.state_dict().items()}
    calibration = bridge.calibrate(MODEL, "fp8", progress=False)
    for title, own in (("a scale each (--own-scales)", True), ("one scale", False)):
        with tempfile.TemporaryDirectory() as work:
            out = Path(work) / "out"
            bridge.convert(MODEL, "hf", "fp8", out, calib=calibration, verify=False, own_scales=own, progress=False)
            for served in (False, True):
                values, changed, count = weights(out, served)
                model.load_state_dict(plain | values)
                with torch.no_grad():
                    ours = model(batch).logits.log_softmax(-1)
                kl = float((source.exp() * (source - ours)).sum(-1).mean())
                what = f"as served, {changed / count:.0%} of the fused codes changed" if served else "as written"
                print(f"{title:28} {what:45} KL {kl:.6f}")


if __name__ == "__main__":
    main()
