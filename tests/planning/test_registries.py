"""What programs have a class for, read from their source: the generated tables, and what plans make of them."""

from __future__ import annotations

import json
import sys
import tomllib
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import transformers
from packaging.version import Version

import bridge
from bridge.core.errors import PlanError, SourceError
from bridge.core.mappings import mappings, read_table
from bridge.planning.contract_files import load_runtime, runtimes
from bridge.planning.contracts import verdict
from bridge.planning.registries import first_transformers, has_registry, served
from tests.blocks import ROOT
from tests.models import decoder_families
from tests.oracles import registries, sglang_oracle, transformers_since, vllm_oracle

PROGRAMS = ("vllm", "sglang", "transformers")
INDEXER = ("model.layers.0.self_attn.indexer.wk", "model.layers.0.self_attn.indexer.weights_proj")

# The forms that the sources of vLLM and SGLang have, in a package of two files.
LAYERS = """
class Router(nn.Module):
    def __init__(self, config, prefix):
        self.weight = nn.Parameter(config.experts)

class Indexer(nn.Module):
    def __init__(self, config, quant_config=None, prefix=""):
        self.wq_b = ReplicatedLinear(1, 2, quant_config=quant_config, prefix=f"{prefix}.wq_b")
        self.wk_weights_proj = MergedColumnParallelLinear(1, [2, 3], quant_config=None)
        only_one = quant_config if quant_config.get_name() == "one" else None
        self.head_gate = ReplicatedLinear(1, 2, quant_config=only_one, prefix=f"{prefix}.other")
        given = quant_config
        if config.a:
            given = None
        self.sometimes = ReplicatedLinear(1, 2, quant_config=given)

class Attention(nn.Module):
    indexer_cls = Indexer
    def __init__(self, config, quant_config=None, prefix=""):
        self.qkv_proj = QKVParallelLinear(1, 2, quant_config=quant_config, prefix=f"{prefix}.qkv_proj")
        indexer = self.indexer_cls(config, quant_config, prefix=f"{prefix}.indexer")
        self.either = ReplicatedLinear(1, 2) if config.a else ReplicatedLinear(1, 2, quant_config=quant_config)

class Block(nn.Module):
    def __init__(self, config, quant_config=None, prefix=""):
        self.self_attn = Attention(config, quant_config, prefix=f"{prefix}.self_attn")
        self.gate = GateLinear(1, 2, prefix=f"{prefix}.gate")
        self.tower = Attention(config, quant_config=None)

class Recurrent(nn.Module):
    def __init__(self, config, quant_config=None, prefix=""):
        self.conv1d = ColumnParallelLinear(1, 2, quant_config=None)

class RecurrentBlock(nn.Module):
    def __init__(self, config, quant_config=None, prefix=""):
        self.mixer = Recurrent(config, quant_config, prefix=f"{prefix}.mixer")
"""
MODEL = """
from .layers import Block, RecurrentBlock
if current_platform.is_rocm():
    from .amd import Model
KINDS = {"M": RecurrentBlock, "other": 3}
class Model(nn.Module):
    def __init__(self, config, prefix="", layer_type=Block):
        kinds = config.kinds or KINDS
        self.start, self.layers = make_layers(3, lambda prefix: layer_type(config, config.quant, prefix=prefix))
class MineForCausalLM(nn.Module):
    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    model_cls = Model
    def __init__(self, config, prefix=""):
        self.model = self.model_cls(config, prefix=maybe_prefix(prefix, "model"))
    def load_weights(self, weights):
        stacked_params_mapping = [("wk_weights_proj", "wk", 0), ("wk_weights_proj", "weights_proj", 1)]
class MineForCausalLMNextN(MineForCausalLM): ...
EntryClass = [MineForCausalLM, MineForCausalLMNextN]
"""


def test_fused_and_unquantized_modules_are_read_without_importing(tmp_path: Path) -> None:
    folder = tmp_path / "sglang/srt/models"
    folder.mkdir(parents=True)
    (folder / "layers.py").write_text(LAYERS)
    (folder / "mine.py").write_text(MODEL)
    (tmp_path / "sglang-9.8.dist-info").mkdir()
    (tmp_path / "sglang-9.8.dist-info/METADATA").write_text("Name: sglang\nVersion: 9.8\n")
    text = registries.render("sglang", tmp_path)
    assert 'version = "9.8"' in text
    row = next(line for line in text.splitlines() if line.startswith('"MineForCausalLM"'))
    assert 'fused = ["q_proj k_proj v_proj", "wk weights_proj"]' in row
    assert 'plain = ["indexer.head_gate", "indexer.weights_proj", "indexer.wk", "layers.gate"' in row
    assert '"mixer.conv1d"' in row
    assert "either" not in row.replace("tower.either", "")
    assert "sometimes" not in row
    assert '"tower.qkv_proj"' not in row
    assert '"tower.q_proj"' in row
    assert text.endswith('[drafts]\n"MineForCausalLMNextN" = { file = "srt/models/mine.py" }\n')


@pytest.mark.parametrize("name", PROGRAMS)
def test_each_table_is_of_the_version_that_the_contract_is_for(name: str) -> None:
    table = read_table(mappings() / "runtimes/registries" / f"{name}.toml")
    assert f"{table.data['version']}.".startswith(f"{load_runtime(name).version}.")
    for section in ("classes", "drafts"):
        for architecture, row in table.section(section).items():
            assert served(name, architecture) is not None
            assert set(row) <= {"file", "fused", "plain"}


def test_the_table_of_transformers_is_that_of_the_installed_one() -> None:
    table = read_table(mappings() / "runtimes/registries/transformers.toml")
    if table.data["version"] != version("transformers"):
        pytest.skip(f"the table is of transformers {table.data['version']}, installed is {version('transformers')}")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as THEIRS

    names = {name for entry in THEIRS.values() for name in ([entry] if isinstance(entry, str) else entry)}
    assert names <= table.section("classes").keys()


def test_first_versions_agree_with_the_installed_transformers() -> None:
    here = Version(version("transformers"))
    rows = tomllib.loads((mappings() / "runtimes/registries/transformers-since.toml").read_text())
    listed = registries.listed_classes(Path(transformers.__file__).parents[1])
    assert len(rows) > 300
    for name, first in rows.items():
        assert first_transformers(name) == first
        assert Version(first) > here or name in listed
        assert Version(first) <= here or name not in listed
    assert not {name for name in listed if transformers_since.CLASS.fullmatch(name) is None and name in rows}


def test_the_first_version_is_read_from_several(tmp_path: Path) -> None:
    for version_, names in {"5.9.0": ["Old"], "5.10.1": ["Old", "Mid"], "5.11.0": ["Old", "New"]}.items():
        folder = tmp_path / version_
        (folder / "transformers/models/auto").mkdir(parents=True)
        pairs = ", ".join(f"('{name.lower()}', '{name}ForCausalLM')" for name in names)
        (folder / "transformers/models/auto/modeling_auto.py").write_text(f"NAMES = [{pairs}]\n")
        (folder / f"transformers-{version_}.dist-info").mkdir()
        (folder / f"transformers-{version_}.dist-info/METADATA").write_text(f"Version: {version_}\n")
    text = transformers_since.render([tmp_path / name for name in ("5.11.0", "5.9.0", "5.10.1")])
    assert tomllib.loads(text) == {"MidForCausalLM": "5.10.1", "NewForCausalLM": "5.11.0"}
    assert "from 5.9.0, 5.10.1, 5.11.0\n" in text


def test_an_old_transformers_refuses_one_model_with_the_version_that_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Target hf asks transformers for classes without a table, trt for all."""
    traced, tabled = (
        saved("SeedOssForCausalLM", tmp_path / "traced", vocab_size=213),
        ROOT / "examples/models/tiny-llama",
    )
    old = {"SeedOssForCausalLM": "5.16.0", "LlamaForCausalLM": "5.16.0"}
    monkeypatch.setattr("bridge.planning.registries.first_transformers", lambda name: old.get(name, ""))
    monkeypatch.setattr("bridge.planning.registries.installed", lambda _: "5.9.1")
    says = "transformers 5.9.1, which is installed, has no class {}; 5.16.0 is the first that has it: pip install"
    with pytest.raises(SourceError, match=says.format("SeedOssForCausalLM")):
        bridge.plan(traced, "hf", "int8_wo")
    with pytest.raises(PlanError, match=says.format("LlamaForCausalLM")):
        bridge.plan(tabled, "trt", "int8_wo")
    assert bridge.plan(tabled, "hf", "int8_wo").steps
    monkeypatch.setattr("bridge.planning.registries.installed", lambda _: "5.16.0")
    assert bridge.plan(traced, "hf", "int8_wo").steps and bridge.plan(tabled, "trt", "int8_wo").steps


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_a_table_is_what_the_installed_program_says(name: str) -> None:
    (vllm_oracle if name == "vllm" else sglang_oracle).require()
    (packages,) = Path(sys.prefix).glob("vllm/lib/python3*/site-packages" if name == "vllm" else "sglang")
    assert registries.render(name, packages) == (mappings() / f"runtimes/registries/{name}.toml").read_text()


def saved(architecture: str, at: Path, **fields: Any) -> Path:
    decoder_families.build(architecture, **fields).save_pretrained(at)
    return at


def test_what_vllm_makes_unquantized_is_named_and_left_out_for_it(tmp_path: Path) -> None:
    """models/deepseek_v32 and models/deepseek_v2.py: `wk_weights_proj` has no quant_config."""
    model = saved("GlmMoeDsaForCausalLM", tmp_path / "glm")
    plan = bridge.plan(model, "hf", "fp8")
    answer = verdict(load_runtime("vllm"), plan)
    assert answer.why_not.startswith("model.layers.{0..1}.self_attn.indexer.wk, model.layers.{0..1}.self_attn.indexer.")
    assert "is unquantized there (models/deepseek_v32/nvidia/model.py): --for vllm leaves it out" in answer.why_not
    left = bridge.plan(model, "hf", "fp8", runtime="vllm")
    kept = {step.site.module for step in left.steps if step.site and not step.format}
    assert kept >= set(INDEXER)
    assert {step.site.module for step in left.quantized if step.site} == {
        step.site.module
        for step in plan.quantized
        if step.site and not step.site.module.endswith(("wk", "weights_proj"))
    }
    answer = verdict(load_runtime("vllm"), left)
    assert (answer.why_not, answer.how) == ("", "read")
    assert "models/deepseek_v32/nvidia/model.py" in {evidence.where for evidence in answer.evidence}


def test_the_list_of_unquantized_modules_has_what_the_program_makes_so(tmp_path: Path) -> None:
    model = saved("GlmMoeDsaForCausalLM", tmp_path / "glm")
    out = tmp_path / "out"
    bridge.convert(model, "hf", "fp8_pc_pt", out, runtime="vllm", format="compressed-tensors", progress=False)
    listed = json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert {*INDEXER} <= set(listed)
    assert bridge.verify(out, against=model).parity


def test_compressors_stay_unquantized_for_vllm_and_grouped_matrices_for_all(tmp_path: Path) -> None:
    """models/deepseek_v4/nvidia/model.py of vLLM; ModelOpt has no quantizer for the class of `wo_a`."""
    model = saved("DeepseekV4ForCausalLM", tmp_path / "v4")
    whole, left = (bridge.plan(model, "hf", "fp8", runtime=name) for name in (None, "vllm"))
    kept = [{step.site.module for step in plan.steps if step.site and not step.format} for plan in (whole, left)]
    attention = {name for name in kept[0] if ".attn." in name}
    assert attention == {f"model.layers.{layer}.attn.wo_a" for layer in range(2)}
    compressors = ("0.attn.compressor", "0.attn.indexer.compressor", "1.attn.compressor")
    more = {f"model.layers.{at}.{name}" for at in compressors for name in ("wkv", "wgate")}
    assert kept[1] - kept[0] == more | {"model.layers.0.attn.indexer.weights_proj"}
    assert verdict(load_runtime("vllm"), left).why_not == ""


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_layers_of_one_mixer_each_load_with_what_programs_keep_of_them(name: str, tmp_path: Path) -> None:
    """conv1d and gate, by nemotron_h.py of both; A_log, D and dt_bias are no matrices."""
    kinds = {"layers_block_type": ["linear_attention", "full_attention", "moe", "mlp"], "n_routed_experts": 5}
    decoder_families.build("NemotronHForCausalLM", moe_intermediate_size=44, **kinds).save_pretrained(tmp_path)
    found = served(name, "NemotronHForCausalLM")
    assert found and found.plain == (("mixer", "conv1d"), ("mixer", "gate"))
    plan = bridge.plan(tmp_path, "hf", "fp8")
    kept = {step.site.module for step in plan.steps if step.site and not step.format}
    assert kept == {"backbone.embeddings", "backbone.layers.0.mixer.conv1d", "backbone.layers.2.mixer.gate", "lm_head"}
    assert verdict(load_runtime(name), plan).why_not == ""


def test_a_program_without_a_class_for_an_architecture_does_not_load_it(tmp_path: Path) -> None:
    plan = bridge.plan(saved("Dots1ForCausalLM", tmp_path / "dots"), "hf", "fp8")
    for name in ("vllm", "sglang"):
        why = verdict(load_runtime(name), plan).why_not
        assert "no class of its own for Dots1ForCausalLM, and no run shows that its Transformers backend does it" in why


def test_of_a_traced_architecture_it_is_read_that_it_loads(tmp_path: Path) -> None:
    plan = bridge.plan(saved("SeedOssForCausalLM", tmp_path / "seed"), "hf", "fp8")
    answers = {runtime.name: verdict(runtime, plan) for runtime in runtimes() if has_registry(runtime.name)}
    assert answers["vllm"].how == "read"
    assert "has no class of its own for SeedOssForCausalLM" in answers["sglang"].why_not
