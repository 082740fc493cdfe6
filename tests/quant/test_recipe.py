"""Recipes: rules by role, name and layer; whatever does not fit the model is an error that names the rule."""

from __future__ import annotations

from pathlib import Path

import pytest

from bridge.core.errors import SchemeError, UsageError
from bridge.core.parsing.problems import ENOUGH, MAX_KINDS
from bridge.core.values import Format, Site
from bridge.quant.schemes.load import load_scheme
from bridge.quant.schemes.scheme import Scheme

LAYERS = 5


def sites() -> list[Site]:
    """Five layers: fused qkv, o, gate, down; and a head that is kept."""
    found = []
    for layer in range(LAYERS):
        fused = ("attn.q.weight", "attn.k.weight", "attn.v.weight")
        for name, roles in (
            ("attn.qkv", fused),
            ("attn.o_proj", ("attn.o.weight",)),
            ("mlp.gate", ("mlp.gate.weight",)),
            ("mlp.down", ("mlp.down.weight",)),
        ):
            module = f"model.layers.{layer}.{name}"
            found.append(Site(module, f"{module}.weight", "out_in", roles, layer))
    return [*found, Site("lm_head", "lm_head.weight", "out_in", ("lm_head.weight",), keep="output head")]


def recipe(path: Path, text: str) -> Scheme:
    file = path / "mine.toml"
    file.write_text(text)
    return load_scheme(file)


def outcome(scheme: Scheme, module: str) -> Format | str:
    bound = scheme.bound(sites())
    return next(bound.format_of(site) for site in sites() if site.module == module)


def quantized(scheme: Scheme) -> set[str]:
    bound = scheme.bound(sites())
    return {site.module for site in sites() if isinstance(bound.format_of(site), Format)}


def test_rules_match_by_role_name_and_layer(tmp_path: Path) -> None:
    scheme = recipe(
        tmp_path,
        """
        base = "fp8"
        [[rule]]
        layers = [0, -1, "2..3"]
        modules = ["*.o_proj"]
        quant = "none"
        [[rule]]
        roles = ["mlp.*.weight"]
        layers = [1]
        quant = "int8_wo"
        """,
    )
    assert "rule 1" in str(outcome(scheme, "model.layers.4.attn.o_proj"))
    kept = {f"model.layers.{n}.attn.o_proj" for n in (0, 2, 3, 4)}
    assert quantized(scheme) == {s.module for s in sites()} - kept - {"lm_head"}
    assert outcome(scheme, "model.layers.1.mlp.gate") == load_scheme("int8_wo").format
    assert outcome(scheme, "model.layers.2.mlp.gate") == load_scheme("fp8").format


def test_a_rule_quantizes_what_the_architecture_keeps(tmp_path: Path) -> None:
    scheme = recipe(tmp_path, 'base = "fp8"\n[[rule]]\nmodules = ["lm_head"]\nquant = "int8_wo"')
    assert outcome(scheme, "lm_head") == load_scheme("int8_wo").format


def test_gates_follow_the_numbers_in_use(tmp_path: Path) -> None:
    scheme = recipe(tmp_path, 'base = "fp8"\n[[rule]]\nlayers = [0]\nquant = "int4_wo"').bound(sites())
    assert scheme.gate_of(sites()[0]) == load_scheme("int4_wo").parity.tensor
    assert scheme.gate_of(sites()[4]) == load_scheme("fp8").parity.tensor
    assert scheme.parity.output.cosine == load_scheme("int4_wo").parity.output.cosine


def test_kv_options_policy_and_parity_can_be_set(tmp_path: Path) -> None:
    scheme = recipe(
        tmp_path,
        """
        base = "int8_sq"
        kv = "fp8"
        [options]
        alpha = 0.7
        [policy]
        never_seen = "floor"
        """,
    )
    assert scheme.kv and scheme.kv.dtype == "float8_e4m3fn"
    assert dict(scheme.options)["alpha"] == 0.7
    assert (scheme.policies.never_seen, scheme.policies.zero) == ("floor", "peers")
    with pytest.raises(UsageError, match="contradicts"):
        load_scheme(tmp_path / "mine.toml", kv="int8")


def test_options_of_a_rules_algorithm_come_along(tmp_path: Path) -> None:
    scheme = recipe(tmp_path, 'base = "fp8"\n[[rule]]\nlayers = [0]\nquant = "int8"')
    assert dict(scheme.options)["alpha"] == dict(load_scheme("int8").options)["alpha"]


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ('modules = ["*.o_prj"]', r"rule 1: matches no module.*model.layers.\{0..4\}.attn.qkv"),
        ('roles = ["mlp.up.weight"]', "rule 1: matches no module; known: .*nearest: mlp.gate.weight"),
        ("layers = [5]", "layers 0 to 4; `layers` reaches 5"),
        ("layers = [-6]", "layers 0 to 4; `layers` reaches -1"),
        ('roles = ["attn.q.weight"]', r"names attn.q.weight but model.layers.\{0..4\}.attn.qkv has attn.k.weight"),
    ],
)
def test_a_rule_that_does_not_fit_the_model_is_an_error(tmp_path: Path, rule: str, said: str) -> None:
    scheme = recipe(tmp_path, f'base = "fp8"\n[[rule]]\n{rule}\nquant = "none"')
    with pytest.raises(SchemeError, match=said):
        scheme.bound(sites())


def test_all_rules_that_do_not_fit_come_in_one_message(tmp_path: Path) -> None:
    scheme = recipe(
        tmp_path,
        'base = "fp8"\n[[rule]]\nlayers = [9]\nquant = "none"\n[[rule]]\nmodules = ["nobody"]\nquant = "none"',
    )
    with pytest.raises(SchemeError) as raised:
        scheme.bound(sites())
    assert "rule 1" in str(raised.value) and "rule 2" in str(raised.value)


def test_roles_need_a_table(tmp_path: Path) -> None:
    scheme = recipe(tmp_path, 'base = "fp8"\n[[rule]]\nroles = ["mlp.*"]\nquant = "none"')
    bare = [Site("a.b", "a.b.weight", "out_in", (), 0)]
    with pytest.raises(SchemeError, match="no table, so its modules have no roles; match `modules`"):
        scheme.bound(bare)


TWO = """
base = "fp8"
[[rule]]
roles = ["mlp.*.weight"]
quant = "int8_wo"
[[rule]]
layers = [0]
quant = "{quant}"
{extra}
"""


def test_rules_that_contradict_are_an_error_that_names_both(tmp_path: Path) -> None:
    scheme = recipe(tmp_path, TWO.format(quant="none", extra=""))
    with pytest.raises(SchemeError, match=r"rule 1 \(quant 'int8_wo'\) and rule 2 \(quant 'none'\) both match"):
        scheme.bound(sites())


def test_override_lets_the_later_rule_win(tmp_path: Path) -> None:
    scheme = recipe(tmp_path, TWO.format(quant="none", extra="override = true"))
    assert isinstance(outcome(scheme, "model.layers.0.mlp.gate"), str)
    assert outcome(scheme, "model.layers.1.mlp.gate") == load_scheme("int8_wo").format


def test_rules_that_agree_do_not_contradict(tmp_path: Path) -> None:
    assert outcome(recipe(tmp_path, TWO.format(quant="int8_wo", extra="")), "model.layers.0.mlp.gate")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[rule]]\nlayers = [0]\nquant = 'none'", '`base` is missing.*base = "fp8"'),
        ("base = 'fp9'", "base: quant='fp9' is unknown"),
        ("base = 'other.toml'", "starts from a scheme by name"),
        ("base = 'fp8'\nrules = 1", "key `rules` is unknown.*nearest: rule"),
        ("base = 'fp8'\n[[rule]]\nquant = 'none'", "rule 1: does not say what it matches"),
        ("base = 'fp8'\n[[rule]]\nlayers = [0]", "rule 1: `quant` is missing"),
        ("base = 'fp8'\n[[rule]]\nlayers = [0]\nquant = 'fp9'", "rule 1: quant='fp9' is unknown"),
        ("base = 'fp8'\n[[rule]]\nlayer = [0]\nquant = 'none'", "key `layer` is unknown.*nearest: layers"),
        ("base = 'fp8'\n[[rule]]\nlayers = ['5..2']\nquant = 'none'", "is empty; write the smaller end first"),
        ("base = 'fp8'\n[[rule]]\nlayers = ['2-5']\nquant = 'none'", 'or a range "2..5"'),
        ("base = 'fp8'\n[[rule]]\nlayers = [true]\nquant = 'none'", "expected a number"),
        ("base = 'fp8'\n[[rule]]\nlayers = []\nquant = 'none'", "not empty"),
        ("base = 'fp8'\n[[rule]]\nmodules = [1]\nquant = 'none'", "names or globs in quotes"),
        ("base = 'fp8'\n[[rule]]\nlayers = [0]\nquant = 'none'\noverride = 1", "expected true or false"),
        ("base = 'fp8'\nrule = 1", r"written as \[\[rule\]\] tables"),
        ("base = 'fp8'\nkv = 1", "expected a name in quotes"),
        ("base = [", "cannot be read as TOML"),
    ],
)
def test_every_wrong_word_is_an_error_that_names_the_file(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SchemeError, match=said) as raised:
        recipe(tmp_path, text)
    assert "mine.toml" in str(raised.value)


def test_all_that_is_wrong_with_a_recipe_is_told_together(tmp_path: Path) -> None:
    text = """
        base = "fp7"
        kv = "zz"
        sumary = "x"
        polcy = "x"
        [[rule]]
        layers = ["5..2", "a"]
        quant = "fp9"
        [[rule]]
        modules = [1]
        layer = 2
        role = 2
        [parity]
        tensor = 3
        [policy]
        zero = "odd"
        """
    with pytest.raises(SchemeError) as raised:
        recipe(tmp_path, text)
    head, *told = str(raised.value).split("\n  ")
    assert head == f"{tmp_path / 'mine.toml'}: 13 problems"
    for said in (
        "key `sumary` is unknown", "key `polcy` is unknown", "base: quant='fp7' is unknown", "kv='zz' is unknown",
        "[policy] zero", "`parity` needs", "rule 1: quant='fp9'", "rule 1: layers: '5..2' is empty",
        "rule 1: layers: 'a'; expected", "rule 2: key `layer` is unknown", "rule 2: key `role` is unknown",
        "rule 2: `quant` is missing", "rule 2: modules = [1]",
    ):  # fmt: skip
        assert [line for line in told if said in line], said


def test_what_a_recipe_says_of_parity_is_checked_beside_a_base(tmp_path: Path) -> None:
    with pytest.raises(SchemeError, match="`parity` needs"):
        recipe(tmp_path, 'base = "fp8"\n[parity]\ntensor = 3')


@pytest.mark.parametrize(
    ("text", "last"),
    [
        ('base = "fp8"\n' + "[[rule]]\n" * 5000, ENOUGH),
        (
            f'base = "fp8"\n[[rule]]\nquant = "none"\nlayers = {[f"a{n}" for n in range(5000)]}',
            f"rule 1: layers: {ENOUGH}",
        ),
        (f'base = "fp8"\n[[rule]]\nquant = "none"\nlayers = {["a"] * 5000}', f"rule 1: layers: {ENOUGH}"),
        ("\n".join(f"a{n} = 1" for n in range(5000)) + '\nbase = "fp8"', ENOUGH),
    ],
)
def test_after_many_problems_the_rest_of_a_recipe_is_not_looked_at(tmp_path: Path, text: str, last: str) -> None:
    with pytest.raises(SchemeError) as raised:
        recipe(tmp_path, text)
    told = str(raised.value).splitlines()
    assert told[-1].strip() == last and len(told) <= 1 + MAX_KINDS + 2


def test_a_path_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such file"):
        load_scheme(tmp_path / "absent.toml")


def test_a_whole_scheme_can_be_given_by_path(tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "mappings" / "schemes" / "int8_wo.toml"
    path = tmp_path / "own.toml"
    path.write_text(source.read_text())
    assert load_scheme(path).format == load_scheme("int8_wo").format
