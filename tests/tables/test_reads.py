"""What tables say of inputs, order and embeddings: against the trace of the same architecture, and when it is wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import transformers

from bridge.core.errors import TableError
from bridge.core.mappings import mappings, parse_table, read_table, table_files
from bridge.core.values import InputGroup
from bridge.planning.trace import trace_structure
from bridge.tables.architectures.arch import parse_arch
from bridge.tables.architectures.roles import load_roles
from bridge.tables.architectures.structure import structure
from bridge.tables.check import check_table
from tests.tables.checkpoints import BERT, GPT2, LLAMA, MIXTRAL, headers, saved_headers, tiny_fields
from tests.tables.tiny import CASES

TABLES = [parse_arch(read_table(path), load_roles()).architectures for path in table_files("arch")]
ARCHITECTURES = [name for names in TABLES for name in names if hasattr(transformers, name)]  # a trace is of its class
ALL = dict(CASES) | {name: (name, tiny_fields(name)) for name in ARCHITECTURES}
_CASED = {architecture for architecture, _ in CASES.values()}
# Of the heads that share a table one is traced here, another one in each table.
_LATER = _CASED | {
    name for at, names in enumerate(TABLES) for number, name in enumerate(names[1:]) if number % 3 != at % 3
}


@pytest.mark.slow  # a trace each
@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.product] * (case in _LATER)) for case in ALL])
def test_tables_say_what_a_trace_finds(case: str) -> None:
    architecture, extents = ALL[case]
    config, specs = saved_headers(architecture, extents)
    told = structure(config, specs)
    traced = trace_structure(SimpleNamespace(config=config, specs=specs, where=case))  # type: ignore[arg-type]
    assert traced.ungrouped == ""
    assert told.groups == traced.groups
    nested = sorted if architecture.startswith("DeepseekV4") else list  # whose modules nest otherwise than its names
    assert nested(told.order) == nested(name for name in traced.order if name not in told.ignored)
    assert told.embeddings == traced.embeddings
    assert told.states == traced.states
    assert nested(s.module for s in told.sites) == nested(s.module for s in traced.sites)
    assert {s.module for s in told.sites if s.keep == "router"} == {
        s.module for s in traced.sites if s.keep == "router"
    }


def test_every_tensor_is_in_the_order_once() -> None:
    for config in (LLAMA | {"tie_word_embeddings": True}, GPT2, BERT, MIXTRAL):
        specs = headers(config)
        found = structure(config, dict(reversed(specs.items())))
        assert len(set(found.order)) == len(found.order)
        assert set(found.order) == set(specs) | set(found.tied)


def test_the_order_of_layers_and_experts_is_that_of_their_numbers() -> None:
    config = MIXTRAL | {"num_hidden_layers": 11, "num_local_experts": 12}
    order = structure(config, headers(config)).order
    layers = [int(name.split(".")[2]) for name in order if name.startswith("model.layers.")]
    assert layers == sorted(layers)
    experts = [name.rpartition(".experts.")[2] for name in order if ".layers.10." in name and ".experts." in name]
    assert experts == [f"{e}.{w}.weight" for e in range(12) for w in ("w1", "w3", "w2")]


def test_bert_reads_the_norm_of_the_layer_before() -> None:
    groups = structure(BERT, headers(BERT)).groups
    assert [group.norm for group in groups] == [
        "bert.embeddings.LayerNorm", "bert.encoder.layer.0.output.LayerNorm", "bert.encoder.layer.1.output.LayerNorm"
    ]  # fmt: skip
    assert not any(group.alone for group in groups)


def test_what_is_one_matrix_is_not_a_group() -> None:
    assert structure(GPT2, headers(GPT2)).groups == ()


def test_gemma_adds_one() -> None:
    config = LLAMA | {"architectures": ["GemmaForCausalLM"], "num_hidden_layers": 1, "tie_word_embeddings": True}
    layer = "model.layers.0"
    assert structure(config, headers(config)).groups == (
        InputGroup(tuple(f"{layer}.self_attn.{x}_proj" for x in "qkv"), f"{layer}.input_layernorm", True, True),
        InputGroup((f"{layer}.mlp.gate_proj", f"{layer}.mlp.up_proj"), f"{layer}.post_attention_layernorm", True, True),
    )


# a row of another kind: attention and MLP beside each other, and no norm before them

_QKV = '"attn.q.weight, attn.k.weight, attn.v.weight"'
_MLP = '"mlp.gate.weight, mlp.up.weight"'


def _told(inputs: str) -> list[str]:
    """Return what the check says of Llama's table with `inputs` under [inputs]."""
    return check_table(parse_arch(parse_table(_llama(inputs), "mappings/arch/llama.toml"), load_roles()))


def _llama(inputs: str) -> str:
    text = (mappings() / "arch/llama.toml").read_text()
    return text.replace("[tied_if", f"[inputs]\n{inputs}\n\n[tied_if", 1)


def _groups(inputs: str) -> tuple[InputGroup, ...]:
    from bridge.tables.architectures.input_groups import groups_of
    from bridge.tables.architectures.match import match

    table = parse_arch(parse_table(_llama(inputs), "table"), load_roles())
    config: dict[str, Any] = LLAMA | {"num_hidden_layers": 1}
    return groups_of(match(table, "LlamaForCausalLM", config, headers(config)))


def test_attention_and_mlp_may_read_one_norm() -> None:
    (group,) = _groups(
        '"attn.q.weight, attn.k.weight, attn.v.weight, mlp.gate.weight, mlp.up.weight" = "mlp.norm.weight"'
    )
    assert [module.rpartition(".")[2] for module in group.modules] == [
        "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"
    ]  # fmt: skip
    assert (group.norm, group.alone) == ("model.layers.0.post_attention_layernorm", True)


def test_what_reads_the_residual_has_no_norm() -> None:
    first, second = _groups(f'{_QKV} = "residual"')
    assert (first.norm, first.alone) == ("", False)
    assert second.norm == "model.layers.0.post_attention_layernorm"


def test_a_shared_norm_is_not_read_alone() -> None:
    first, second = _groups(f'{_MLP} = "shared(mlp.norm.weight)"')
    assert (first.alone, second.alone) == (True, False)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        (f'{_QKV.replace("q.w", "query.w")} = "attn.norm.weight"', "role `attn.query.weight` is unknown"),
        (f'{_QKV} = "attn.norms.weight"', "nearest: attn.norm.weight"),
        (f'{_QKV} = "attn.o.weight"', "role `attn.o.weight` is a linear, not a norm"),
        ('"attn.norm.weight" = "residual"', "role `attn.norm.weight` is a norm, not a linear"),
        (f'{_QKV} = "residual"\n"attn.q.weight" = "residual"', "role `attn.q.weight` has two inputs"),
        (f'{_QKV} = "previous(attn.norm.weight)"', "is not an input"),
        (f'{_QKV} = "shared(shared(attn.norm.weight))"', "is not an input"),
        (f'{_QKV} = "attn.norm.weight +"', "is not an expression"),
    ],
)
def test_a_broken_row_is_told_with_its_place(inputs: str, says: str) -> None:
    with pytest.raises(TableError) as caught:
        _told(inputs)
    assert says in str(caught.value)
    assert str(caught.value).startswith("mappings/arch/llama.toml:")


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ('"attn.q.weight, attn.k.weight" = "attn.norm.weight"', "the input of `attn.v.weight` is missing"),
        (f'{_QKV} = "attn.add_norm.weight"', "has no `attn.add_norm.weight`"),
        (f'{_QKV} = "previous(mlp.norm.weight, embed.norm.weight)"', "has no `embed.norm.weight`"),
        (
            '"mlp.gate.weight, mlp.up.weight, mlp.fc1.weight" = "mlp.norm.weight"',
            "role `mlp.fc1.weight` has an input, but no row has the role",
        ),
    ],
)
def test_a_row_that_does_not_fit_its_table_is_told(inputs: str, says: str) -> None:
    (problem,) = _told(inputs)
    assert says in problem
    assert problem.startswith("mappings/arch/llama.toml:")


def test_a_table_without_the_norm_of_roles_toml_must_say_what_is_read() -> None:
    text = (mappings() / "arch/llama.toml").read_text()
    row = next(line for line in text.splitlines() if '"attn.norm.weight"' in line)
    told = "\n".join(
        check_table(parse_arch(parse_table(text.replace(row, ""), "mappings/arch/llama.toml"), load_roles()))
    )
    assert "mappings/arch/llama.toml has no `attn.norm.weight`" in told
    assert '[inputs] "attn.q.weight, attn.k.weight, attn.v.weight" = "residual"' in told


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('"mlp", "input_layernorm", "post', '"mlp", "post', "lacks children of `model.layers.{l}`: input_layernorm"),
        ('"self_attn", "mlp"', '"self_attn", "mlp", "mpl"', "no row has `mpl`"),
        ("\n[config]", 'scaled = ["attn.q.weight"]\n[config]', "role `attn.q.weight` is not an embedding"),
    ],
)
def test_a_wrong_order_is_told(old: str, new: str, says: str) -> None:
    text = (mappings() / "arch/llama.toml").read_text()
    assert old in text
    try:
        found = check_table(
            parse_arch(parse_table(text.replace(old, new, 1), "mappings/arch/llama.toml"), load_roles())
        )
    except TableError as error:
        found = [str(error)]
    assert says in "\n".join(found)
