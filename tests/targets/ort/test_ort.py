"""Decoders of target `ort` against transformers: padding on the left, a cache, a cache in one shared buffer.

2e-5 of the largest logit: fused operators sum in another order than torch; 5e-5 is what two correct float32 graphs of a
few random layers differ by (tests/targets/trt/test_trt_oracle.py).
"""

from __future__ import annotations

import copy
import functools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

import bridge
from bridge.core.errors import BridgeError
from bridge.core.formats.safetensors import SafetensorsFile
from bridge.reporting.summary import advice
from bridge.targets.onnx.run.runtime import Runtime
from bridge.targets.tasks import listed
from bridge.verification.parity import Parity
from tests.covering import usual
from tests.models.trt_families import VOCAB, decoder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("graphs_once")]
LLAMA = Path(__file__).parents[3] / "examples" / "models" / "tiny-llama"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3", "phi3")
EACH = usual([family for family in FAMILIES if family != "gemma"], FAMILIES)  # whose norms Gemma 3 has, too
CLOSE = 2e-5
PADDING = 5
LAYER = "model.layers.0.self_attn"


@functools.cache
def model_of(family: str) -> Any:
    return decoder(family)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return functools.cache(functools.partial(_write, tmp_path_factory.mktemp("ort")))


def _write(root: Path, family: str) -> Path:
    bridge.convert(model_of(family), "ort", "none", root / family, verify=False)
    return root / family


def inputs(rows: int = 2, length: int = 24) -> tuple[np.ndarray, np.ndarray]:
    """Ids, longer than the window of 7, and a mask whose first row begins with padding."""
    ids = np.random.default_rng(5).integers(3, VOCAB, (rows, length))
    mask = np.ones_like(ids)
    mask[0, :PADDING] = 0
    return ids, mask


def theirs(model: Any, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    positions = np.maximum(mask.cumsum(-1) - 1, 0)
    given = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    with torch.no_grad():
        out = model(**{name: torch.as_tensor(array) for name, array in given.items()}, use_cache=False)
    return out.logits.numpy()


def assert_close(ours: np.ndarray, expected: np.ndarray) -> None:
    assert np.isfinite(ours).all()
    np.testing.assert_allclose(ours, expected, atol=CLOSE * np.abs(expected).max(), rtol=0)


@pytest.mark.parametrize("family", EACH)
def test_left_padding_is_not_seen(family: str, written: Any) -> None:
    ids, mask = inputs()
    ours = Runtime(written(family)).run({"input_ids": ids, "attention_mask": mask})["logits"]
    seen = mask > 0
    assert_close(ours[seen], theirs(model_of(family), ids, mask)[seen])


@pytest.mark.parametrize("family", EACH)
def test_a_prefix_and_tokens_after_it_equal_the_whole(family: str, written: Any) -> None:
    """The cache of each part goes to the next. The operator takes several tokens after a past for one row only."""
    runtime = Runtime(written(family))
    singles = [(n, n + 1) for n in range(19, 24)]
    for rows, cuts in ((2, [(0, 19), *singles]), (1, [(0, 15), (15, 19), *singles])):
        ids, mask = (array[:rows] for array in inputs())
        past: dict[str, np.ndarray] = {}
        parts = []
        for begin, end in cuts:
            feeds = {"input_ids": ids[:, begin:end], "attention_mask": mask[:, :end], **past}
            out = runtime.run(feeds)
            parts.append(out["logits"])
            past = {n.replace("present.", "past_key_values."): a for n, a in out.items() if n.startswith("present.")}
        seen = mask > 0
        assert_close(np.concatenate(parts, 1)[seen], theirs(model_of(family), ids, mask)[seen])


@pytest.mark.parametrize("family", EACH)
def test_genai_decodes_through_one_shared_buffer(family: str, written: Any) -> None:
    og = pytest.importorskip("onnxruntime_genai")
    directory, (ids, _), steps = written(family), inputs(), 8
    assert json.loads((directory / "genai_config.json").read_text())["search"]["past_present_share_buffer"] is True
    model = og.Model(str(directory))
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=64, batch_size=len(ids), do_sample=False)
    generator = og.Generator(model, params)
    generator.append_tokens(ids.astype(np.int32))
    logits = []
    for _ in range(steps):
        generator.generate_next_token()
        logits.append(generator.get_output("logits")[:, -1].copy())
    tokens = np.array([generator.get_sequence(row) for row in range(len(ids))])
    expected = theirs(model_of(family), tokens[:, :-1], np.ones_like(tokens[:, :-1]))[:, ids.shape[1] - 1 :]
    assert_close(np.array(logits).swapaxes(0, 1), expected)


@pytest.mark.parametrize("family", EACH)
def test_every_layer_is_fused(family: str, written: Any) -> None:
    graph = ir.load(written(family) / "model.onnx").graph
    kinds = [node.op_type for node in graph]
    layers = model_of(family).config.num_hidden_layers
    assert kinds.count("GroupQueryAttention") == layers
    fused = [node for node in graph if node.op_type == "GroupQueryAttention"]
    assert "RotaryEmbedding" not in kinds and all(node.attributes["do_rotary"].as_int() == 1 for node in fused)
    packed = [node.inputs[1] is None and node.inputs[2] is None for node in fused]
    assert packed == [family not in ("qwen3", "gemma3")] * layers  # norms of queries and keys lie between
    assert "ReduceMean" not in kinds and "Attention" not in kinds
    assert "Pow" not in kinds and "Neg" not in kinds


def test_every_family_that_is_named_is_tested() -> None:
    assert {type(model_of(family)).__name__ for family in FAMILIES} == set(listed("ort", "classes"))


@pytest.mark.parametrize("scheme", ["int4_wo", "int8_wo"])
def test_quantized_weights_are_those_of_target_trt(scheme: str, tmp_path: Path) -> None:
    """The same codes and scales, those of queries, keys and values side by side; so the same logits."""
    report = bridge.convert(LLAMA, "ort", scheme, tmp_path / "ort")
    assert report.passed and not report.findings
    assert {name for name, _ in report.parity.layers} >= {f"{LAYER}.qkv_proj", f"{LAYER}.o_proj"}
    bridge.convert(LLAMA, "trt", scheme, tmp_path / "trt", verify=False)
    assert_joined(*(tmp_path / name / "model.safetensors" for name in ("ort", "trt")))
    ids, mask = inputs()
    feeds = {"input_ids": ids, "attention_mask": mask}
    ours, plain = (Runtime(tmp_path / name).run(feeds)["logits"][mask > 0] for name in ("ort", "trt"))
    assert_close(ours, plain)


def assert_joined(ours: Path, plain: Path) -> None:
    """Every tensor of `ours` is one of `plain`, or three of them along `out`."""
    written, apart = SafetensorsFile(ours), SafetensorsFile(plain)
    assert set(written.specs) == {re.sub(r"\b[qkv]_proj", "qkv_proj", name) for name in apart.specs}
    for name in written.specs:
        letters = "qkv" if "qkv_proj" in name else [""]
        parts = [np.atleast_1d(apart.read(name.replace("qkv_proj", f"{letter}_proj"))) for letter in letters]
        np.testing.assert_array_equal(np.atleast_1d(written.read(name)), np.concatenate(parts, axis=-1))


def rounded(model: Any) -> Any:
    """A copy with the weights of INT4 in blocks of 128, head and embedding as they are."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                blocks = module.weight.view(len(module.weight), -1, 128)
                scale = blocks.abs().amax(-1, keepdim=True) / 7
                blocks.copy_((blocks / scale).round() * scale)
    return model


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "phi3"])
def test_int4_has_one_product_for_queries_keys_and_values(family: str, tmp_path: Path) -> None:
    """In the file, whose logits are those of dequantized weights, and in the graph that ONNX Runtime makes of it."""
    model = model_of(family)
    bridge.convert(model, "ort", "int4_wo", tmp_path / "out", verify=False)
    ids, mask = inputs()
    ours = Runtime(tmp_path / "out").run({"input_ids": ids, "attention_mask": mask})["logits"]
    assert_close(ours[mask > 0], theirs(rounded(model), ids, mask)[mask > 0])
    kinds = [node.op_type for node in optimized(tmp_path / "out")]
    layers = model.config.num_hidden_layers
    products = 4 if family == "phi3" else 5  # its gate and up are one matrix, too
    assert kinds.count("MatMulNBits") == products * layers and "DequantizeLinear" not in kinds
    splits = {"qwen3": layers, "phi3": layers}  # norms of queries and keys lie between; gate and up of one product
    assert kinds.count("Split") == splits.get(family, 0)


def optimized(directory: Path) -> ir.Graph:
    """The graph that ONNX Runtime runs."""
    import onnxruntime

    options, path = onnxruntime.SessionOptions(), directory / "optimized.onnx"
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 3  # it warns that the file fits this machine only
    onnxruntime.InferenceSession(directory / "model.onnx", options, providers=["CPUExecutionProvider"])
    return ir.load(path).graph


@pytest.mark.parametrize(
    ("rules", "joined"),
    [
        ('base = "int4_wo"', True),
        ('base = "int8_wo"', True),
        ('base = "int4_awq"', False),  # a pre-scale each
        ('base = "int4_wo"\n[[rule]]\nroles = ["attn.v.weight"]\nquant = "int8_wo"', False),
        ('base = "int4_wo"\n[[rule]]\nroles = ["attn.k.weight"]\nquant = "none"', False),
        (
            'base = "int4_wo"\n[[rule]]\nroles = ["attn.q.weight", "attn.k.weight", "attn.v.weight"]\nquant = "none"',
            True,
        ),
    ],
)
def test_what_differs_in_more_than_its_width_stays_apart(rules: str, joined: bool, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(rules)
    plan = bridge.plan(LLAMA, "ort", str(recipe))
    names = {output.spec.name for output in plan.outputs}
    assert (f"{LAYER}.qkv_proj.weight" in names, f"{LAYER}.k_proj.weight" in names) == (joined, not joined)


@pytest.mark.parametrize("scheme", ["int4_wo", "int8_wo"])
def test_codes_of_a_quantized_source_are_copied_side_by_side(scheme: str, tmp_path: Path) -> None:
    bridge.convert(LLAMA, "hf", scheme, tmp_path / "hf", format="compressed-tensors", verify=False)
    report = bridge.convert(tmp_path / "hf", "ort", out=tmp_path / "ort")
    assert report.passed and not report.findings and not [note for note in report.notes if "dequantized" in note]
    bridge.convert(tmp_path / "hf", "trt", out=tmp_path / "trt", dtype="fp32", verify=False)
    assert_joined(*(tmp_path / name / "model.safetensors" for name in ("ort", "trt")))


def test_a_number_that_is_not_finite_is_told_with_the_matrices_it_may_be_in(tmp_path: Path) -> None:
    model = copy.deepcopy(model_of("llama"))
    model.model.layers[1].self_attn.v_proj.weight.data[3, 5] = torch.nan
    for scheme in ("none", "int4_wo"):
        with pytest.raises(BridgeError, match=r"layers\.1\.self_attn\.v_proj\.weight"):
            bridge.convert(model, "ort", scheme, tmp_path / scheme, verify=False)


def test_advice_names_the_modules_of_a_joined_matrix() -> None:
    plan = bridge.plan(LLAMA, "ort", "int4_wo")
    layers = tuple((step.matrix, 0.5 if step.matrix == f"{LAYER}.qkv_proj" else 0.01) for step in plan.quantized)
    (row,) = advice(plan, Parity(layers=layers))
    assert row.modules == tuple(f"{LAYER}.{part}_proj" for part in "qkv") and row.share > 0.98


@pytest.mark.parametrize(("dtype", "why"), [("bfloat16", "no CPU kernels for bfloat16"), ("float16", "use target trt")])
def test_matrices_of_a_half_source_stay_half_and_compute_as_their_float32_casts(
    dtype: str, why: str, tmp_path: Path
) -> None:
    """A large tied embedding took twice the bytes that it has in its source."""
    half = decoder("gemma3").to(getattr(torch, dtype))  # tied
    report = bridge.convert(half, "ort", "none", tmp_path / "out", verify=False)
    assert [note for note in report.notes if f"stay {dtype}" in note and why in note]
    assert not [note for note in report.notes if "stored in half precision" in note]
    specs = SafetensorsFile(tmp_path / "out" / "model.safetensors").specs
    assert {spec.dtype for spec in specs.values() if len(spec.shape) > 1} == {dtype}
    assert {spec.dtype for spec in specs.values() if len(spec.shape) == 1} == {"float32"}
    runtime, (ids, mask) = Runtime(tmp_path / "out"), inputs()
    assert not runtime.substitute  # the file itself runs
    seen, ours = mask > 0, runtime.run({"input_ids": ids, "attention_mask": mask})["logits"]
    model = decoder("gemma3")  # whose buffers were never rounded
    model.load_state_dict(half.state_dict())
    assert_close(ours[seen], theirs(model, ids, mask)[seen])


def test_the_embedding_is_cast_behind_the_rows_that_are_looked_up(tmp_path: Path) -> None:
    bridge.convert(decoder("llama").bfloat16(), "ort", "int4_wo", tmp_path / "out", verify=False)
    graph = ir.load(tmp_path / "out" / "model.onnx").graph
    ((gather, _),) = graph.initializers["model.embed_tokens.weight"].uses()
    assert gather.op_type == "Gather" and [node.op_type for node, _ in gather.outputs[0].uses()] == ["Cast"]
    assert not [note for note in bridge.plan(LLAMA, "ort", "none").notes if "float32" in note]


def test_pre_scales_of_awq_are_in_the_graph(tmp_path: Path) -> None:
    report = bridge.convert(LLAMA, "ort", "int4_awq", tmp_path / "out", samples=4, sequence=32)
    assert report.passed and not report.findings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quant": "fp8"}, "target ort quantizes weights only"),
        ({"quant": "nvfp4_wo"}, "no CPU kernel of float4_e2m1fn weights; use int4_wo or int8_wo"),
        ({"quant": "int4_wo", "kv": "fp8"}, "keeps a float32 cache"),
        ({"quant": "none", "dtype": "bf16"}, "target ort has no option 'dtype'"),
        ({"quant": "none", "cache": False}, "target ort has no option 'cache'"),
    ],
)
def test_what_the_kernels_lack_is_refused_by_name(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match=message):
        bridge.plan(LLAMA, "ort", **given)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "mixtral"])
def test_other_architectures_are_refused_with_the_target_to_use(family: str) -> None:
    model = decoder(family)
    with pytest.raises(
        BridgeError, match=rf"{type(model).__name__}: no test shows that its graph fuses; use target trt"
    ):
        bridge.plan(model, "ort", "none")
