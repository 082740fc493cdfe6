"""A pruned model answers as the whole one does with the same parts silenced, in every family with a table."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from bridge.core.errors import PlanError
from bridge.core.mappings import own_files, read_table
from bridge.planning.structure import structure_of
from bridge.sources.opening import open_source
from bridge.sources.pruned.opening import plan_cut
from bridge.tables.architectures import meaning
from tests.covering import covering
from tests.models.decoder_families import build
from tests.sources.pruned.families import FAMILIES, random_scores, silenced

CUTS: dict[str, tuple[dict[str, Any], list[int] | None]] = {
    "ffn": ({"ffn": 50}, None),
    "heads": ({"heads": 4}, None),
    "kv_heads": ({"kv_heads": 1}, None),
    "moe_ffn": ({"moe_ffn": 28}, None),
    "shared_ffn": ({"moe_ffn": 28, "shared_ffn": 28}, None),
    "layers": ({"layers": 3}, None),
    "numbers": ({}, [0, 2]),
    "experts": ({"experts": 4}, None),
    "hidden": ({"hidden": 48}, None),
    "narrow": ({"hidden": 40, "heads": 4}, None),
    "all": ({"hidden": 40, "heads": 4, "kv_heads": 2, "layers": 3, "ffn": 50}, None),
}
# Of the others, what is left reads something else: every norm another width, every router other experts.
EXACT = ("ffn", "heads", "kv_heads", "moe_ffn", "shared_ffn", "layers", "numbers")
# family -> cuts that its config cannot say
WIDTH_OVER_HEADS = {
    "heads": "no config has head_dim=10 with heads=4 and kv_heads=4: it would be 15",
    "kv_heads": "no config has head_dim=10 with heads=1 and kv_heads=1: it would be 60",
    "hidden": "no config has head_dim=10 with hidden=48: it would be 8",
    "all": "heads=4: a group has 1 heads, so 2 groups have fewer",
}
SHARED = {"moe_ffn": "no config has shared_ffn=44 with moe_ffn=28: it would be 28"}
SCALED = dict.fromkeys(("hidden", "narrow", "all"), "embeddings are scaled by the square root of hidden")
REFUSED: dict[str, dict[str, str]] = {
    "BertForMaskedLM": WIDTH_OVER_HEADS,
    "DeepseekV2ForCausalLM": SHARED,
    "DeepseekV3ForCausalLM": SHARED | {"experts": "", "numbers": ""},
    "DeepseekV32ForCausalLM": SHARED,
    "DeepseekV4ForCausalLM": {
        **dict.fromkeys(("heads", "narrow", "all"), "no config has out_width=20 with "),
        "moe_ffn": "no config has moe_ffn=28: it would be 80",
    },
    "Dots1ForCausalLM": SHARED,
    "Ernie4_5_MoeForCausalLM": SHARED,
    "GPT2LMHeadModel": WIDTH_OVER_HEADS,
    "Gemma2ForCausalLM": SCALED,
    "Gemma3ForCausalLM": SCALED,
    "Gemma4ForCausalLM": dict.fromkeys(CUTS, "its layers differ in ffn, kv_heads, head_dim"),
    "GemmaForCausalLM": SCALED,
    "Glm4MoeForCausalLM": SHARED,
    "GlmMoeDsaForCausalLM": SHARED,
    "GraniteMoeSharedForCausalLM": {
        "heads": "no config has head_dim=10 with heads=4: it would be 15",
        "kv_heads": "no config has head_dim=10 with heads=3 and kv_heads=1: it would be 20",
        "hidden": "no config has head_dim=10 with hidden=48: it would be 8",
    },
    "Llama4ForCausalLM": {"moe_ffn": "no config has moe_ffn=28: it would be 80"},
    "MiniMaxM3VLForCausalLM": {"kv_heads": "each head of an indexer chooses for the query heads of one key head"},
    "Mistral4ForCausalLM": SHARED,
    "HunYuanMoEV1ForCausalLM": {"moe_ffn": "no config has shared_ffn=80 with moe_ffn=28: it would be 28"},
}


def cells() -> list[Any]:
    """Every family with the cuts that its table has dims for: each family and cut; the rest is the product."""
    found = []
    for path in own_files("arch"):
        data = read_table(path).data
        family = next(name for name in FAMILIES if name in data["architectures"])
        for cut, (keep, _) in CUTS.items():
            if keep.keys() - {"shared_ffn"} <= data["dims"].keys() and (cut != "shared_ffn" or cut in data["dims"]):
                found.append((family, cut))
    chosen = covering(
        {"family": dict.fromkeys(family for family, _ in found), "cut": CUTS},
        valid=lambda *row: row in found,
        first=[(family, "heads") for family in ("LlamaForCausalLM", "DeepseekV3ForCausalLM")],
        shows=lambda family, cut: [(cut, cut in REFUSED.get(family, {}))],
    )
    product = pytest.mark.product
    return [pytest.param(*row, marks=() if row in chosen else product, id="-".join(row)) for row in found]


def test_every_table_has_a_family() -> None:
    listed = {name for path in own_files("arch") for name in read_table(path).data["architectures"]}
    assert set(FAMILIES) <= listed and len(FAMILIES) == len(own_files("arch"))


@pytest.mark.parametrize(("family", "cut"), cells())
def test_pruned_is_silenced(family: str, cut: str) -> None:
    model = build(family, torch.float32, **FAMILIES[family])
    source = open_source(model)
    keep, drop = CUTS[cut]
    if words := REFUSED.get(family, {}).get(cut):
        with pytest.raises(PlanError, match=re.escape(words)):
            plan_cut(source, keep, drop)
        return
    plan = plan_cut(source, keep, drop)
    pruned = plan.pruned(random_scores(plan.before, plan.before["layers"]))
    structure_of(pruned)  # covers every tensor by a row of the table, with the new config
    tokens = torch.arange(3, 40)[None]
    got = pruned.load_model()(tokens).logits
    assert torch.isfinite(got).all()
    # A norm follows each addition, in a silenced layer too; or such a layer still mixes its streams.
    after_norms = family in ("BertForMaskedLM", "DeepseekV4ForCausalLM")
    whole_norms = family == "MiniMaxM2ForCausalLM"  # of all heads together: fewer heads have another length
    if cut in EXACT and not (after_norms and cut in ("layers", "numbers")) and not (whole_norms and "heads" in cut):
        want = silenced(model, pruned.kept)(tokens).logits
        assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def test_a_field_that_the_class_reads_and_no_table_knows_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may say something of the layers, heads or widths that would go; a newer class may read one."""
    monkeypatch.setattr(meaning, "_reader", lambda name, _: "transformers' modeling_gpt2.py" if name == "new" else "")
    model = build("GPT2LMHeadModel", torch.float32, **FAMILIES["GPT2LMHeadModel"])
    source = open_source(model, config={"new": 1})
    with pytest.raises(PlanError, match=r"new is 1, which transformers' modeling_gpt2\.py reads"):
        plan_cut(source, {"layers": 3}, None)


def test_experts_that_a_table_of_tokens_names_are_not_cut() -> None:
    model = build("DeepseekV4ForCausalLM", torch.float32, num_hash_layers=1)
    with pytest.raises(PlanError, match="tables of layers name experts by their numbers"):
        plan_cut(open_source(model), {"experts": 4}, None)
