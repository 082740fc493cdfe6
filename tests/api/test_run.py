"""The verb run: greedy tokens equal transformers' on the same weights; ends, limits, chats, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tokenizers import Tokenizer

import bridge
from bridge.api.generation import Generation
from bridge.cli.main import app
from bridge.core.errors import CannotRun, SourceError, UsageError, VerifyError
from bridge.sources.live_models.loading import load_model
from bridge.targets.generation import Chooser, Settings
from bridge.targets.hf.runtime import Rebuilt
from bridge.targets.manifest import load_manifest
from bridge.verification.evaluation import quantize_inputs
from tests import once
from tests.blocks import ROOT
from tests.covering import usual
from tests.models.trt_families import encoder
from tests.oracles.modelopt_oracle import ask

pytestmark = pytest.mark.usefixtures("graphs_once")
MODEL = ROOT / "examples" / "models" / "tiny-llama"
TEXT = "The value of the expression is"


def written(target: str, scheme: str, **options: Any) -> Path:
    def make(directory: Path) -> None:
        bridge.convert(MODEL, target, scheme, directory / "out", verify=False, progress=False, **options)

    return once.directory(f"run-{target}-{scheme}-{sorted(options.items())}", make) / "out"


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A checkpoint of its own, which a test may change."""
    return Path(shutil.copytree(written("hf", "none"), tmp_path / "out"))


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def theirs(model: Any, tokens: int) -> list[int]:
    """Greedy tokens of transformers' own `generate`."""
    ids = torch.tensor([Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(TEXT).ids])
    with torch.no_grad():
        out = model.generate(ids, max_new_tokens=tokens, do_sample=False)
    return [int(token) for token in out[0, ids.shape[1] :]]


def source() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(MODEL).eval()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="cache"),
        pytest.param({"cache": False}, id="no cache"),
        pytest.param({"dtype": "fp16"}, id="fp16", marks=pytest.mark.product),  # a graph more; test_export.py has it
    ],
)
def test_the_float_graph_says_what_transformers_says(options: dict[str, Any]) -> None:
    result = bridge.run(written("trt", "none", **options), TEXT, tokens=24)
    assert list(result.ids) == theirs(source(), 24)
    assert result.runs.startswith("the file itself in ONNX Runtime")


@pytest.mark.slow
def test_the_fused_graph_of_ort_says_what_transformers_says() -> None:
    result = bridge.run(written("ort", "none"), TEXT, tokens=24)
    assert list(result.ids) == theirs(source(), 24)
    assert result.runs.startswith("the file itself in ONNX Runtime")


@pytest.mark.slow
def test_llama_cpp_says_what_transformers_says() -> None:
    pytest.importorskip("xllamacpp")
    pieces: list[str] = []
    result = bridge.run(written("gguf", "none"), TEXT, tokens=16, stream=pieces.append)
    assert list(result.ids) == theirs(source(), 16)
    assert "".join(pieces) == result.text and result.runs.startswith("the file itself in llama.cpp")


@pytest.mark.slow
def test_quantized_tokens_of_llama_cpp_are_the_most_likely_of_each_position() -> None:
    """llama.cpp rounds activations to 8 bits where weights are quantized: its own probabilities are the reference."""
    pytest.importorskip("xllamacpp")
    from bridge.targets.gguf.runtime import LlamaCpp

    directory = written("gguf", "int8_wo")
    ids, engine = (
        Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(TEXT).ids,
        LlamaCpp(directory / "model.gguf"),
    )
    for token in bridge.run(directory, TEXT, tokens=8).ids:
        assert token == engine.log_probabilities(ids, 1536).argmax()
        ids.append(token)


@pytest.mark.slow
def test_drawn_tokens_of_llama_cpp_repeat_with_their_seed() -> None:
    pytest.importorskip("xllamacpp")
    first, again, other = (
        bridge.run(written("gguf", "none"), TEXT, tokens=12, temperature=1.5, seed=seed).ids for seed in (3, 3, 4)
    )
    assert first == again != other


@pytest.mark.slow
def test_llama_cpp_loses_no_token_that_ends_inside_of_a_character() -> None:
    """At this temperature tokens are bytes of unfinished characters, which its stream leaves out."""
    pytest.importorskip("xllamacpp")
    result = bridge.run(written("gguf", "none"), TEXT, tokens=120, temperature=20, seed=1)
    assert len(result.ids) == 120 and result.end == "tokens"
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    assert any("\ufffd" in tokenizer.decode([token]) for token in result.ids)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", usual(["int4_wo", "nvfp4_wo"], ["int4_wo", "int8_wo", "nvfp4_wo"]))
def test_a_weight_only_graph_says_what_its_dequantized_weights_say_in_transformers(scheme: str) -> None:
    """The same codes in `hf`, dequantized by their own reader, make the reference's weights."""
    ours = bridge.run(written("trt", scheme), TEXT, tokens=24)
    checkpoint = written("hf", scheme)
    rebuilt = Rebuilt(checkpoint, load_manifest(checkpoint).plan)
    model = source()
    state = {name: torch.from_numpy(np.array(rebuilt.read(name))) for name in rebuilt.specs}
    model.load_state_dict(state)
    assert list(ours.ids) == theirs(model, 24)
    assert list(bridge.run(checkpoint, TEXT, tokens=24).ids) == list(ours.ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "kv"),
    usual(
        [("fp8", "fp8"), ("int4_wo", "int8")], [("fp8", None), ("fp8", "fp8"), ("int4_wo", "fp8"), ("int4_wo", "int8")]
    ),
)
def test_quantized_activations_and_caches_say_what_the_fake_quantized_model_says(
    scheme: str, kv: str | None, tmp_path: Path
) -> None:
    """One code that flips at a tie can choose another token of nearly the same logit, and every later one differs.

    So ModelOpt's model reads our tokens: nearly all must be its own choice, the others within 2 % of its logits.
    """
    prompt = Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(TEXT).ids
    data = torch.randint(3, 1500, (4, 64), generator=torch.Generator().manual_seed(1))
    answer = ask(source(), scheme, lambda model: model(data), kv)
    bridge.convert(MODEL, "trt", scheme, tmp_path / "out", calib=answer.calibration, kv=kv, verify=False)
    new = list(bridge.run(tmp_path / "out", TEXT, tokens=24).ids)
    with torch.no_grad():
        whole = answer.model(torch.tensor([[*prompt, *new]]), use_cache=False).logits[0].numpy()
    logits = whole[len(prompt) - 1 : -1]
    assert (logits.max(-1) - logits[np.arange(24), new] <= 0.02 * np.abs(logits).max()).all()
    assert (logits.argmax(-1) == new).mean() > 0.9


@pytest.mark.slow
def test_inputs_are_quantized_as_the_scheme_does() -> None:
    """The inputs that matrices read are ModelOpt's MXFP4 values of what they were given, and change the text.

    Compared module by module: codes amplify the last bits of attention, so that whole runs may part. A value halfway
    between two codes has the even one, as OCP's MX asks; ModelOpt's class takes the lower one.
    """
    from bridge.calibration.modelopt import modelopt

    modelopt()
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    out = written("hf", "mxfp4")
    result = bridge.run(out, TEXT, tokens=24)
    assert result.runs == "its weights, dequantized, in transformers, inputs quantized"
    plan = load_manifest(out).plan
    rebuilt: Any = Rebuilt(out, plan)
    model, compared = load_model(rebuilt), []
    plain, given = theirs(model, 24), dict[Any, torch.Tensor]()
    linears = [
        module for name, module in model.named_modules() if type(module) is torch.nn.Linear and name != "lm_head"
    ]

    def keep(module: Any, inputs: tuple[Any, ...]) -> None:
        given[module] = inputs[0].clone()

    def compare(module: Any, inputs: tuple[Any, ...], _: Any) -> None:
        flat = given[module].reshape(-1, inputs[0].shape[-1])
        codes, scale = MXFP4QTensor.quantize(flat, block_size=32)
        values = codes.dequantize(dtype=torch.float32, scale=scale, block_sizes={-1: 32})
        values, was, found = values.reshape(inputs[0].shape), given[module], inputs[0]
        compared.append(bool(((values == found) | ((values - was).abs() == (found - was).abs())).all()))

    for module in linears:
        module.register_forward_pre_hook(keep)
    quantize_inputs(model, plan, None, rebuilt)
    for module in linears:
        module.register_forward_hook(compare)
    assert list(result.ids) == theirs(model, 24) != plain
    assert len(compared) >= len(linears) == 35 and all(compared)


@pytest.mark.slow
def test_text_comes_in_pieces_and_is_counted(output: Path) -> None:
    pieces: list[str] = []
    result = bridge.run(output, TEXT, tokens=12, stream=pieces.append)
    assert "".join(pieces) == result.text and len(pieces) > 5
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    assert result.text == tokenizer.decode(list(result.ids))
    assert result.prompt_tokens == len(tokenizer.encode(TEXT).ids) and len(result.ids) == 12 and result.end == "tokens"
    assert result.rate == 11 / result.seconds and result.prompt_rate > 0
    assert str(result).startswith("12 tokens, ") and str(result).endswith("its weights in transformers")


def test_the_first_token_belongs_to_the_prompt() -> None:
    one = Generation("a", (7,), 4, 2.0, 0.0, "stop", "x")
    assert one.rate == 0.0 and one.prompt_rate == 2.0
    assert json.loads(one.to_json())["prompt_tokens_per_second"] == 2.0


@pytest.mark.slow
@pytest.mark.parametrize("target", ["hf", "trt"])
@pytest.mark.parametrize("several", [False, True])
def test_it_ends_at_an_end_token_of_one_or_of_a_list(target: str, several: bool, tmp_path: Path) -> None:
    out = Path(shutil.copytree(written(target, "none"), tmp_path / "out"))
    whole = bridge.run(out, TEXT, tokens=12)
    stop = whole.ids[5]
    first = whole.ids.index(stop)
    ends = [1535, stop] if several else stop
    edit(out / "generation_config.json", lambda data: data.update(eos_token_id=ends))
    result = bridge.run(out, TEXT, tokens=12)
    assert result.ids == whole.ids[: first + 1] and result.end == "stop"


def test_a_full_context_ends_the_text_and_a_longer_prompt_is_refused(output: Path) -> None:
    room = len(Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(TEXT).ids) + 3
    edit(output / "config.json", lambda data: data.update(max_position_embeddings=room))
    result = bridge.run(output, TEXT, tokens=12)
    assert len(result.ids) == 3 and result.end == "context"
    edit(output / "config.json", lambda data: data.update(max_position_embeddings=room - 3))
    with pytest.raises(UsageError, match=rf"{room - 3} tokens, and the model's context {room - 3}.*shorten"):
        bridge.run(output, TEXT)
    edit(output / "config.json", lambda data: data.update(is_encoder_decoder=True, max_position_embeddings=room - 4))
    with pytest.raises(UsageError, match=rf"{room - 3} tokens, and the model's encoder reads {room - 4}; shorten"):
        bridge.run(output, TEXT)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["hf", pytest.param("trt", marks=pytest.mark.slow)])
def test_a_seed_draws_the_same_tokens_and_another_seed_others(target: str) -> None:
    out = written(target, "none")
    drawn = [bridge.run(out, TEXT, tokens=16, temperature=1.5, seed=seed).ids for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_tokens_are_drawn_as_often_as_their_probability_says() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.2])) * 0.7
    chooser = Chooser(Settings(temperature=0.7, seed=3))
    counts = np.bincount([chooser.choose(logits) for _ in range(4000)], minlength=3) / 4000
    assert np.abs(counts - [0.5, 0.3, 0.2]).max() < 0.03  # four standard deviations


def test_a_chat_is_rendered_by_the_models_template(output: Path) -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    with pytest.raises(UsageError, match="no chat template"):
        bridge.run(output, TEXT, chat=True)
    (output / "chat_template.jinja").write_text(template)
    plain = bridge.run(output, f"<user>{TEXT}:", tokens=6)
    assert bridge.run(output, TEXT, tokens=6, chat=True).ids == plain.ids


@pytest.mark.slow
def test_an_encoder_is_refused_and_told_what_verify_does(tmp_path: Path) -> None:
    bridge.convert(encoder("bert"), "trt", "int8_wo", tmp_path / "out", verify=False)
    with pytest.raises(CannotRun, match=r"BertModel is not a decoder.*qbridge verify OUT --against MODEL"):
        bridge.run(tmp_path / "out", TEXT)


@pytest.mark.parametrize(
    "target,scheme,words",
    [
        ("trtllm", "int8_wo", "trtllm-build"),
        ("megatron", "none", "Megatron-Core loads this checkpoint.*--target hf"),
        ("torchtitan", "none", "torchtitan loads this checkpoint.*--target hf"),
        ("tripy", "int8_wo", "Tripy runs it on an NVIDIA GPU"),
    ],
)
def test_an_output_for_another_program_names_it(target: str, scheme: str, words: str) -> None:
    with pytest.raises(CannotRun, match=words):
        bridge.run(written(target, scheme), TEXT)


def test_a_missing_or_damaged_tokenizer_is_told(output: Path) -> None:
    (output / "tokenizer.json").write_text("{}")
    with pytest.raises(SourceError, match=r"tokenizer.json cannot be read as a tokenizer.*copy"):
        bridge.run(output, TEXT)
    (output / "tokenizer.json").unlink()
    with pytest.raises(SourceError, match=r"tokenizer.json cannot be read as a tokenizer.*--tokenizer"):
        bridge.run(output, TEXT)


def test_what_was_altered_after_it_was_written_is_refused(output: Path) -> None:
    weights = output / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-8])
    with pytest.raises(SourceError, match=r"model\.safetensors"):
        bridge.run(output, TEXT)
    weights.write_bytes(content.replace(b'"model.norm.weight"', b'"model.morn.weight"'))
    with pytest.raises(VerifyError, match=r"lacks model\.norm\.weight.*not what the plan wrote"):
        bridge.run(output, TEXT)
    weights.write_bytes(content.replace(b'"shape":[1536,128]', b'"shape":[128,1536]', 1))
    with pytest.raises(VerifyError, match="another shape or dtype than planned"):
        bridge.run(output, TEXT)
    weights.write_bytes(content)
    edit(output / "bridge.json", lambda data: data["plan"].update(scheme="fp8"))
    with pytest.raises(VerifyError, match="its plan does not have its plan_digest"):
        bridge.run(output, TEXT)


@pytest.mark.slow
def test_a_graph_that_was_cut_off_is_refused(tmp_path: Path) -> None:
    out = Path(shutil.copytree(written("trt", "none"), tmp_path / "out"))
    (out / "model.onnx").write_bytes((out / "model.onnx").read_bytes()[:-100])
    with pytest.raises(VerifyError, match=r"model\.onnx: not a readable ONNX file"):
        bridge.run(out, TEXT)


def test_a_directory_that_is_not_an_output_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VerifyError, match="bridge did not write this model"):
        bridge.run(tmp_path, TEXT)
    with pytest.raises(VerifyError, match="no such directory"):
        bridge.run(tmp_path / "nowhere", TEXT)


@pytest.mark.parametrize(
    "given,words",
    [
        ({"tokens": 0}, "tokens=0"), ({"tokens": True}, "tokens=True"), ({"seed": -1}, "seed=-1"),
        ({"temperature": -0.5}, "temperature=-0.5"), ({"temperature": float("nan")}, "temperature=nan"),
    ],
)  # fmt: skip
def test_a_wrong_number_is_a_usage_error(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        bridge.run(MODEL, TEXT, **given)
    with pytest.raises(UsageError, match="text is empty"):
        bridge.run(MODEL, "")


@pytest.mark.slow
def test_the_command_streams_text_then_one_line(output: Path) -> None:
    result = bridge.run(output, TEXT, tokens=8)
    done = CliRunner().invoke(app, ["run", str(output), TEXT, "--tokens", "8"])
    assert done.exit_code == 0, done.output
    said, _, last = done.stdout.rstrip("\n").rpartition("\n")
    assert said == result.text and last.startswith("8 tokens, ") and last.endswith("its weights in transformers")
    as_json = CliRunner().invoke(app, ["run", str(output), TEXT, "--tokens", "8", "--json"])
    assert tuple(json.loads(as_json.stdout)["ids"]) == result.ids
    wrong = CliRunner().invoke(app, ["run", str(ROOT / "examples"), TEXT])
    assert wrong.exit_code == 1 and "bridge did not write this model" in wrong.stderr


@pytest.mark.slow
def test_an_output_and_its_source_answer_side_by_side(output: Path) -> None:
    """The source is read as it is: transformers' own greedy tokens."""
    both = CliRunner().invoke(app, ["run", str(output), TEXT, "--tokens", "12", "--with", str(MODEL), "--json"])
    assert both.exit_code == 0, both.output
    said = json.loads(both.stdout)
    assert said["ids"] == said["beside"]["ids"] == theirs(source(), 12)
    shown = CliRunner().invoke(app, ["run", str(output), TEXT, "--tokens", "4", "--with", str(MODEL)])
    assert max(map(len, shown.stdout.splitlines())) <= 160
    assert shown.stdout.count("4 tokens, ") == 2


@pytest.mark.slow
def test_a_conversation_has_all_that_was_said_before(output: Path) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}:"
    (output / "chat_template.jinja").write_text(template)
    words = ["run", str(output), "--chat", "--system", "Brief.", "--tokens", "5"]
    talked = CliRunner().invoke(app, words, input="one\ntwo\n\nthree\n")
    assert talked.exit_code == 0, talked.output
    first = bridge.run(output, "<system>Brief.<user>one:", tokens=5)
    assert bridge.run(output, "one", chat=True, system="Brief.", tokens=5).ids == first.ids
    second = bridge.run(output, f"<system>Brief.<user>one<assistant>{first.text}<user>two:", tokens=5)
    assert talked.stdout == f"{first.text}\n{second.text}\n"


@pytest.mark.parametrize(
    "words,why",
    [
        (["--system", "Brief.", "text"], "is said in a chat; add --chat"),
        (["--chat", "--with", "other"], "a conversation is with one model"),
        (["--chat", "--image", "a.png"], "a conversation is of texts; give a text, or leave out --image"),
        (["--chat", "--json"], "give the text that"),
    ],
)
def test_what_a_conversation_cannot_have_is_refused(words: list[str], why: str) -> None:
    refused = CliRunner().invoke(app, ["run", str(MODEL), *words])
    assert refused.exit_code == 2 and why in refused.stderr
