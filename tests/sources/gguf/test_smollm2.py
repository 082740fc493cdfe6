"""A GGUF file that somebody published: its values, its tokens and its answers, by gguf-py and llama.cpp."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers

import bridge
from bridge.core.formats.gguf import GgufFile
from bridge.sources.gguf.container import GgufTensors
from bridge.sources.opening import open_source
from bridge.targets.gguf.runtime import LlamaCpp
from tests.oracles.smollm2 import FILE, needed

pytestmark = [pytest.mark.slow, needed]

STORY = "Once upon a time there was a little dog who lived near the forest. Every morning he ran to the river, and the"
TEXTS = (
    STORY, "  two  spaces\n\nand lines\t", "don't we'll I'D", "1234567 + 89", "naïve café — “quotes” … ümlaut",
    "日本語 and emoji 🙂", "x=[{}];//#!", "<|im_start|>user\nhi<|im_end|>\n", "a\r\nb\u00a0c", "e\u0301a", "١٢٣ Ⅳ ½",
)  # fmt: skip


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("smollm2")
    for target in ("hf", "gguf"):
        assert bridge.convert(str(FILE), target=target, out=out / target, verify=target == "hf").passed
    return out


def test_every_value_is_gguf_pys() -> None:
    container = GgufTensors([GgufFile(FILE)])
    for tensor in gguf.GGUFReader(FILE).tensors:
        wanted = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(-1)
        ours = container.read_flat(tensor.name, 0, wanted.size, np.empty(wanted.size, np.float32))
        assert np.array_equal(ours.view(np.uint32), wanted.view(np.uint32)), tensor.name


def test_texts_become_the_tokens_of_llama_cpp_and_transformers() -> None:
    engine, source = LlamaCpp(FILE), open_source(FILE)
    tokenizer, vocab = source.load_tokenizer(), source.config["vocab_size"]
    theirs = transformers.AutoTokenizer.from_pretrained(FILE.parent, gguf_file=FILE.name)
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert engine.prompt_tokens(text) == len(ids), text
        # transformers cuts Arabic digits otherwise than llama.cpp
        assert ids == theirs(text)["input_ids"] or text == TEXTS[-1]
        assert tokenizer.decode(ids) == text
    last = TEXTS[-1]  # llama.cpp tells no tokens, but its answer to them
    ours = engine.log_probabilities(tokenizer(last)["input_ids"], vocab)
    assert np.array_equal(engine.log_probabilities(last, vocab), ours)
    assert tokenizer.chat_template == theirs.chat_template
    assert (tokenizer.bos_token, tokenizer.eos_token) == (theirs.bos_token, theirs.eos_token)


def test_log_probabilities_are_llama_cpps(converted: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(converted / "hf")
    model = transformers.AutoModelForCausalLM.from_pretrained(converted / "hf", dtype=torch.float32).eval()
    ids = tokenizer(STORY)["input_ids"]
    with torch.no_grad():
        wanted = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1].double(), -1).numpy()
    exact, published = (
        LlamaCpp(file).log_probabilities(ids, len(wanted)) for file in (converted / "gguf" / "model.gguf", FILE)
    )
    likely = wanted > -12  # llama.cpp tells less likely ones with few digits
    assert np.abs(exact - wanted)[likely].max() < 1e-3
    # of blocks, llama.cpp rounds the inputs to 8 bits: 0.0025 nats
    assert (np.exp(wanted) * (wanted - published))[likely].sum() < 0.01 and published.argmax() == wanted.argmax()
