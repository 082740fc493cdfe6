"""The doors of Tripy's example do what the example does with ModelOpt, and leave the caller's model as it was."""

from __future__ import annotations

import copy
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.needs import Lazy, needs

torch = pytest.importorskip("torch")
needs("modelopt")
mtq = Lazy("modelopt.torch.quantization")
dataset_utils = Lazy("modelopt.torch.utils.dataset_utils")
datasets = pytest.importorskip("datasets")

from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel  # noqa: E402

from bridge.compat.tripy import (  # noqa: E402
    MODES,
    NoSuchAttribute,
    UnknownMode,
    convert_to_scale,
    create_forward_loop,
    get_submodule,
    modelopt_quantize,
)
from bridge.core.errors import CalibrationError, UsageError  # noqa: E402

MODELS = Path(__file__).parents[2] / "examples" / "models"
IDS = torch.arange(7, 7 + 2 * 35).reshape(2, 35)
# texts of unequal length: padding happens, and the mask must matter
TEXTS = [f"The {n}. word of a sentence: " + "send the file to its mailbox, " * (n % 5) for n in range(70)]


@pytest.fixture(scope="module", params=["tiny-gpt2", pytest.param("tiny-llama", marks=pytest.mark.product)])
def model(request: pytest.FixtureRequest) -> Any:
    return AutoModelForCausalLM.from_pretrained(MODELS / request.param)


@pytest.fixture
def articles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's cnn_dailymail, as far as `datasets.load_dataset` shows it."""

    def load_dataset(path: str, **asked: Any) -> Iterator[dict[str, str]]:
        assert (path, asked["name"], asked["split"]) == ("abisee/cnn_dailymail", "3.0.0", "train")
        return ({"article": text} for text in TEXTS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def tokenizer_of(model: Any, **settings: Any) -> Any:
    return AutoTokenizer.from_pretrained(model.name_or_path, padding_side="left", **settings)


def as_the_example(model: Any, mode: str) -> Any:
    """The example's calls, in the words of today's ModelOpt, which also puts quantizers before LayerNorm: off."""
    preset = {"int8-weight-only": "INT8_DEFAULT_CFG", "int4-weight-only": "INT4_AWQ_CFG", "float8": "FP8_DEFAULT_CFG"}
    config = copy.deepcopy(getattr(mtq, preset[mode]))
    if mode == "int8-weight-only":
        config["quant_cfg"].append({"quantizer_name": "*input_quantizer", "enable": False})
    if mode == "float8":
        config["quant_cfg"] = [entry for entry in config["quant_cfg"] if entry["quantizer_name"] != "*lm_head*"]
    config["quant_cfg"].append({"quantizer_name": "*", "parent_class": "nn.LayerNorm", "enable": False})
    samples, batch = (16, 16) if mode == "int4-weight-only" else (64, 1)
    loop = dataset_utils.create_forward_loop(
        model=model, dataset_name="cnn_dailymail", tokenizer=tokenizer_of(model), batch_size=batch, num_samples=samples
    )
    return mtq.quantize(copy.deepcopy(model), config, forward_loop=loop)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_amax_pre_scales_weights_and_answers_are_those_of_the_example(model: Any, mode: str, articles: None) -> None:
    ours, theirs = modelopt_quantize(model, mode, dataset_name="cnn_dailymail"), as_the_example(model, mode)
    found, expected = ours.state_dict(), theirs.state_dict()
    assert set(found) == set(expected)
    assert any(name.endswith("_amax") for name in found)
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert torch.equal(ours(IDS).logits, theirs(IDS).logits)


@pytest.mark.slow
def test_only_float8_quantizes_the_head(model: Any, articles: None) -> None:
    enabled = {
        mode: modelopt_quantize(model, mode, dataset_name="cnn_dailymail").lm_head.weight_quantizer.is_enabled
        for mode in ("int8-weight-only", "float8")
    }
    assert enabled == {"int8-weight-only": False, "float8": True}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["int4-weight-only", "float8"])
def test_the_callers_model_and_the_presets_stay_as_they_are(mode: str, articles: None) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODELS / "tiny-gpt2").train()
    presets = {name: copy.deepcopy(value) for name, value in vars(mtq).items() if name.endswith("_CFG")}
    before, kinds = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    modelopt_quantize(model, mode, dataset_name="cnn_dailymail")
    assert [type(module) for module in model.modules()] == kinds and model.training and model.config.use_cache
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert {name: getattr(mtq, name) for name in presets} == presets


@pytest.mark.slow
def test_without_network_the_text_that_comes_with_bridge_calibrates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(datasets, "load_dataset")
    model = AutoModelForCausalLM.from_pretrained(MODELS / "tiny-gpt2")
    found = modelopt_quantize(model, "float8")
    amax = found.transformer.h[0].mlp.c_proj.input_quantizer.amax
    seen: list[Any] = []
    model.transformer.h[0].mlp.c_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0].abs().max()))
    create_forward_loop(None, None, tokenizer_of(model), num_samples=64)(model)
    assert len(seen) == 64 and float(amax) == float(max(seen))


@pytest.mark.slow
def test_a_model_without_tokenizer_takes_one_as_an_argument_and_needs_none_for_int8() -> None:
    config = GPT2Config(n_embd=60, n_head=6, n_layer=2, n_inner=80, vocab_size=1290, n_positions=96, bos_token_id=0)
    model = GPT2LMHeadModel(config).eval()
    modelopt_quantize(model, "int8-weight-only")
    with pytest.raises(UsageError, match="give tokenizer="):
        modelopt_quantize(model, "float8")
    found = modelopt_quantize(model, "float8", tokenizer=str(MODELS / "tiny-gpt2"))  # rows fit the 96 positions
    assert float(found.transformer.h[1].attn.c_attn.input_quantizer.amax) > 0


@pytest.mark.parametrize("mode", ["int3", "fp8", "", None, ["float8"]])
def test_an_unknown_mode_names_the_known_ones_under_both_errors(mode: Any) -> None:
    with pytest.raises(UnknownMode, match=r"unknown; known: float8, int4-weight-only, int8-weight-only") as caught:
        modelopt_quantize(None, mode)
    assert isinstance(caught.value, NotImplementedError) and isinstance(caught.value, UsageError)
    assert repr(mode) in str(caught.value)


def test_a_path_is_no_model_in_memory() -> None:
    with pytest.raises(UsageError, match=r"model_hf='gpt2'; give a transformers model in memory"):
        modelopt_quantize("gpt2", "float8")


class Recorder(torch.nn.Module):
    """Keeps the batches that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []
        self.config = GPT2Config(use_cache=True)

    def forward(self, **batch: Any) -> None:
        assert not self.config.use_cache and not torch.is_grad_enabled()
        self.seen.append(batch)


def batches(loop: Any) -> list[dict[str, Any]]:
    recorder = Recorder()
    loop(recorder)
    assert recorder.config.use_cache
    return recorder.seen


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODELS / "tiny-gpt2", padding_side="left")


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    return len(found) == len(expected) and all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(found, expected, strict=True)
    )


def test_names_order_and_defaults_are_modelopts() -> None:
    def bare(function: Any) -> list[tuple[str, Any]]:
        return [(name, p.default) for name, p in inspect.signature(function).parameters.items()]

    assert bare(create_forward_loop) == bare(dataset_utils.create_forward_loop)


@pytest.mark.parametrize(("batch", "samples", "length", "labels"), [(1, 5, 512, False), (4, 10, 9, True)])
def test_documents_of_a_file_become_the_batches_that_modelopt_makes_of_its_dataset(
    batch: int, samples: int, length: int, labels: bool, tokenizer: Any, articles: None, tmp_path: Path
) -> None:
    file = tmp_path / "articles.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    sizes = {"batch_size": batch, "num_samples": samples, "max_sample_length": length, "include_labels": labels}
    theirs = batches(dataset_utils.create_forward_loop(None, "cnn_dailymail", tokenizer, **sizes))
    assert same(batches(create_forward_loop(None, file, tokenizer, **sizes)), theirs)
    assert same(batches(create_forward_loop(None, "cnn_dailymail", tokenizer, **sizes)), theirs)
    assert theirs[0]["input_ids"].shape[0] == batch and sum(len(b["input_ids"]) for b in theirs) == samples


def test_one_text_is_cut_into_as_many_pieces_as_are_asked_for_and_loses_nothing(tokenizer: Any, tmp_path: Path) -> None:
    text = "A mailbox keeps the order of its messages, and a header has a name and a value.\n" * 30
    (tmp_path / "one.txt").write_text(text)
    seen = batches(create_forward_loop(None, str(tmp_path / "one.txt"), tokenizer, 3, 7))
    assert [len(batch["input_ids"]) for batch in seen] == [3, 3, 1]
    rows = [row[mask.bool()] for b in seen for row, mask in zip(b["input_ids"], b["attention_mask"], strict=True)]
    assert "".join(tokenizer.decode(row) for row in rows) == text


def test_a_loop_takes_the_users_batches_in_place_of_text() -> None:
    given = [{"input_ids": IDS}, {"input_ids": IDS[:1], "position_ids": None}]
    seen = batches(create_forward_loop(dataloader=given))
    assert seen == given


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_a_device_as_fourth_argument_begins_tripys_order(device: Any, tokenizer: Any, articles: None) -> None:
    """The loop is ModelOpt's of the same arguments by name; batch_size and so on may follow by name."""
    sizes = {"batch_size": 2, "num_samples": 5, "max_sample_length": 9}
    theirs = batches(dataset_utils.create_forward_loop(None, "cnn_dailymail", tokenizer, device=device, **sizes))
    assert same(batches(create_forward_loop(None, "cnn_dailymail", tokenizer, device, 2, 5, 9)), theirs)
    assert same(batches(create_forward_loop(None, "cnn_dailymail", tokenizer, device, 2, num_samples=5,
                                            max_sample_length=9)), theirs)  # fmt: skip
    with pytest.raises(TypeError, match=r"multiple values for (keyword )?argument 'batch_size'"):
        create_forward_loop(None, None, tokenizer, device, 2, batch_size=2)  # type: ignore[misc]


def test_the_callers_tokenizer_keeps_its_padding(tokenizer: Any) -> None:
    before = tokenizer.backend_tokenizer.to_str()
    create_forward_loop(None, None, tokenizer, 2, 6)
    assert tokenizer.backend_tokenizer.to_str() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dataset_name": ["a", "b"]}, "expected one name, a file or None"),
        ({"tokenizer": None}, "needs a tokenizer, or a dataloader"),
        ({"num_samples": 0, "batch_size": 1.5}, "batch_size=1.5, num_samples=0; expected positive whole numbers"),
        ({"batch_size": 0}, "tries how many rows fit CUDA memory"),
        ({"batch_size": "cpu"}, "batch_size='cpu' is a device; give it as device="),
        ({"batch_size": torch.device("cpu")}, r"batch_size=device\(type='cpu'\) is a device; give it as device="),
        ({"tokenizer": "gpt2"}, r"tokenizer='gpt2'; give one in memory: AutoTokenizer\.from_pretrained"),
    ],
)
def test_wrong_arguments_of_a_loop_are_named(arguments: dict[str, Any], words: str, tokenizer: Any) -> None:
    with pytest.raises(UsageError, match=words):
        create_forward_loop(**{"dataset_name": None, "tokenizer": tokenizer, **arguments})


def test_a_tokenizer_without_padding_is_refused_with_the_line_that_helps() -> None:
    bare = AutoTokenizer.from_pretrained(MODELS / "tiny-gpt2")
    bare.pad_token = None
    with pytest.raises(UsageError, match=r"tokenizer\.pad_token = tokenizer\.eos_token"):
        create_forward_loop(None, None, bare)


def test_a_dataset_that_is_out_of_reach_says_what_works_without_network(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_dataset(*_: Any, **__: Any) -> None:
        raise ConnectionError("Couldn't reach the Hub\nat length")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for name in ("cnn_dailymail", "org/unheard-of"):
        said = rf"{name}.*cannot? be loaded here|{name}: not a file, and loading it as a dataset failed"
        with pytest.raises(CalibrationError, match=said) as caught:
            create_forward_loop(None, name, tokenizer)
        assert "Couldn't reach the Hub; without network give" in str(caught.value)


def test_an_empty_text_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(CalibrationError, match="the calibration text is empty"):
        create_forward_loop(None, tmp_path / "empty.txt", tokenizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("maxbound", [127, 7, 448.0])
def test_a_scale_is_the_float32_quotient(dtype: Any, maxbound: float) -> None:
    amax = torch.rand(1000, 1, generator=torch.Generator().manual_seed(3)).mul(9).to(dtype)
    found = convert_to_scale(amax, maxbound)
    expected = amax.float().numpy() / np.float32(maxbound)
    assert found.dtype == torch.float32 and np.array_equal(found.numpy(), expected)
    assert np.array_equal(convert_to_scale(amax.float().numpy(), maxbound), expected)
    assert torch.equal(found, amax.float() / maxbound)  # the example's words


def test_rows_end_where_the_positions_of_the_model_do(tokenizer: Any, tmp_path: Path) -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=60, n_head=6, n_layer=1, n_inner=80, vocab_size=1290, n_positions=96))
    text = tmp_path / "long.txt"
    text.write_text("A mailbox keeps the order of its messages. " * 90)
    loop = create_forward_loop(model, text, tokenizer, num_samples=1, max_sample_length=5000)
    assert batches(loop)[0]["input_ids"].shape == (1, 96)
    loop(model)
    with pytest.raises(UsageError, match=r"tokens, but GPT2LMHeadModel has 96 positions; give .*max_sample_length=96"):
        create_forward_loop(None, text, tokenizer, num_samples=1, max_sample_length=5000)(model)


@pytest.mark.parametrize("maxbound", [0, -1, float("nan"), float("inf"), None, "127", torch.ones(2)])
def test_a_scale_without_a_bound_is_refused(maxbound: Any) -> None:
    with pytest.raises(UsageError, match="expected a positive number"):
        convert_to_scale(torch.ones(2), maxbound)


@pytest.mark.parametrize("amax", [None, "3", [1.0, None], [[1.0], [2.0, 3.0]], object()])
def test_a_scale_of_what_is_no_number_is_refused(amax: Any) -> None:
    with pytest.raises(UsageError, match=rf"amax is a {type(amax).__name__}; expected numbers"):
        convert_to_scale(amax, 127)


@pytest.mark.slow
def test_a_tensor_of_tripy_is_told_its_way_to_a_scale(tp: Any) -> None:
    with pytest.raises(UsageError, match=r"amax is a Tensor; .*np\.from_dlpack"):
        convert_to_scale(tp.ones((2,)), 127)


class Tree(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = torch.nn.ModuleList([torch.nn.Linear(2, 3), torch.nn.Sequential(torch.nn.Linear(3, 5))])
        self.experts = torch.nn.ModuleDict({"a": torch.nn.Linear(5, 7), "b": torch.nn.Identity()})
        self.note = "kept"


def test_a_path_leads_over_lists_dicts_and_attributes() -> None:
    tree = Tree()
    assert get_submodule(tree, "h.0") is tree.h[0]
    assert get_submodule(tree, "h.-1.0.weight") is tree.h[1][0].weight
    assert get_submodule(tree, "experts.a") is tree.experts["a"]
    assert get_submodule(tree, "note") == "kept" and get_submodule(tree, "h.1.0.in_features") == 3


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("h.2.weight", r"'h\.2\.weight': h \(ModuleList\) has no '2'; known: 0, 1"),
        ("h.one", r"h \(ModuleList\) has no 'one'"),
        ("experts.c", r"experts \(ModuleDict\) has no 'c'; known: a, b"),
        ("h.0.wieght", r"h\.0 \(Linear\) has no 'wieght'; .*nearest: weight"),
        ("nothing", r"the module \(Tree\) has no 'nothing'"),
        ("", r"the module \(Tree\) has no ''"),
        ("note.upper.weight", r"note\.upper \(builtin_function_or_method\) has no 'weight'"),
    ],
)
def test_a_path_that_ends_early_names_the_step_and_what_is_there(path: str, words: str) -> None:
    with pytest.raises(NoSuchAttribute, match=words) as caught:
        get_submodule(Tree(), path)
    assert isinstance(caught.value, AttributeError)


@pytest.mark.parametrize("path", [None, 0, ["h", "0"]])
def test_a_path_that_is_no_text_is_refused(path: Any) -> None:
    with pytest.raises(UsageError, match="expected a dotted path"):
        get_submodule(Tree(), path)


def test_a_quantizer_of_a_quantized_model_is_reached_and_gives_the_examples_scale(articles: None) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODELS / "tiny-gpt2")
    quantized = modelopt_quantize(model, "int8-weight-only")
    key = "transformer.h.3.attn.c_attn.weight_quantizer._amax"
    quantizer = get_submodule(quantized, key.removesuffix("._amax"))
    scale = convert_to_scale(quantized.state_dict()[key], quantizer.maxbound).squeeze()
    weight = model.transformer.h[3].attn.c_attn.weight.t()
    assert torch.equal(scale, weight.abs().amax(1) / 127)


def test_importing_the_doors_loads_no_framework() -> None:
    code = (
        "import bridge.compat.tripy, sys; print(sorted({'torch', 'numpy', 'modelopt', 'nvtripy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr
