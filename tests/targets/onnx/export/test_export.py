from __future__ import annotations

import copy
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from onnx_ir.passes.common import ClearMetadataAndDocStringPass
from torch.export import Dim

from bridge.core.errors import ExportError, UsageError
from bridge.targets.onnx.export.export import export_graph
from bridge.targets.onnx.export.float_graph import Graph
from bridge.targets.onnx.export.traced import _bounded
from tests.models.graphs import export_once
from tests.targets.onnx.export import onnx_parity as parity
from tests.targets.onnx.export.architectures import (
    CORE,
    DECODERS,
    bert,
    dinov3,
    gemma3,
    gpt2,
    llama,
    mixtral,
    resnet,
    vit,
)

# float32 in another order of additions; a wrong mask or a swapped weight reads 1e-1 and more.
TOLERANCE = 2e-5
_LATER = [pytest.param(name, marks=pytest.mark.product) for name in DECODERS if name not in CORE]


def _weights_of(model: Any) -> set[str]:
    tied = set(model.all_tied_weights_keys)
    return {name for name, _ in model.state_dict().items() if name not in tied}


@pytest.fixture(scope="module")
def exported() -> Callable[[str], Graph]:
    """Export a decoder once for all tests of this file; data that one test fills in do not matter to the others."""
    return functools.cache(lambda name: export_once(DECODERS[name]()))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CORE, *_LATER])
def test_one_pass_chunks_and_single_tokens_with_left_padding_give_torchs_logits(
    name: str, exported: Callable[[str], Graph], tmp_path: Path
) -> None:
    graph = exported(name)
    assert graph.note == ""
    model = parity.live_model(DECODERS[name]())
    assert {live.split("[")[0] for live in graph.weights.values()} == _weights_of(model)
    session = parity.fill(graph, model, tmp_path)
    ids, mask = parity.padded_batch()
    want = parity.torch_logits(model, ids, mask)[mask == 1]
    for sizes in ([19], [5, 7, 7], [1] * 19):
        got = parity.in_chunks(session, ids, mask, sizes)[mask == 1]
        assert parity.relative(got, want) < TOLERANCE, sizes


@pytest.mark.slow
@pytest.mark.parametrize("opset", [21, pytest.param(23, marks=pytest.mark.product)])
def test_without_a_cache_the_graph_gives_the_same_logits_and_every_weight_is_in_it(opset: int, tmp_path: Path) -> None:
    config = llama(num_hidden_layers=3, tie_word_embeddings=True)
    graph = export_once(config, cache=False, opset=opset)
    assert [v.name for v in graph.model.graph.inputs] == ["input_ids", "attention_mask", "position_ids"]
    assert [v.name for v in graph.model.graph.outputs] == ["logits"]
    model = parity.live_model(config)
    assert set(graph.weights) == _weights_of(model)
    assert graph.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    ids, mask = parity.padded_batch()
    got = parity.in_chunks(parity.fill(graph, model, tmp_path), ids, mask, [19])
    assert parity.relative(got[mask == 1], parity.torch_logits(model, ids, mask)[mask == 1]) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["llama_1_layer", *(pytest.param(name, marks=pytest.mark.product) for name in ("llama", "gemma3", "mixtral"))],
)
def test_opset_23_gives_the_same_logits_through_attention_nodes(name: str, tmp_path: Path) -> None:
    config = gemma3(2) if name == "gemma3" else DECODERS[name]()
    graph = export_once(config, opset=23)
    assert graph.note == ""
    assert any(node.op_type == "Attention" for node in graph.model.graph)
    assert graph.model.ir_version == 11
    model = parity.live_model(config)
    ids, mask = parity.padded_batch()
    got = parity.in_chunks(parity.fill(graph, model, tmp_path), ids, mask, [6, 13])
    assert parity.relative(got[mask == 1], parity.torch_logits(model, ids, mask)[mask == 1]) < TOLERANCE


def _text_feeds() -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(3, 101, (3, 17))
    mask = np.ones_like(ids)
    mask[1, 11:] = 0
    kinds = np.repeat([[0] * 9 + [1] * 8], 3, 0)
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": kinds}


ENCODERS = {
    "BertModel": ["last_hidden_state", "pooler_output"],
    "BertForMaskedLM": ["logits"],
    "BertForSequenceClassification": ["logits"],
    "BertForTokenClassification": ["logits"],
    "BertForQuestionAnswering": ["start_logits", "end_logits"],
}


# tests/targets/trt/test_trt_oracle.py has heads of words and of a text; that of tokens differs from the last states by
# one matrix.
LATER = ("BertForMaskedLM", "BertForSequenceClassification", "BertForTokenClassification")


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=[pytest.mark.product] * (name in LATER)) for name in ENCODERS],
)
def test_encoder_outputs_equal_torchs_at_every_real_token(architecture: str, tmp_path: Path) -> None:
    config = bert(architecture)
    graph = export_once(config)
    assert graph.note == ""
    assert [v.name for v in graph.model.graph.outputs] == ENCODERS[architecture]
    model = parity.live_model(config)
    feeds = _text_feeds()
    with torch.no_grad():
        want = model(**{name: torch.tensor(array) for name, array in feeds.items()})
    for name, got in parity.run(parity.fill(graph, model, tmp_path), feeds).items():
        real = feeds["attention_mask"] == 1 if got.shape[1] == 17 else slice(None)
        assert parity.relative(got[real], want[name].numpy()[real]) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("config", [pytest.param(vit(), marks=pytest.mark.product), resnet()], ids=["vit", "resnet"])
def test_image_classifiers_equal_torch_at_another_batch_size(config: Any, tmp_path: Path) -> None:
    graph = export_once(config)
    model = parity.live_model(config)
    assert {n for n, t in model.state_dict().items() if t.is_floating_point()} == set(graph.weights)
    size = getattr(config, "image_size", 224)
    pixels = np.random.default_rng(0).standard_normal((3, 3, size, size)).astype(np.float32)
    got = parity.run(parity.fill(graph, model, tmp_path), {"pixel_values": pixels})["logits"]
    with torch.no_grad():
        assert parity.relative(got, model(torch.tensor(pixels)).logits.numpy()) < TOLERANCE


@pytest.mark.slow
def test_half_precision_graph_has_half_weights_and_stays_near_torch(tmp_path: Path) -> None:
    config = llama(num_hidden_layers=1)
    graph = export_once(config, dtype="fp16")
    values = graph.model.graph.initializers
    assert {values[name].dtype for name in graph.weights} == {ir.DataType.FLOAT16}
    model = parity.live_model(config)
    ids, mask = parity.padded_batch()
    got = parity.in_chunks(parity.fill(graph, model, tmp_path), ids, mask, [19]).astype(np.float32)
    assert parity.relative(got[mask == 1], parity.torch_logits(model, ids, mask)[mask == 1]) < 2e-2


def _saved(graph: Graph) -> bytes:
    assert graph.note == ""
    ClearMetadataAndDocStringPass()(graph.model)
    return ir.to_proto(graph.model).SerializeToString(deterministic=True)


@pytest.mark.slow
def test_same_config_gives_the_same_bytes_and_no_local_path() -> None:
    """In another process, which hashes differently, and from the config's content."""
    script = (
        "import hashlib; from tests.targets.onnx.export import test_export as t; "
        "print(hashlib.sha256(t._saved(t.export_graph(t.gpt2().to_dict()))).hexdigest())"
    )
    saved = _saved(export_once(gpt2()))
    for word in (b"site-packages", b".py", b"_Flat", b"bridge.module"):
        assert word not in saved
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[4])}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-1] == hashlib.sha256(saved).hexdigest()


@pytest.mark.slow
def test_export_changes_neither_the_config_nor_global_state() -> None:
    from torch.nn.modules import module
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def state() -> Any:
        hooks = len(module._global_parameter_registration_hooks)
        return torch.get_default_dtype(), sorted(ALL_EXPERTS_FUNCTIONS.valid_keys()), hooks

    config = mixtral(num_hidden_layers=1, num_local_experts=3)
    before, known = copy.deepcopy(config.to_dict()), state()
    graph = export_graph(config, dtype="bfloat16", cache=False)
    assert (config.to_dict(), state()) == (before, known)
    experts = [n for n in graph.weights if "experts" in n]
    assert len(experts) == 3 * 3
    assert "model.layers.0.mlp.experts.gate_up_proj[2, up]" in experts


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"model_type": "nonesuch"}, ExportError, "'nonesuch' is not in transformers .*upgrade"),
        ({"model_type": None}, ExportError, "no `model_type`"),
        ({"architectures": None}, UsageError, "is of no task .*causal-lm"),
        (
            {"architectures": ["LlamaForLove"]},
            UsageError,
            "LlamaForLove is of no task that bridge writes graphs for .*causal-lm",
        ),
        ({"hidden_act": "nonesuch"}, ExportError, "cannot build it from this config"),
    ],
)
def test_a_config_that_cannot_be_exported_says_why(change: dict[str, Any], error: Any, says: str) -> None:
    config = {k: v for k, v in {**llama().to_dict(), **change}.items() if v is not None}
    with pytest.raises(error, match=says):
        export_graph(config)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"task": "causal"}, "nearest: causal-lm"),
        ({"task": "masked-lm"}, "no masked-lm head .*causal-lm"),
        ({"opset": 20}, "opset 20 .*known: 21"),
        ({"dtype": "float31"}, "nearest: float32"),
        ({"dtype": "int8"}, "int8 .*float16"),
    ],
)
def test_wrong_options_name_the_right_ones(options: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        export_graph(llama(), **options)


@pytest.mark.slow
def test_an_architecture_without_keys_and_values_is_refused_with_its_reason() -> None:
    config = {"model_type": "rwkv", "architectures": ["RwkvForCausalLM"], "hidden_size": 48, "num_hidden_layers": 2}
    with pytest.raises(ExportError, match=r"RwkvForCausalLM: .*keys and values per layer[\s\S]*hint .*target `hf`"):
        export_graph(config)


@pytest.mark.slow
def test_layers_that_depend_on_their_place_are_exported_in_full_and_the_note_says_so(tmp_path: Path) -> None:
    config = gpt2(n_layer=3, scale_attn_by_inverse_layer_idx=True)
    graph = export_once(config)
    assert graph.note == "no kind of layer occurs more than twice"
    model = parity.live_model(config)
    ids, mask = parity.padded_batch()
    got = parity.in_chunks(parity.fill(graph, model, tmp_path), ids, mask, [19])
    assert parity.relative(got[mask == 1], parity.torch_logits(model, ids, mask)[mask == 1]) < TOLERANCE


@pytest.mark.slow
def test_caches_are_named_per_layer_and_in_order(exported: Callable[[str], Graph]) -> None:
    graph = exported("gemma3")
    slots = [f"{layer}.{kind}" for layer in range(8) for kind in ("key", "value")]
    inputs = [v.name for v in graph.model.graph.inputs]
    assert inputs == ["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{s}" for s in slots)]
    outputs = {v.name: str(v.shape) for v in graph.model.graph.outputs}
    assert list(outputs) == ["logits", *(f"present.{s}" for s in slots)]
    assert outputs["logits"] == "[batch,sequence,101]"
    assert outputs["present.7.key"] == "[batch,2,total_sequence,10]"


@pytest.mark.slow
def test_a_graph_does_not_depend_on_what_ran_before() -> None:
    """DINOv3 keeps the coordinates of its patches by shape and device: a kept tensor would become a constant."""
    config = dinov3()
    first = ir.to_proto(export_graph(config).model).SerializeToString(deterministic=True)
    model = parity.live_model(config)
    with torch.no_grad():
        for batch in (1, 2):
            assert type(model(torch.ones(batch, 3, 24, 24)).last_hidden_state) is torch.Tensor
    assert ir.to_proto(export_graph(config).model).SerializeToString(deterministic=True) == first


ALONE = """
import builtins, json, math, sys, threading, types, torch
from bridge.targets.onnx.export.traced import trace as _trace

class Model(torch.nn.Module):
    def __init__(self, *first):
        super().__init__()
        self.first = list(first)
    def forward(self, x):
        while self.first:
            self.first.pop(0)()
        return x + 1

def trace(*first):
    _trace(types.SimpleNamespace(module=Model(*first), args=(torch.ones(2),), dynamic_shapes=None))

def start(function, seconds):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(seconds)
    threads.append(thread)

def kernel():
    import numpy as np
    from bridge.quant.codec.arrays import amax
    told["a kernel is called"] = amax(np.ones((1, 1), np.uint16), "bfloat16", 1, 1).size

def other():
    trace()
    told["another graph is traced meanwhile"] |= tracing

before, threads, tracing = (max, min, math.pow), [], True
told = {"another graph is traced meanwhile": False}
trace(lambda: start(kernel, 60), lambda: start(other, 1))
tracing = False
for thread in threads:
    thread.join()
told["Python's functions are back"] = (builtins.max, builtins.min, math.pow) == before
print(json.dumps(told))
"""


@pytest.mark.slow
def test_a_graph_is_traced_alone() -> None:
    """torch.export replaces max, min and math.pow of the process meanwhile."""
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "another graph is traced meanwhile": False,
        "a kernel is called": 1,
        "Python's functions are back": True,
    }, done.stderr


def test_bounds_that_torch_suggests_are_taken_beside_axes_without_a_name() -> None:
    batch, past = Dim("batch"), Dim("past", max=50)
    shapes = ({0: batch, 1: Dim.DYNAMIC}, [{0: batch, 2: past}])
    text = "Suggested fixes:\n  past = Dim('past', max=94)\n  batch = Dim('batch', max=8)"
    ids, (kept,) = _bounded(shapes, text)
    assert ids[0] is kept[0] and (ids[0].max, kept[2].max, ids[1]) == (8, 50, Dim.DYNAMIC)
    (_, (other,)) = _bounded(shapes, "Not all values of past = L[0] satisfy size != 1")
    assert (other[2].min, other[2].max) == (2, 50)
    assert _bounded(shapes, "something else") is None
