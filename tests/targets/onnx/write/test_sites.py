from __future__ import annotations

import onnx_ir as ir
import pytest

from bridge.core.errors import ExportError
from bridge.targets.onnx.export.float_graph import Graph
from bridge.targets.onnx.write.sites import find_kv, find_sites
from tests.models.graphs import export_once as export_graph
from tests.targets.onnx.export.architectures import DECODERS, bert, gpt2, llama, qwen3_moe, resnet

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tied_llama() -> Graph:
    return export_graph(DECODERS["llama"]())


def transposed(node: ir.Node) -> bool:
    """Whether the node reads its weight transposed: over a Transpose, or by Gemm's transB."""
    weight = node.inputs[1]
    assert weight is not None
    producer = weight.producer()
    assert producer is None or producer.op_type == "Transpose"
    return (producer is not None) != bool(node.attributes.get_int("transB", 0))


def stored(node: ir.Node) -> ir.Value:
    """The initializer that the node reads as its weight, at most one Transpose away."""
    weight = node.inputs[1]
    assert weight is not None
    producer = weight.producer()
    value = weight if producer is None else producer.inputs[0]
    assert value is not None and value.is_initializer()
    return value


LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.slow
def test_every_linear_is_found_with_its_activation_and_the_transpose_between(tied_llama: Graph) -> None:
    modules = {f"model.layers.{i}.self_attn.{n}" for i in range(4) for n in LINEARS}
    uses = find_sites(tied_llama, modules)
    assert uses.keys() == modules
    for module, (node,) in uses.items():
        assert stored(node).name == f"{module}.weight"
        assert node.op_type == "MatMul"
        assert transposed(node)
    q, k, v = (uses[f"model.layers.3.self_attn.{n}"][0].inputs[0] for n in LINEARS[:3])
    assert q is k
    assert k is v
    assert uses["model.layers.2.self_attn.q_proj"][0].inputs[0] is not q


def test_a_tied_head_reads_the_stored_tensor_and_the_gather_of_the_embedding_is_left_out(tied_llama: Graph) -> None:
    (node,) = find_sites(tied_llama, ["lm_head"])["lm_head"]
    assert stored(node).name == "model.embed_tokens.weight"
    assert node.op_type == "MatMul"
    assert {user.op_type for user, _ in stored(node).uses()} == {"Transpose", "Gather"}


def test_a_module_without_a_matrix_product_is_an_error_that_names_all(tied_llama: Graph) -> None:
    with pytest.raises(ExportError) as caught:
        find_sites(tied_llama, ["model.layers.0.nope", "model.layers.1.nope", "model.norm"])
    assert "model.layers.{0..1}.nope is not in the graph" in str(caught.value)
    assert "model.norm is read by no MatMul, Gemm or Conv" in str(caught.value)


def test_keys_and_values_are_the_presents_and_are_read_inside(tied_llama: Graph) -> None:
    kv = find_kv(tied_llama)
    assert list(kv) == [0, 1, 2, 3]
    for layer, (key, value) in kv.items():
        assert (key.name, value.name) == (f"present.{layer}.key", f"present.{layer}.value")
        for one in (key, value):
            producer = one.producer()
            assert producer is not None
            assert producer.op_type == "Concat"
            assert len(list(one.uses())) >= 1


@pytest.mark.slow
def test_without_a_cache_keys_and_values_are_still_found_in_every_layer() -> None:
    graph = export_graph(llama(num_hidden_layers=3, tie_word_embeddings=True), cache=False)
    kv = find_kv(graph)
    assert list(kv) == list(range(3))
    assert len({id(value) for pair in kv.values() for value in pair}) == 6
    for key, value in kv.values():
        assert not key.is_graph_output()
        assert key.uses()
        assert value.uses()


@pytest.mark.slow
def test_conv1d_is_a_gemm_on_the_stored_layout() -> None:
    graph = export_graph(gpt2())
    modules = [f"transformer.h.{i}.{n}" for i in range(4) for n in ("attn.c_attn", "attn.c_proj", "mlp.c_fc")]
    for (node,) in find_sites(graph, modules).values():
        assert node.op_type == "Gemm"
        assert not transposed(node)
        assert node.inputs[1] is stored(node)


def test_linears_on_two_dimensions_are_gemm_with_transb() -> None:
    graph = export_graph(bert("BertForSequenceClassification"))
    modules = ["bert.pooler.dense", "classifier", "bert.encoder.layer.3.intermediate.dense"]
    forms = {name: (node.op_type, transposed(node)) for name, (node,) in find_sites(graph, modules).items()}
    assert forms["bert.pooler.dense"] == ("Gemm", True)
    assert forms["classifier"] == ("Gemm", True)
    assert forms["bert.encoder.layer.3.intermediate.dense"] == ("MatMul", True)


def test_convolutions_are_found_although_batch_norm_asks_for_their_shape() -> None:
    graph = export_graph(resnet())
    convolutions = {n.removesuffix(".weight") for n in graph.weights if n.endswith("convolution.weight")}
    uses = find_sites(graph, convolutions)
    assert len(uses) > 15
    assert [node.op_type for nodes in uses.values() for node in nodes] == ["Conv"] * len(uses)


def test_each_expert_is_a_matrix_of_its_own() -> None:
    graph = export_graph(qwen3_moe(num_hidden_layers=2, num_experts=3, mlp_only_layers=[0]))
    experts = [name for name in graph.weights if ".experts." in name]
    assert len(experts) == 3 * 3  # layer 0 is dense
    uses = find_sites(graph, experts)
    for name, (node,) in uses.items():
        assert stored(node).name == name
        assert len(stored(node).shape or ()) == 2
        assert node.op_type in ("MatMul", "Gemm")
        assert transposed(node)
    (gate,) = uses["model.layers.1.mlp.experts.gate_up_proj[2, gate]"]
    assert gate.inputs[0] is uses["model.layers.1.mlp.experts.gate_up_proj[2, up]"][0].inputs[0]
