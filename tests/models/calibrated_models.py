"""Small models of four families and their calibration, for tests that compare it with ModelOpt's."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from transformers import (  # noqa: E402
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from bridge.calibration.data import prepare  # noqa: E402
from bridge.calibration.job import CalibrationJob  # noqa: E402
from bridge.calibration.modelopt import FakeQuantized, fake_quantize  # noqa: E402
from bridge.quant.calibration import Calibration  # noqa: E402
from bridge.quant.schemes.scheme import Scheme  # noqa: E402
from bridge.sources.opening import open_source  # noqa: E402
from bridge.tables.architectures.structure import structure  # noqa: E402

DECODER = {
    "hidden_size": 60, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 10, "vocab_size": 112, "max_position_embeddings": 96,
}  # fmt: skip
IDS = [torch.randint(0, 112, (2, 40), generator=torch.Generator().manual_seed(n)) for n in range(3)]


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(**DECODER))


def gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(n_embd=60, n_layer=2, n_head=6, vocab_size=112, n_positions=96))


def mixtral() -> Any:
    return MixtralForCausalLM(MixtralConfig(**DECODER, num_local_experts=5, num_experts_per_tok=2))


def bert() -> Any:
    sizes = {k: v for k, v in DECODER.items() if k not in ("num_key_value_heads", "head_dim")}
    return BertForMaskedLM(BertConfig(**sizes))


FAMILIES = {"llama": llama, "gpt2": gpt2, "mixtral": mixtral, "bert": bert}


def built(family: str, dtype: Any = torch.float32) -> Any:
    torch.manual_seed(5)
    model = FAMILIES[family]().eval().to(dtype)
    model.config.architectures = [type(model).__name__]
    return model


def both(model: Any, scheme: Scheme, data: Any = None, least: float = 0.0, **options: Any) -> FakeQuantized:
    source = open_source(model)
    arch = structure(source.config, source.specs)
    return fake_quantize(CalibrationJob(source, arch, scheme, prepare(data or IDS, source), **options), least)


def run(model: Any, scheme: Scheme, data: Any = None, **options: Any) -> Calibration:
    return both(model, scheme, data, **options).calibration
