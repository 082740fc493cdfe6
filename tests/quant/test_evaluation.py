"""The evaluator of benchmarks/quality.py against other programs and formulas."""

from __future__ import annotations

import bz2
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
import torch

import bridge
from benchmarks import quality
from benchmarks.evaluation import inputs
from benchmarks.evaluation.figures import Window, compare, embeddings, summary
from benchmarks.evaluation.models import Bench, bits, dither
from benchmarks.evaluation.reading import read, tensors
from benchmarks.evaluation.tasks import ENDS, items, write_task
from benchmarks.evaluation.text import ARTICLE, NEWS, WIKIPEDIA, Text, plain, read_text, windows, write_calibration
from benchmarks.leave_one_out import alone, rounded
from bridge.core.errors import BridgeError
from bridge.quant.codec.decode import decode
from bridge.quant.schemes.catalog import scheme_names
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.quality import DITHERED, KINDS, PLAIN, Quality, read_quality
from bridge.streaming.written import OutputReader
from bridge.targets.hf.runtime import Rebuilt
from bridge.targets.manifest import load_manifest
from tests.blocks import ROOT

LLAMA, GPT2 = (ROOT / "examples" / "models" / name for name in ("tiny-llama", "tiny-gpt2"))
SENTENCE = "The {} ship left the old harbour at dawn and sailed along the coast of {} until the {} evening came."


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def text() -> Text:
    documents = tuple(
        " ".join(SENTENCE.format(f"w{at}x{n}", f"place{n}", f"day{at * n}") for n in range(8)) for at in range(12)
    )
    return Text(documents[:4], documents[4:8], documents[8:])


def test_kl_and_perplexity_are_those_of_torch() -> None:
    p, q = (torch.log_softmax(3 * random(9, 50, seed=seed), -1) for seed in (1, 2))
    ids = torch.arange(9)
    found = compare(p, q, ids)
    assert found.tokens == 8
    assert found.kl == pytest.approx(
        float(torch.nn.functional.kl_div(q[:-1], p[:-1], reduction="sum", log_target=True))
    )
    assert found.nll == pytest.approx(float(torch.nn.functional.cross_entropy(q[:-1], ids[1:], reduction="sum")))
    assert found.same == int((p[:-1].argmax(-1) == q[:-1].argmax(-1)).sum())


def test_a_summary_has_means_over_tokens_and_the_error_of_windows() -> None:
    found = summary([Window(2, 1.0, 4.0, 1), Window(2, 3.0, 4.0, 2)])
    assert found["kl"] == 1.0 and found["agreement"] == 0.75
    assert found["perplexity"] == pytest.approx(np.exp(2))
    assert found["kl_error"] == pytest.approx(np.std([0.5, 1.5], ddof=1) / np.sqrt(2))


def test_embeddings_are_compared_by_rows() -> None:
    found = embeddings(torch.eye(2), torch.tensor([[2.0, 0], [0, 1]]))
    assert found == {"cosine": 1.0, "error": 0.5}


def test_noise_of_a_dithered_weight_is_half_a_step_of_each_block_at_most() -> None:
    weight = random(6, 96)
    moved = dither(weight, torch.Generator().manual_seed(0)) - weight
    blocks = weight.reshape(6, 3, 32)
    step = (blocks.amax(-1) - blocks.amin(-1))[..., None] / 15
    share = moved.reshape(6, 3, 32) / step
    assert 0.49 < share.abs().max() <= 0.5001 and abs(share.mean()) < 0.03
    assert share.std() == pytest.approx(12**-0.5, rel=0.05)  # uniform


def test_a_page_becomes_prose() -> None:
    long = "and so it went on for many years, in all the lands around, until nobody knew of it any more."
    page = (
        "{{Infobox|a={{b}}}}\n'''Iron''' is a [[metal|kind of metal]]&lt;ref&gt;{{cite}}&lt;/ref&gt;, "
        f"{long}\n[[File:x.png|thumb|a [[b]] c]]\n* a list {long}\n{{| table\n|}}\n== Heading =="
    )
    assert plain(page) == f"Iron is a kind of metal, {long}"


def test_calibration_and_evaluation_share_no_document(tmp_path: Path) -> None:
    pages = "".join(f"<text>{f'article {at} ' + 'with words that make it long enough ' * 80}</text>" for at in range(6))
    news = "\n".join(f"news {at} said" for at in range(300))
    with zipfile.ZipFile(tmp_path / "gensim-4.4.0-any.whl", "w") as wheel:
        wheel.writestr(WIKIPEDIA, bz2.compress(f"<text>#REDIRECT</text>{pages}".encode()))
        wheel.writestr(NEWS, news)
    found = read_text(tmp_path)
    assert [one[:9] for one in found.articles] == ["article 0", "article 2", "article 4"] and len(pages) / 6 > ARTICLE
    assert found.news == tuple(f"news {at} said" for at in range(150, 300))
    assert len(found.calibration) == 153 and not set(found.calibration) & {*found.articles, *found.news}


def test_windows_are_half_of_articles_and_half_of_news() -> None:
    def tokenizer(string: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in string]}

    made = text()
    found = windows(made, tokenizer, 4, 100)
    joined = ["\n".join(part) for part in (made.articles, made.news)]
    shown = ["".join(map(chr, window)) for window in found]
    assert [len(window) for window in shown] == [100] * 4 and len(set(shown)) == 4
    assert all(window in joined[at // 2] for at, window in enumerate(shown))


def test_items_are_the_same_each_time_and_have_one_true_end(tmp_path: Path) -> None:
    made = items(text(), 20)
    assert made == items(text(), 20)
    for item in made:
        assert len(item["ends"]) == len(set(item["ends"])) == ENDS
        whole = item["begin"] + item["ends"][item["right"]]
        assert any(whole in document for document in (*text().articles, *text().news))
    write_task(made, tmp_path)
    assert len((tmp_path / "ends.jsonl").read_text().splitlines()) == 20
    assert 'doc_to_choice: "{{ends}}"' in (tmp_path / "ends.yaml").read_text()


def test_casts_are_those_of_ml_dtypes() -> None:
    x = 4 * random(4000)
    four = x.numpy().astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
    assert np.array_equal(inputs.e2m1(x).numpy(), four)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 9.0])
    assert inputs.e2m1(ties).tolist() == [0, 1, 1, 2, 2, 4, 4, 6]
    eight = (100 * x).clamp(-448, 448).numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert np.array_equal(inputs.e4m3(100 * x).numpy(), eight)


def test_inputs_are_those_of_modelopts_simulation() -> None:
    from modelopt.torch.quantization.config import QuantizerAttributeConfig
    from modelopt.torch.quantization.nn import TensorQuantizer

    x = random(5, 64)
    amax = x.abs().max()
    for said, ours in (
        ({"num_bits": (4, 3), "axis": None}, inputs.fp8_static(amax / 448)),
        ({"num_bits": 8, "axis": None}, inputs.int8_static(amax / 127)),
    ):
        quantizer = TensorQuantizer(QuantizerAttributeConfig(**said))
        quantizer.amax = amax
        assert torch.allclose(quantizer(x), ours(x), atol=1e-6)  # it multiplies by the inverse
    row = inputs.nvfp4(amax / (448 * 6))(x)
    assert 0.05 < float((row - x).norm() / x.norm()) < 0.12
    assert torch.equal(inputs.nvfp4(amax / (448 * 6))(row), row) and torch.equal(
        inputs.fp8_token(x)[0], inputs.fp8_token(x[:1])[0]
    )


READ = [
    (LLAMA, "int8_wo", {}), (LLAMA, "int4_wo", {}), (LLAMA, "fp8_pc_pt", {}), (LLAMA, "fp8_block", {}),
    (LLAMA, "nvfp4_wo", {}), (LLAMA, "mxfp4_wo", {}), (LLAMA, "mxfp8", {}), (GPT2, "int4_wo", {}),
    (LLAMA, "int4_wo", {"format": "compressed-tensors"}), (LLAMA, "int4:rtn", {"format": "gptq"}),
    (LLAMA, "nvfp4_input_scale1", {"format": "compressed-tensors"}),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("source", "quant", "options"), READ)
def test_files_are_read_as_our_own_reader_reads_them(
    source: Path, quant: str, options: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    bridge.convert(source, "hf", quant, out, verify=False, progress=False, **options)
    model, plan = read(out, source, language=True), load_manifest(out).plan
    ours = Rebuilt(out, plan)
    for step in plan.quantized:
        weight = model.get_parameter(step.source).detach().numpy()
        # scales are multiplied in float32 in another order
        assert np.allclose(weight, ours.read(step.source), rtol=1e-5, atol=1e-7), step.source
    hooked = sum(bool(module._forward_pre_hooks) for module in model.modules())
    assert hooked == (len(plan.quantized) if plan.quantized[0].format.input else 0)


def test_each_module_of_a_mixed_file_is_read_by_its_own_group(tmp_path: Path) -> None:
    recipe = tmp_path / "mixed.toml"
    rules = ['layers = [0]\nquant = "fp8_pc_pt"', 'layers = [1]\nquant = "nvfp4_wo"']
    recipe.write_text("\n".join(['base = "int4:rtn"', *(f"[[rule]]\n{rule}" for rule in rules)]))
    out = tmp_path / "out"
    bridge.convert(LLAMA, "hf", recipe, out, verify=False, progress=False)
    model, plan = read(out, LLAMA, language=True), load_manifest(out).plan
    ours = Rebuilt(out, plan)
    for step in plan.quantized:
        weight = model.get_parameter(step.source).detach().numpy()
        assert np.allclose(weight, ours.read(step.source), rtol=1e-5, atol=1e-7), step.source
    hooked = [name for name, module in model.named_modules() if module._forward_pre_hooks]
    assert hooked and all(".layers.0." in name for name in hooked)


@pytest.mark.slow
def test_the_figures_are_those_of_modelopts_fake_quantized_model(tmp_path: Path) -> None:
    from bridge.api.verbs import fake_quantize
    from bridge.quant.schemes.load import load_scheme

    bench = Bench("tiny-gpt2", tmp_path)
    ours = quality.measure("int8_sq", bench, quality.Asked())
    theirs = bench.figures(fake_quantize(str(bench.path), load_scheme("int8_sq")).model)
    assert ours.kl == pytest.approx(theirs["kl"], rel=0.05)  # without the inputs' codes it is a quarter
    row = read_quality()["int8_sq"]["tiny-gpt2"]
    assert (ours.kl, ours.perplexity, ours.bits) == pytest.approx((row.kl, row.perplexity, row.bits), rel=0.05)


def test_bits_count_codes_and_scales_and_16_for_what_is_kept(tmp_path: Path) -> None:
    bridge.convert(LLAMA, "hf", "int8_wo", tmp_path / "out", verify=False, progress=False)
    sizes = [tensor.shape for name, tensor in tensors(LLAMA).items() if tensor.ndim == 2 and ".layers." in name]
    stored = sum(8 * rows * columns + 32 * rows for rows, columns in sizes)
    assert bits(tmp_path / "out", LLAMA) == pytest.approx(stored / sum(rows * columns for rows, columns in sizes))
    assert bits(LLAMA, LLAMA) == 16


def test_bits_of_a_graph_are_those_of_its_layers_whatever_their_matrices_are_called(tmp_path: Path) -> None:
    made = []
    for layer, name, size in (
        *((".0.", "qkv_proj.weight_Q4", 1000), (".0.", "qkv_proj.weight_scales", 200), (".", "lm_head.weight", 400)),
        (".0.", "norm.weight", 80),
    ):
        shape = [size // 4] if "norm" in name else [1, size // 4]
        made.append(onnx.TensorProto(name=f"model{layer}{name}", dims=shape, data_location=onnx.TensorProto.EXTERNAL))
        made[-1].external_data.add(key="length", value=str(size))
    (tmp_path / "model.onnx").write_bytes(onnx.ModelProto(graph=onnx.GraphProto(initializer=made)).SerializeToString())
    sizes = [tensor.numel() for name, tensor in tensors(LLAMA).items() if tensor.ndim == 2 and ".layers." in name]
    assert bits(tmp_path, LLAMA) == 8 * 1200 / sum(sizes)


def test_a_row_is_written_and_read_and_keeps_what_was_not_measured_again(tmp_path: Path) -> None:
    path = tmp_path / "quality.toml"
    path.write_text("")
    full = Quality(bits=4.25, kl=0.25, kl_error=0.01, perplexity=20.5, agreement=0.75, seconds=1.5, memory=70)
    quality.add("scheme", "int4:gptq --group 32", DITHERED, full, path)
    quality.add("scheme", PLAIN, DITHERED, Quality(kl=0.0, perplexity=20.0), path)
    quality.add("peer", "AutoRound 20", DITHERED, Quality(kl=0.2, perplexity=20.2), path)
    quality.add("scheme", "int4:gptq --group 32", DITHERED, Quality(kl=0.125, accuracy=0.5), path)
    assert list(read_quality(path=path)) == [PLAIN, "int4:gptq --group 32"]
    row = read_quality(path=path)["int4:gptq --group 32"][DITHERED]
    assert (row.kl, row.accuracy, row.bits, row.seconds) == (0.125, 0.5, 4.25, 1.5)
    assert read_quality(KINDS[1], path)["AutoRound 20"][DITHERED].kl == 0.2
    quality.add("scheme", PLAIN, DITHERED, Quality(why="no"), path)
    assert read_quality(path=path)[PLAIN][DITHERED] == Quality(why="no")


def test_the_kl_of_a_row_is_the_mean_over_draws_that_are_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    kls = {0: 0.2, 1: 0.3, 2: 0.4}

    class Drawn:
        def draw(self, number: int) -> None:
            made.append(number)

    monkeypatch.setattr(
        quality, "measure", lambda *_: Quality(kl=kls[made[-1]], perplexity=20.0 + made[-1], agreement=0.5)
    )

    def run(stands: Quality, draws: int) -> Quality:
        made.clear()
        path = tmp_path / "quality.toml"
        path.write_text("")
        quality.add("scheme", "int4:gptq", DITHERED, stands, path)
        for one in quality.drawn("int4:gptq", Drawn(), quality.Asked(), stands, draws):  # type: ignore[arg-type]
            quality.add("scheme", "int4:gptq", DITHERED, one, path)  # each draw, so that a run that ends keeps them
        return read_quality(path=path)["int4:gptq"][DITHERED]

    found = run(Quality(), 3)
    assert made == [0, 1, 2, 0] and found.draws == (0.2, 0.3, 0.4)  # the first is left for the next row
    assert (found.kl, found.perplexity, found.spread) == pytest.approx((0.3, 20, 0.1))
    more = run(Quality(kl=0.25, perplexity=20.5), 3)
    assert made == [1, 2, 0] and more.draws == (0.25, 0.3, 0.4)
    assert more.perplexity == 20.5 and more.kl == pytest.approx(0.31667)
    again = run(Quality(kl=0.3, draws=(0.9, 0.3, 0.4)), 1)
    assert made == [0, 0] and again.draws == (0.2, 0.3, 0.4) and again.perplexity == 20
    assert run(Quality(), 1).draws == () and run(Quality(), 1).spread is None


def test_each_draw_calibrates_on_other_rows_of_the_same_documents(tmp_path: Path) -> None:
    made = Text(tuple(f"document {at}" for at in range(20)), (), ())
    paths = [tmp_path / f"{draw}.jsonl" for draw in range(3)]
    for draw, path in enumerate(paths):
        write_calibration(made, path, draw)
    first, *others = (path.read_text().splitlines() for path in paths)
    assert [json.loads(line)["text"] for line in first] == list(made.calibration)
    assert all(sorted(other) == sorted(first) and other != first for other in others) and others[0] != others[1]


@pytest.mark.parametrize("quant", ["affine3", "affine4", "mxfp8_wo", "int4:rtn"])
def test_mlxs_files_are_read_as_our_own_decoder_reads_them(quant: str, tmp_path: Path) -> None:
    options = {"vocabulary": "keep", "dtype": "fp16"}
    bridge.convert(LLAMA, "mlx", quant, tmp_path / "out", verify=False, progress=False, **options)
    model, plan = read(tmp_path / "out", LLAMA, language=True), load_manifest(tmp_path / "out").plan
    output = OutputReader(plan, tmp_path / "out")
    for step in plan.quantized:
        assert step.format
        arrays = {"codes" if one.part == "weight" else one.part: output.read(one) for one in step.outputs}
        weight = model.get_parameter(step.source).detach().numpy()
        ours = decode(arrays, step.format.weight, weight.shape, coding=step.coding)
        # code * scale + bias is rounded once here and twice there
        assert np.allclose(weight, ours, rtol=1e-5, atol=1e-6), step.source


@pytest.mark.parametrize(
    ("row", "target", "data"),
    [
        ("affine2", "mlx", False), ("mxfp8_wo", "mlx", False), ("iq4_nl", "gguf", False), ("q4_0", "gguf", False),
        ("q4_k_m:imatrix", "gguf", True), ("int4:best", "hf", True), ("int4", "hf", True), ("int4:rtn", "hf", False),
        ("auto:4.8bits", "hf", True),
        ("nvfp4_wo:gptq", "hf", True), ("fp8_block_dynamic", "hf", False), ("ct:W4A16", "hf", False),
    ],
)  # fmt: skip
def test_a_row_is_written_where_its_scheme_fits_and_gets_data_if_it_takes_any(
    row: str, target: str, data: bool, tmp_path: Path
) -> None:
    bench = Bench("tiny-llama", tmp_path)
    bench.calibration = tmp_path / "calibration.jsonl"
    words = quality.convert_words(row, bench, tmp_path / "out")
    assert words[words.index("--target") + 1] == target and words[words.index("--quant") + 1] == row
    assert ("--data" in words) == data and "--format" not in words  # hf chooses the first that holds the scheme
    assert ("keep" in words and "fp16" in words) == (target == "mlx")


@pytest.mark.parametrize("row", scheme_names())
def test_every_row_is_planned_or_refused_for_a_reason_that_is_known(row: str) -> None:
    target = quality.target_of(row)
    options = {"vocabulary": "keep", "dtype": "fp16"} if target == "mlx" else {}
    for source in (LLAMA, GPT2):
        try:
            bridge.plan(source, target, row, **options)
        except BridgeError as error:
            assert quality.reason(str(error))


def test_commands_say_data_and_options(tmp_path: Path) -> None:
    bench = Bench("tiny-llama", tmp_path)
    bench.calibration = tmp_path / "calibration.jsonl"
    words = quality.convert_words("int4:gptq --group 32", bench, tmp_path / "out")
    assert words[words.index("--quant") + 1] == "int4:gptq" and words[words.index("--group") + 1] == "32"
    assert "--data" in words and "--no-verify" in words
    words = quality.convert_words("int4:signround steps=20 --group 32", bench, tmp_path / "out")
    options = load_scheme(words[words.index("--quant") + 1]).options
    assert dict(options)["steps"] == 20 and "steps=20" not in words and {"--data", "--group"} <= {*words}
    words = quality.convert_words("q8_0", bench, tmp_path / "out", report=True)
    assert words[words.index("--target") + 1] == "gguf" and "--no-verify" not in words
    assert {"--data", "--evaluate"} <= {*words}
    assert "--data" not in quality.convert_words("int8_wo", bench, tmp_path / "out")


def test_a_command_is_told_its_own_seconds_and_memory(tmp_path: Path) -> None:
    words = "x = b'1' * 100_000_000; print(sum(range(3_000_000))); raise SystemExit(3)"
    held = np.ones(50_000_000)  # of this process, which is not the command's
    code, said, seconds, memory = quality.timed([sys.executable, "-c", words], None)
    assert held.all() and (code, said) == (3, "4499998500000\n") and seconds > 0.01 and 100 < memory < 300


def test_an_unknown_refusal_ends_the_run() -> None:
    assert quality.reason("PlanError: the scheme matches no weight of X") == "it quantizes no module of this model"
    with pytest.raises(SystemExit, match="unknown reason"):
        quality.reason("IndexError")


def test_rows_of_other_windows_than_those_of_the_table_are_refused(tmp_path: Path) -> None:
    bench = Bench("tiny-llama", tmp_path)
    bench.windows = bench.windows[:1]
    perplexity = bench.figures()["perplexity"]
    quality.same_windows(bench, Quality(perplexity=perplexity))
    quality.same_windows(bench, Quality())  # a model of which the table has nothing
    with pytest.raises(SystemExit, match=r"tiny-llama: .* measure `none` and all its rows again"):
        quality.same_windows(bench, Quality(perplexity=1.01 * perplexity))


def test_a_unit_alone_is_rounded_and_put_back(tmp_path: Path) -> None:
    bench = Bench("tiny-llama", tmp_path)
    bench.windows = bench.windows[:1]
    bench.figures()
    name = "model.layers.0.mlp.down_proj.weight"
    weight = bench.plain().get_parameter(name)
    before = weight.data.clone()
    blocks = rounded(before).unflatten(1, (-1, 128))
    codes = blocks / (before.unflatten(1, (-1, 128)).abs().amax(-1, keepdim=True) / 7)
    assert torch.allclose(codes, codes.round(), atol=1e-4) and codes.abs().max() < 7.001
    assert alone(bench, [name]) > 1e-5 and torch.equal(weight.data, before)
    assert alone(bench, []) == 0
