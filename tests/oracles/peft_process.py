"""What peft makes of adapters: each case's base, adapter and merged model, as directories.

It runs in a process of its own with `.venv/peft` on its path: `python -m tests.oracles.peft_process OUT [CASE ...]`.
Beside that it opens the PeftModel itself with bridge, and notes which tensors differ from the merged model's.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as T
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import save_file

from bridge.sources.memory import bits_of
from bridge.sources.opening import open_source
from tests.oracles.peft_cases import CASES, Case
from tests.sources.tiny_families import BERT, TEXT, build


def base_of(case: Case) -> Any:
    dtype = getattr(torch, case.dtype)
    if case.family in OWN:
        torch.manual_seed(0)
        model = OWN[case.family]().to(dtype).eval()
        with torch.no_grad():
            for tensor in model.parameters():
                tensor.normal_(0, 0.1)
        return model
    return build(case.family, dtype)


OWN = {
    "gpt2-square": lambda: T.GPT2LMHeadModel(
        T.GPT2Config(n_embd=60, n_layer=2, n_head=6, n_inner=60, vocab_size=97, tie_word_embeddings=False)
    ),
    "whisper": lambda: T.WhisperForConditionalGeneration(
        T.WhisperConfig(
            d_model=48,
            encoder_layers=1,
            decoder_layers=1,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=80,
            decoder_ffn_dim=72,
            vocab_size=97,
            num_mel_bins=20,
            max_source_positions=40,
            max_target_positions=24,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=3,
        )
    ),
    "wide-llama": lambda: T.LlamaForCausalLM(
        T.LlamaConfig(**{**TEXT, "num_hidden_layers": 1, "intermediate_size": 700, "vocab_size": 601})
    ),
    "qwen2": lambda: T.Qwen2ForCausalLM(T.Qwen2Config(**{k: v for k, v in TEXT.items() if k != "head_dim"})),
    "bert-classifier": lambda: T.BertForSequenceClassification(T.BertConfig(**BERT, num_labels=3)),
}


def adapted(model: Any, case: Case) -> PeftModel:
    """The model with an adapter that changes everything it can change."""
    wrapped = get_peft_model(model, LoraConfig(**case.config))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in wrapped.named_parameters():
            if tensor.requires_grad:
                scale = 1.0 if "magnitude" in name else 0.0
                noise = torch.randn(tensor.shape, generator=generator) * 0.1
                tensor.copy_((tensor.float() * scale + noise * (0.1 if scale else 1)).to(tensor.dtype))
    return wrapped


def save_by_expert(base: Path, adapter: Path, case: Case) -> None:
    """An adapter as peft wrote it over transformers 4, where each projection of an expert was a layer."""
    adapter.mkdir()
    generator = torch.Generator().manual_seed(1)
    rank, state = case.config["r"], {}
    for name, spec in open_source(str(base)).specs.items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in case.config["target_modules"] and len(spec.shape) == 2:
            state[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, spec.shape[1], generator=generator)
            state[f"base_model.model.{module}.lora_B.weight"] = torch.randn(spec.shape[0], rank, generator=generator)
    save_file({name: tensor * 0.1 for name, tensor in state.items()}, adapter / "adapter_model.safetensors")
    LoraConfig(**case.config).save_pretrained(str(adapter))


def run(case: Case, out: Path) -> dict[str, list[str]]:
    base, adapter, merged = out / "base", out / "adapter", out / "merged"
    model = base_of(case)
    model.save_pretrained(base)
    if case.by_expert:
        save_by_expert(base, adapter, case)
    else:
        adapted(model, case).save_pretrained(adapter)
    text = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**text, "base_model_name_or_path": str(base)}))
    plain = type(model).from_pretrained(base, dtype=getattr(torch, case.dtype))
    loaded = PeftModel.from_pretrained(plain, str(adapter), autocast_adapter_dtype=case.widened)
    live = {} if not case.live else live_values(loaded)
    whole = loaded.merge_and_unload()
    whole.save_pretrained(merged)
    if not case.live:
        return {"live": [], "changed": []}
    source = open_source(str(merged))
    differs = [name for name in source.specs if not np.array_equal(live["values"].get(name, []), source.read(name))]
    return {"live": differs, "changed": live["changed"]}


def live_values(model: PeftModel) -> dict[str, Any]:
    """The values that bridge reads of a PeftModel, and what of the model is another one afterwards."""
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    kinds = [type(module).__name__ for module in model.modules()]
    source = open_source(model)
    values = {name: np.array(source.read(name)) for name in source.specs}
    after = model.state_dict()
    changed = [name for name, tensor in before.items() if not torch.equal(tensor, after[name])]
    if kinds != [type(module).__name__ for module in model.modules()]:
        changed.append("modules")
    return {"values": values, "changed": changed}


def main(out: Path, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    T.logging.set_verbosity_error()
    results: dict[str, Any] = {}
    for name in names or list(CASES):
        try:
            results[name] = run(CASES[name], out / name)
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    (out / "results.json").write_text(json.dumps(results))


assert bits_of

if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
