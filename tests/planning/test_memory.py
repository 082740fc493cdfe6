"""What a plan says of memory is near what the process takes that converts.

With 262,144 tokens, 18 layers of width 640 and a tokenizer.json of 23.5 MB the command took 88 MB to `hf` (99 planned),
288 MB to `gguf` (319), and 2.86 GB to `ort` with its outputs compared (2.71).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers

import bridge

VOCAB = 131_072
# In a process of its own: the peak of this one is that of other tests.
CODE = """
import re, sys
from pathlib import Path
import bridge

bridge.convert(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], progress=False)
print(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose embedding and tokenizer are large beside its layers."""
    directory = tmp_path_factory.mktemp("large") / "model"
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=8192, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(directory)
    letters = [chr(0x4E00 + number) for number in range(512)]
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    merges = [(a, b) for a in letters for b in letters][: VOCAB - len(special) - len(letters)]
    tokens = [*special, *letters, *(a + b for a, b in merges)]
    vocab = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.ByteFallback()
    (directory / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer.to_str()), indent=2))
    return directory


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of a process is read from /proc")
@pytest.mark.parametrize(("target", "scheme"), [("hf", "int8_wo"), ("gguf", "q8_0")])
def test_the_memory_of_a_plan_holds_a_conversion(target: str, scheme: str, large: Path, tmp_path: Path) -> None:
    planned = bridge.plan(str(large), target, scheme).memory
    command = [sys.executable, "-P", "-c", CODE, str(large), target, scheme, str(tmp_path / "out")]
    kilobytes = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    used = int(kilobytes) << 10
    assert used <= planned <= 1.6 * used, (planned, used)
