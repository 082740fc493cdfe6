"""Written GGUF files in llama.cpp itself: what it computes, and the tokens that it makes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from tokenizers import Regex, pre_tokenizers

import bridge
from bridge.core.formats.gguf import GgufFile
from bridge.core.mappings import mappings
from bridge.planning.contract_files import load_runtime
from bridge.planning.contracts import verdict
from bridge.tables.llama_cpp import token_rows
from bridge.targets.gguf.runtime import LlamaCpp
from bridge.targets.manifest import load_manifest
from tests.blocks import ROOT
from tests.covering import grid
from tests.models.gguf_families import FAMILIES, add_draft, byte_tokenizer, piece_tokenizer, save
from tests.oracles.llama_cpp import RoundedInputs, dequantized, log_probabilities

MODELS = ROOT / "examples" / "models"
LENGTHS = (3, 17, 60)  # beyond the window of the Gemmas, and beyond twenty positions, where a wrong RoPE shows
FLOAT = 1e-4  # nats: float32 sums in another order
GELU = 0.004  # llama.cpp reads GELU from a table of float16 numbers
# llama.cpp rounds what a quantized matrix multiplies to 8 bits in blocks of 32, and so does the reference: without that
# it is up to 1.5e-3 away. It is 2e-7 away where all values round alike; where a sum in another order rounds one to its
# neighbour, the rest follows: 1.8e-4 in Gemma 2 was the most.
ROUNDED = 2.5e-4
STORY = (
    "Once upon a time there was a little dog who lived near the forest. Every morning he ran to the river, and the old "
    "woman at the mill gave him bread. One day the river was frozen, and the dog went further than he had ever been."
)


def _compared(source: Path, quant: str | Path | None, tmp_path: Path) -> tuple[float, float]:
    """The largest difference of log probabilities, and the mean KL divergence, over the prompts."""
    out = tmp_path / "out"
    assert bridge.convert(str(source), target="gguf", quant=quant, out=out).passed
    work = tmp_path / source.name
    if not work.exists():
        work.symlink_to(source)
    model = dequantized(out, work, load_manifest(out).plan)
    vocab = model.config.vocab_size
    rounded = RoundedInputs(model, load_manifest(out).plan) if quant else nullcontext()
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, vocab, length).tolist() for length in LENGTHS]
    if source.parent == MODELS:
        ids = transformers.AutoTokenizer.from_pretrained(source)(STORY)["input_ids"]
        prompts = [ids[:length] for length in (*LENGTHS, len(ids))]
    differences, divergences = [], []
    for prompt, ours in zip(prompts, log_probabilities(out / "model.gguf", prompts, vocab), strict=True):
        with torch.no_grad(), rounded:
            theirs = torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1].double(), -1).numpy()
        assert np.isfinite(ours).all()
        differences.append(float(np.abs(ours - theirs).max()))
        divergences.append(float((np.exp(theirs) * (theirs - ours)).sum()))
    return max(differences), float(np.mean(divergences))


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
def test_llama_cpp_computes_the_source_in_float32(family: str, tmp_path: Path) -> None:
    difference, _ = _compared(save(family, tmp_path / family), None, tmp_path)
    assert difference <= (GELU if family.startswith(("gemma", "gpt2", "starcoder")) else FLOAT)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["keep", "quantize"])
def test_llama_cpp_loads_a_draft_layer_beside_the_others(drafts: str, tmp_path: Path) -> None:
    source, quant = save("glm4moe", tmp_path / "model"), "q8_0" if drafts == "quantize" else None
    more, own = add_draft(source), ("eh_proj", "enorm", "hnorm", "shared_head.norm")
    for choice in (drafts, "drop"):
        bridge.convert(source, "gguf", quant, tmp_path / choice, drafts=choice, verify=False)
    files = [tmp_path / choice / "model.gguf" for choice in (drafts, "drop")]
    np.testing.assert_array_equal(*(log_probabilities(file, [[5, 6, 7]], 300)[0] for file in files))
    with_it, without = map(GgufFile, files)
    assert [file.metadata["glm4moe.block_count"] for file in (with_it, without)] == [4, 3]
    assert with_it.metadata["glm4moe.nextn_predict_layers"] == 1
    assert np.array_equal(with_it.read("blk.3.nextn.eh_proj.weight"), more["model.layers.3.eh_proj.weight"].numpy())
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM4_MOE, 4)
    drafted = {name for name in with_it.specs if name not in without.specs}
    assert {names.get_name(f"model.layers.3.{name}") for name in own} <= {name.rpartition(".")[0] for name in drafted}
    assert (with_it.specs["blk.3.ffn_up_exps.weight"].dtype == "q8_0") == (drafts == "quantize")


@grid(
    {"name": ["tiny-llama", "tiny-gpt2"], "quant": ["q8_0", "q4_0", "int8_wo", "int4_wo", "mxfp4_wo", "nvfp4_wo"]},
)
def test_llama_cpp_computes_the_written_weights_of_trained_models(name: str, quant: str, tmp_path: Path) -> None:
    if (name, quant) == ("tiny-gpt2", "nvfp4_wo"):
        with pytest.raises(bridge.BridgeError, match="leaves out NVFP4's scale"):
            bridge.plan(str(MODELS / name), target="gguf", quant=quant)
        return
    _, divergence = _compared(MODELS / name, quant, tmp_path)
    assert divergence <= ROUNDED


@pytest.mark.slow
def test_llama_cpp_computes_int4_in_blocks_of_64(tmp_path: Path) -> None:
    scheme = tmp_path / "int4_64.toml"
    scheme.write_text((mappings() / "schemes" / "int4_wo.toml").read_text().replace("block = [128]", "block = [64]"))
    _, divergence = _compared(MODELS / "tiny-llama", scheme, tmp_path)
    assert divergence <= ROUNDED
    assert verdict(load_runtime("llama.cpp"), load_manifest(tmp_path / "out").plan).how == "run"


@pytest.mark.product
@pytest.mark.parametrize("quant", ["int8_wo", "mxfp4_wo", "nvfp4_wo"])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_llama_cpp_computes_the_written_weights_of_every_family(family: str, quant: str, tmp_path: Path) -> None:
    source = save(family, tmp_path / family)
    if quant == "nvfp4_wo" and family not in ("mistral", "qwen3"):
        with pytest.raises(bridge.BridgeError, match=r"NVFP4|scale per expert"):
            bridge.plan(str(source), target="gguf", quant=quant)
        return
    _, divergence = _compared(source, quant, tmp_path)
    assert divergence <= ROUNDED


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_llama_cpp_loads_halves(dtype: str, tmp_path: Path) -> None:
    assert bridge.convert(str(MODELS / "tiny-llama"), target="gguf", dtype=dtype, out=tmp_path / "out").passed
    values = LlamaCpp(tmp_path / "out" / "model.gguf").log_probabilities([5, 6, 7], 1536)
    assert np.isfinite(values).all() and np.exp(values).sum() == pytest.approx(1, abs=1e-4)


TEXTS = (
    "Once upon a time, there was a little dog.", "  two  spaces\n\nand lines\t", "don't we'll I'D", "1234567 + 89",
    "naïve café — “quotes” … ümlaut", "日本語 and emoji 🙂", "x=[{}];//#!",
)  # fmt: skip


def _reads(file: Path, tokens: Mapping[str, list[int]], vocab: int) -> None:
    """Check that llama.cpp, which tells no tokens, has as many of a text, and the same answer to it."""
    engine = LlamaCpp(file)
    for text, ids in tokens.items():
        assert engine.prompt_tokens(text) == len(ids), text
        np.testing.assert_array_equal(engine.log_probabilities(text, vocab), engine.log_probabilities(ids, vocab), text)


@pytest.mark.slow
def test_a_text_becomes_the_tokens_of_transformers(tmp_path: Path) -> None:
    source = MODELS / "tiny-llama"
    bridge.convert(str(source), target="gguf", quant="mxfp4_wo", out=tmp_path / "out", verify=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    _reads(tmp_path / "out" / "model.gguf", {text: tokenizer(text)["input_ids"] for text in TEXTS}, 1536)


@pytest.mark.slow
@pytest.mark.parametrize("spaces", ["prepend", "metaspace"])
def test_a_text_becomes_the_pieces_of_sentencepiece(spaces: str, tmp_path: Path) -> None:
    source, tokenizer = save("mistral", tmp_path / "mistral", vocab_size=400), piece_tokenizer(spaces)
    tokenizer.save(str(source / "tokenizer.json"))
    bridge.convert(str(source), target="gguf", out=tmp_path / "out", verify=False)
    # SentencePiece and llama.cpp put a space before every text, this pre-tokenizer none before one that begins with it
    texts = [text.lstrip(" ") if spaces == "metaspace" else text for text in TEXTS]
    tokens = {text: tokenizer.encode(text).ids for text in texts}
    bytes_, pieces = range(3, 259), range(259, tokenizer.get_vocab_size())
    used = set().union(*tokens.values())
    assert used.intersection(bytes_) and len(used.intersection(pieces)) > 20
    _reads(tmp_path / "out" / "model.gguf", tokens, 400)


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["escaped", "as characters"])
def test_a_text_becomes_the_words_of_deepseeks_three_expressions(ends: str, tmp_path: Path) -> None:
    source, tokenizer = save("mistral", tmp_path / "mistral"), byte_tokenizer()
    patterns = token_rows("splits")["deepseek-v3"]
    if ends == "as characters":
        patterns = [pattern.replace(r"\r", "\r").replace(r"\n", "\n") for pattern in patterns]
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    tokenizer.save(str(source / "tokenizer.json"))
    bridge.convert(str(source), target="gguf", out=tmp_path / "out", verify=False)
    assert GgufFile(tmp_path / "out" / "model.gguf").metadata["tokenizer.ggml.pre"] == "deepseek-v3"
    _reads(tmp_path / "out" / "model.gguf", {text: tokenizer.encode(text).ids for text in TEXTS}, 300)


@pytest.mark.slow
def test_sixty_four_positions_run_in_llama_cpp_and_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp lists the whole vocabulary as JSON for a position: seconds each, where it has 262,144 tokens."""
    asked, stages, real = [0], set[str](), LlamaCpp.log_probabilities

    def counted(self: LlamaCpp, tokens: list[int] | str, vocab: int) -> np.ndarray:
        asked[0] += 1
        return real(self, tokens, vocab)

    monkeypatch.setattr(LlamaCpp, "log_probabilities", counted)
    bridge.convert(MODELS / "tiny-llama", "gguf", "q8_0", tmp_path / "out", verify=False)
    report = bridge.verify(
        tmp_path / "out", MODELS / "tiny-llama", progress=lambda done, total, stage: stages.add(stage)
    )
    assert asked == [64] and report.parity.outputs[0].positions == 64
    said = "64 positions in llama.cpp; KL and perplexity: the file's weights, decoded, in torch"
    assert f"run in   {said}" in report.lines(), report.lines()
    assert "run in llama.cpp" in stages and "run in ONNX Runtime" not in stages
