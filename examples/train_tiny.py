"""Train the two tiny models that the demo and the tests use; must never train on the text it is measured on.

    python examples/train_tiny.py text         # writes bridge/calibration/data/default_text.txt, the held-out part
    python examples/train_tiny.py tiny-llama   # writes examples/models/tiny-llama; likewise tiny-gpt2

The text ships with Python: the language reference that `help()` shows and the docstrings of the standard library.
Steps are counted, not timed, and seeds are fixed: the same machine and versions give the same weights.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import math
import sysconfig
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

ROOT = Path(__file__).resolve().parent.parent
HELD_OUT = ROOT / "bridge" / "calibration" / "data" / "default_text.txt"
HELD_OUT_BYTES = 80_000
MAX_HELD_OUT = 12_000  # one long document must not become half of the calibration text
END = "<|endoftext|>"
SKIPPED = {"site-packages", "test", "tests", "idle_test", "lib2to3", "idlelib", "turtledemo"}
SHORT, LONG = 256, 512


@dataclass(frozen=True)
class Recipe:
    config: PretrainedConfig
    model: type[PreTrainedModel]
    steps: int
    line: str


# Every `in` extent is a multiple of 128, so that every block scheme applies; heads, layers and widths differ.
RECIPES = {
    "tiny-llama": Recipe(
        LlamaConfig(
            vocab_size=1536, hidden_size=128, intermediate_size=384, num_hidden_layers=5, num_attention_heads=8,
            num_key_value_heads=2, head_dim=32, max_position_embeddings=LONG, rms_norm_eps=1e-5, initializer_range=0.06,
            tie_word_embeddings=False, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        ),
        LlamaForCausalLM, 1200, "a Llama with grouped KV heads (8 / 2), 5 layers, untied head",
    ),
    "tiny-gpt2": Recipe(
        GPT2Config(
            vocab_size=1280, n_embd=128, n_head=4, n_inner=512, n_layer=4, n_positions=LONG,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, initializer_range=0.06,
            tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=0,
        ),
        GPT2LMHeadModel, 1200, "a GPT-2 (Conv1D, biases, learned positions), 4 layers, tied head",
    ),
}  # fmt: skip


def documents() -> dict[str, str]:
    """Return name -> text: the topics of `help()`, and the docstrings of one library module as one document."""
    found = {f"topic:{name}": text.strip() for name, text in topics.items()}
    library = Path(sysconfig.get_path("stdlib"))
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if SKIPPED.isdisjoint(relative.parts):
            text = "\n\n".join(_docstrings(path))
            if len(text) > 400:
                found[f"module:{relative.as_posix()}"] = text
    return found


def _docstrings(path: Path) -> Iterator[str]:
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:  # templates and fixtures among the .py files
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node)
        if text and isinstance(node, ast.Module):
            yield text
        elif text and isinstance(node, ast.ClassDef):
            yield f"class {node.name}\n{textwrap.indent(text, '    ')}"
        elif text and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{node.name}({ast.unparse(node.args)})\n{textwrap.indent(text, '    ')}"


def write_held_out() -> None:
    """Pick documents by the hash of their name, so that the choice is the same everywhere and follows no order."""
    chosen: list[str] = []
    size = 0
    pool = documents()
    for name in sorted(pool, key=lambda name: hashlib.sha256(name.encode()).digest()):
        length = len(pool[name].encode())
        if length <= MAX_HELD_OUT and size + length <= HELD_OUT_BYTES:
            chosen.append(pool[name])
            size += length
    HELD_OUT.write_text("\n\n\n".join(chosen) + "\n", encoding="utf-8", newline="\n")
    print(f"{HELD_OUT.relative_to(ROOT)}: {len(chosen)} documents, {HELD_OUT.stat().st_size} bytes")


def _paragraphs(text: str) -> list[str]:
    return [part.strip("\n") for part in text.split("\n\n") if part.strip()]


def training_documents() -> list[str]:
    """Return the rest, each paragraph once: topics quote one another, and would quote the held-out ones."""
    seen = {" ".join(part.split()) for part in _paragraphs(HELD_OUT.read_text(encoding="utf-8"))}
    kept: list[str] = []
    for text in documents().values():
        fresh: list[str] = []
        for part in _paragraphs(text):
            key = " ".join(part.split())
            if key not in seen:
                seen.add(key)
                fresh.append(part)
        if fresh:
            kept.append("\n\n".join(fresh))
    return kept


def train_tokenizer(texts: list[str], vocab: int) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END], initial_alphabet=sorted(alphabet), show_progress=False
    )
    core.train_from_iterator(texts, trainer)
    if core.get_vocab_size() != vocab:
        raise SystemExit(f"the tokenizer has {core.get_vocab_size()} entries, {vocab} were asked for")
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        padding_side="left",
        model_max_length=LONG,
        clean_up_tokenization_spaces=False,
    )


def _batches(tokens: torch.Tensor, steps: int, length: int, rows: int, seed: int) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(0, len(tokens) - length - 1, (rows,), generator=generator)
        yield torch.stack([tokens[start : start + length + 1] for start in starts.tolist()])


def _loss(model: PreTrainedModel, rows: torch.Tensor, offset: int) -> torch.Tensor:
    inputs, targets = rows[:, :-1], rows[:, 1:]
    positions = torch.arange(offset, offset + inputs.shape[1])[None].expand(len(rows), -1)
    logits = model(input_ids=inputs, position_ids=positions, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def _optimizers(model: PreTrainedModel) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks: after 300 steps perplexity 72 where AdamW alone reached 108."""
    named = list(model.named_parameters())
    inner = [p for name, p in named if p.dim() == 2 and (".layers." in name or ".h." in name)]
    outer = [p for name, p in named if p.dim() == 2 and all(p is not q for q in inner)]
    vectors = [p for name, p in named if p.dim() < 2]
    groups = [{"params": outer, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return [
        torch.optim.Muon(inner, lr=0.02, weight_decay=0.1),
        torch.optim.AdamW(groups, lr=6e-3, betas=(0.9, 0.98)),
    ]


def train(model: PreTrainedModel, tokens: torch.Tensor, recipe: Recipe) -> None:
    """Short rows at random offsets first, the last fifth at full length; rates follow a cosine.

    The offsets reach every learned position early; full rows alone would cost twice the time in attention.
    """
    warmup = 60

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (recipe.steps - warmup)))

    optimizers = _optimizers(model)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, factor) for optimizer in optimizers]
    offsets = torch.Generator().manual_seed(5)
    late = recipe.steps // 5
    phases = ((recipe.steps - late, SHORT, 8, 1), (late, LONG, 4, 2))
    began, done = time.perf_counter(), 0
    for steps, length, rows, seed in phases:
        for batch in _batches(tokens, steps, length, rows, seed):
            offset = int(torch.randint(0, LONG - length + 1, (1,), generator=offsets))
            loss = _loss(model, batch, offset)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for stepper in (*optimizers, *schedules):
                stepper.step()
            model.zero_grad(set_to_none=True)
            done += 1
            if done % 100 == 0:
                seconds = time.perf_counter() - began
                print(f"  step {done} of {recipe.steps}: loss {loss.item():.3f}, {seconds:.0f} s", flush=True)


@torch.no_grad()
def perplexity(model: PreTrainedModel, tokens: torch.Tensor) -> float:
    """Perplexity a token over windows of the full length that do not overlap."""
    windows = [tokens[at : at + LONG + 1] for at in range(0, len(tokens) - LONG - 1, LONG)]
    losses = [_loss(model, window[None], 0).item() for window in windows]
    return math.exp(sum(losses) / len(losses))


def _card(name: str, recipe: Recipe, figure: float) -> str:
    return (
        f"# {name}\n\n"
        f"{recipe.line[0].upper()}{recipe.line[1:]}, float32, trained by `examples/train_tiny.py` on the documentation "
        "inside Python (PSF licence, see `NOTICE`); perplexity on the held-out "
        f"`bridge/calibration/data/default_text.txt`: {figure:.1f} a token.\n"
    )


def make(name: str) -> None:
    recipe = RECIPES[name]
    out = ROOT / "examples" / "models" / name
    torch.manual_seed(0)
    torch.set_num_threads(2)
    disable_progress_bar()
    set_verbosity_error()
    texts = training_documents()
    tokenizer = train_tokenizer(texts, recipe.config.vocab_size)
    tokens = torch.tensor([token for text in texts for token in [0, *tokenizer.encode(text)]])
    held_out = torch.tensor(tokenizer.encode(HELD_OUT.read_text(encoding="utf-8")))
    print(f"{name}: {sum(map(len, texts))} characters, {len(tokens)} tokens; held out {len(held_out)} tokens")
    recipe.config.architectures = [recipe.model.__name__]
    model = recipe.model(recipe.config)
    print(f"  {sum(p.numel() for p in model.parameters())} parameters", flush=True)
    began = time.perf_counter()
    train(model.train(), tokens, recipe)
    figure = perplexity(model.eval(), held_out)
    bits = math.log2(figure) * len(held_out) / HELD_OUT.stat().st_size
    print(f"  {time.perf_counter() - began:.0f} s; held-out perplexity {figure:.2f}, {bits:.3f} bits a byte")
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # safetensors creates it for the owner alone
    tokenizer.save_pretrained(out)
    settings = out / "tokenizer_config.json"
    text = settings.read_text(encoding="utf-8").replace("TokenizersBackend", "PreTrainedTokenizerFast")
    settings.write_text(text, encoding="utf-8", newline="\n")  # the name that transformers 4 knows too
    (out / "README.md").write_text(_card(name, recipe, figure), encoding="utf-8", newline="\n")
    prompt = tokenizer("If the file does not exist,", return_tensors="pt")["input_ids"]
    said = model.generate(prompt, max_new_tokens=120, do_sample=False, repetition_penalty=1.1)
    print(textwrap.indent(tokenizer.decode(said[0]), "  | "))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["text", *RECIPES])
    what = parser.parse_args().what
    if what == "text":
        write_held_out()
    else:
        make(what)


if __name__ == "__main__":
    main()
