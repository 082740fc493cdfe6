"""What `check` finds in checkpoints that other programs wrote."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from transformers.quantizers.quantizers_utils import should_convert_module

from bridge.cli.check import check_path, loaded_by
from bridge.cli.main import app
from bridge.core.errors import TableError
from bridge.core.mappings import parse_table
from bridge.planning.contract_files import parse_runtime
from bridge.workflows.doctor.modules import names
from tests import once
from tests.models import served_checkpoints, stored_checkpoints
from tests.models.faulty_checkpoints import (
    edited,
    edited_config,
    experts,
    made,
    one_scale,
    plain,
    promises_drafts,
    retensored,
    rules,
    stale_index,
    tensors,
    wrapped,
)
from tests.oracles import export_oracle as oracle


def test_what_tools_wrote_well_has_no_finding() -> None:
    for name, make in (("plain", plain), ("one-scale", one_scale)):
        assert check_path(once.directory(f"doctor-{name}", make)) == []


def test_transformers_makes_of_a_fault_what_its_contract_says(tmp_path: Path) -> None:
    def loaded(broke: Callable[[Path], None], name: str) -> Any:
        broken = Path(shutil.copytree(good, tmp_path / name))
        broke(broken)
        with oracle._quiet():
            model = transformers.LlamaForCausalLM.from_pretrained(broken, dtype="auto")
        state = model.state_dict()
        return model, {name for name in held if not torch.equal(state[name], held[name])}

    good = once.directory("doctor-plain", plain)
    held = tensors(good)
    assert loaded(stale_index, "index")[1] == set(), "it reads whole files"
    assert loaded(promises_drafts, "drafts")[1] == set()
    assert {name for name in loaded(wrapped, "names")[1] if "norm" not in name} == {n for n in held if "norm" not in n}
    tied = partial(edited_config, tie_word_embeddings=True)
    model, other = loaded(tied, "head")
    assert other == set() and not torch.equal(model.lm_head.weight, model.model.embed_tokens.weight)
    with pytest.raises(OSError, match="no file named model"), oracle._quiet():
        loaded(lambda directory: (directory / "model.safetensors.index.json").unlink(), "alone")


def test_input_scales_of_experts_are_missing_zero_or_nan_and_cannot_be_mended(tmp_path: Path) -> None:
    broken = made("experts", experts, tmp_path)
    assert set(rules(broken)) <= {"tensor-scales"}, "ModelOpt's own"

    def change(held: dict[str, torch.Tensor]) -> None:
        del held["model.layers.0.mlp.experts.3.down_proj.input_scale"]
        held["model.layers.0.mlp.experts.1.up_proj.input_scale"].zero_()
        held["model.layers.1.mlp.experts.4.up_proj.input_scale"].fill_(torch.nan)

    retensored(broken, change)
    found = {p.finding["rule"]: p.finding for p in check_path(broken) if p.finding and p.fatal}
    assert found["input-scales-missing"]["where"] == ["model.layers.0.mlp.experts.3.down_proj"]
    assert found["input-scales-invalid"]["where"] == [
        "model.layers.0.mlp.experts.1.up_proj.input_scale", "model.layers.1.mlp.experts.4.up_proj.input_scale",
    ]  # fmt: skip
    assert all("quantize the model again" in finding["mend"] for finding in found.values())


def test_kv_scales_that_no_config_announces_are_told(tmp_path: Path) -> None:
    broken = made("one-scale", one_scale, tmp_path)
    retensored(broken, lambda held: held.update({f"model.layers.0.self_attn.{of}_scale": torch.ones(1) for of in "kv"}))
    assert rules(broken) == ["kv-undeclared"]


@pytest.mark.parametrize(("name", "rule"), [("awq", []), ("gptq", [])])
def test_files_of_autoawq_and_gptq_as_documented_are_looked_through(name: str, rule: list[str], tmp_path: Path) -> None:
    """Neither program runs here; those of AWQ are asymmetric."""
    with oracle._quiet():
        stored_checkpoints.llama(torch.float32, hidden_size=512, num_attention_heads=4).save_pretrained(
            tmp_path / "source"
        )
    served_checkpoints.write(tmp_path / "source", name, tmp_path / name)
    assert [r for r in rules(tmp_path / name) if r != "ranks"] == rule


def test_matrices_that_ranks_cannot_share_are_a_note(tmp_path: Path) -> None:
    with oracle._quiet():
        stored_checkpoints.llama(torch.float32).save_pretrained(tmp_path / "source")
    served_checkpoints.write(tmp_path / "source", "gptq", tmp_path / "gptq")
    notes = [problem for problem in check_path(tmp_path / "gptq") if problem.finding]
    assert {problem.finding["rule"] for problem in notes if problem.finding} == {"ranks"}
    assert not any(problem.fatal for problem in notes)
    (down,) = [p.text for p in notes if "down_proj" in p.text]
    assert "2 ranks" in down, "640 columns are 5 groups of 128"


def test_experts_under_the_names_of_memory_are_told(tmp_path: Path) -> None:
    """As a trainer saves `state_dict()`: transformers 5 stacks experts in memory, and not in checkpoints."""
    model = stored_checkpoints.mixture()
    with oracle._quiet():
        model.save_pretrained(tmp_path / "good")
    assert check_path(tmp_path / "good") == []
    broken = tmp_path / "broken"
    shutil.copytree(tmp_path / "good", broken)
    save_file(
        {k: v.contiguous() for k, v in model.state_dict().items()}, broken / "model.safetensors", {"format": "pt"}
    )
    (problem,) = check_path(broken)
    assert problem.finding and problem.finding["rule"] == "memory-names" and not problem.fatal
    assert "model.layers.{0..1}.mlp.experts.gate_up_proj" in problem.finding["where"]
    with oracle._quiet():
        loaded = type(model).from_pretrained(broken, dtype="auto")
        loaded.save_pretrained(tmp_path / "kept")
        again = type(model).from_pretrained(tmp_path / "good", dtype="auto")
        again.load_state_dict(loaded.state_dict())
        again.save_pretrained(tmp_path / "mended")
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())
    assert rules(tmp_path / "kept") == ["memory-names"] and check_path(tmp_path / "mended") == []


def test_entries_of_fp8_are_taken_as_transformers_takes_them() -> None:
    modules = ["lm_head", *(f"model.layers.{n}.{m}" for n in (1, 11) for m in ("mlp.gate", "mlp.gate_proj", "fc1"))]
    for entry in (
        "gate",
        "fc1",
        "model.layers.1",
        "model.layers.*.mlp.gate",
        "lm_head",
        r"model\.layers\.(1|2)\.",
        "x(",
    ):
        own = [module for module in modules if names("fp8", entry)(module)]
        if entry != "x(":  # which transformers does not compile
            assert own == [module for module in modules if not should_convert_module(module, [entry])], entry


@pytest.mark.parametrize("of", ["modelopt", "compressed-tensors"])
def test_a_quantized_cache_alone_is_not_left_over(of: str, tmp_path: Path) -> None:
    broken = made("plain", plain, tmp_path)
    scheme = {"num_bits": 8, "type": "float", "dynamic": False}
    section: dict[str, Any] = {"quant_method": of, "kv_cache_scheme": scheme, "ignore": []}
    section |= {"quant_algo": None} if of == "modelopt" else {"config_groups": {}, "format": "float-quantized"}
    edited_config(broken, quantization_config=section)
    if of == "modelopt":
        own = {"quant_algo": None, "kv_cache_quant_algo": "FP8", "exclude_modules": []}
        content = {"producer": {"name": "modelopt", "version": "0.47"}, "quantization": own}
        (broken / "hf_quant_config.json").write_text(json.dumps(content))
    assert rules(broken) == ["kv-missing"]
    assert len(check_path(broken)) == 1


def test_names_of_kv_scales_that_servers_read_and_others(tmp_path: Path) -> None:
    broken = made("one-scale", one_scale, tmp_path)
    name = "model.layers.0.self_attn"
    more = (f"{name}.kv_scale", f"{name}.q_proj.output_scale", f"{name}.key_scaling_factor")
    retensored(broken, lambda held: held.update({name: torch.ones(1) for name in more}))
    found = {p.finding["rule"]: p.finding for p in check_path(broken) if p.finding}
    assert found["kv-other-names"]["where"] == list(more[:2]) and found["kv-unknown-names"]["where"] == [more[2]]
    assert "deprecated" in found["kv-other-names"]["programs"]["vLLM 0.33"]
    assert {*found["kv-unknown-names"]["programs"].values()} == {"not shown"}


def test_an_order_of_activations_is_not_a_broken_checkpoint(tmp_path: Path) -> None:
    with oracle._quiet():
        stored_checkpoints.llama(torch.float32).save_pretrained(tmp_path / "source")
    served_checkpoints.write(tmp_path / "source", "gptq", tmp_path / "gptq")
    name = "model.layers.0.mlp.up_proj"

    def reorder(held: dict[str, torch.Tensor]) -> None:
        held[f"{name}.g_idx"] = torch.arange(8 * len(held[f"{name}.qweight"]), dtype=torch.int32).flip(0) // 128

    retensored(tmp_path / "gptq", reorder)
    assert "unread" in rules(tmp_path / "gptq") and not [p for p in check_path(tmp_path / "gptq") if p.fatal]
    retensored(tmp_path / "gptq", lambda held: held.pop(f"{name}.scales"))
    assert "tensors" in rules(tmp_path / "gptq")


def test_matrices_that_every_rank_has_whole_and_heads_that_ranks_repeat_are_no_finding(tmp_path: Path) -> None:
    """q is in 4 tiles of 128 rows; the one tile of k is that of one head, which every rank has."""
    names = ("q_a_proj", "kv_a_proj_with_mqa", "indexer.wk", "k_proj", "q_proj")
    shapes = {f"model.layers.0.self_attn.{name}": (512 if name == "q_proj" else 128, 128) for name in names}
    stored_checkpoints.deepseek(tmp_path / "one", shapes, plain={"model.norm.weight": (128,)})
    edited_config(tmp_path / "one", num_key_value_heads=1)
    found = {p.finding["rule"]: p.finding for p in check_path(tmp_path / "one") if p.finding}
    assert found["ranks"]["where"] == ["model.layers.0.self_attn.q_proj"] and "8 ranks" in found["ranks"]["what"]
    edited_config(tmp_path / "one", num_key_value_heads=2)
    assert any("k_proj" in p.text and "2 ranks" in p.text for p in check_path(tmp_path / "one"))


def test_the_programs_that_load_it_are_named(tmp_path: Path) -> None:
    (line,) = loaded_by([str(made("one-scale", one_scale, tmp_path))], [])
    assert "loads in vLLM 0.33, SGLang 0.5.23, transformers 5.23, TensorRT-LLM 1.3" in line
    (line,) = loaded_by([str(made("experts", experts, tmp_path))], [])
    assert "loads in vLLM 0.33" in line and "not in transformers 5.23: it drops the scales with a warning" in line
    assert not [*loaded_by([str(made("plain", plain, tmp_path))], [])]


def test_tensors_that_the_config_asks_for_are_there_in_its_shapes(tmp_path: Path) -> None:
    good, up = once.directory("doctor-plain", plain), "model.layers.1.mlp.up_proj.weight"
    changes: dict[str, Callable[[Path], None]] = {
        "missing": lambda path: retensored(path, lambda held: held.pop(up)),
        "shape": lambda path: retensored(path, lambda held: held.update({up: held[up][:-8].clone()})),
        "layers": lambda path: edited_config(path, num_hidden_layers=9),
        "biases": lambda path: edited_config(path, attention_bias=True),
    }
    for name, change in changes.items():
        broken = tmp_path / name
        broken.mkdir()
        shutil.copy(good / "config.json", broken)
        save_file(tensors(good), broken / "model.safetensors", {"format": "pt"})
        assert check_path(broken) == []
        change(broken)
        (problem,) = check_path(broken)
        assert problem.finding and problem.finding["rule"] == "tensors", name
        assert (problem.finding["where"] == [up]) == (name in ("missing", "shape")), name


def test_every_fault_of_a_program_is_one_that_the_doctor_knows() -> None:

    head = 'program = "S"\nversion = "1"\n[writes.x]\ntarget = "hf"\n[faults]\n'
    for row, words in (
        ('other = { does = "drops", read = "a.py" }', "unknown fault `other`"),
        ('drafts = { does = "drops" }', "how this is known"),
        ('drafts = { read = "a.py" }', "not said what it does"),
    ):
        with pytest.raises(TableError, match=words):
            parse_runtime("s", parse_table(head + row, "s.toml"))


def test_a_config_of_bitsandbytes_over_plain_weights_is_left_over(tmp_path: Path) -> None:
    """As a merge of an adapter into the unquantized weights leaves it."""
    broken = made("plain", plain, tmp_path)
    edited_config(broken, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert rules(broken) == ["leftover"]


def test_a_layer_after_the_last_that_no_config_promises_is_told(tmp_path: Path) -> None:
    broken = made("one-scale", one_scale, tmp_path)
    retensored(broken, lambda held: held.update({"model.layers.2.eh_proj.weight": torch.ones(8, 16)}))
    (found,) = [p for p in check_path(broken) if p.finding and p.finding["rule"] == "drafts-unpromised"]
    assert found.finding and found.finding["where"] == ["model.layers.2.eh_proj.weight"] and not found.fatal


def test_the_command_that_mends_names_the_directory(tmp_path: Path) -> None:
    broken = made("plain", plain, tmp_path)
    promises_drafts(broken)
    assert [p.finding["mend"] for p in check_path(broken) if p.finding] == [f"qbridge repair {broken} --out NEW"]


def test_nan_is_found_in_files_of_any_name_that_the_index_names(tmp_path: Path) -> None:
    broken = made("plain", plain, tmp_path)
    index = json.loads((broken / "model.safetensors.index.json").read_text())
    other = {name: name.replace("model-", "weights-") for name in index["weight_map"].values()}
    for name, new in other.items():
        (broken / name).rename(broken / new)
    index["weight_map"] = {name: other[file] for name, file in index["weight_map"].items()}
    (broken / "model.safetensors.index.json").write_text(json.dumps(index))
    name, file = next(iter(index["weight_map"].items()))
    held = load_file(broken / file)
    held[name].view(-1)[3] = torch.nan
    save_file(held, broken / file, {"format": "pt"})
    save_file({"unread": torch.zeros(1)}, broken / "model-unread.safetensors")
    assert any("NaN" in problem.text and name in problem.text for problem in check_path(broken))


def test_a_group_size_that_the_scales_contradict_is_an_error(tmp_path: Path) -> None:
    """It was taken for permuted columns, which servers may load."""
    with oracle._quiet():
        stored_checkpoints.llama(torch.float32).save_pretrained(tmp_path / "source")
    served_checkpoints.write(tmp_path / "source", "gptq", tmp_path / "gptq")
    edited(tmp_path / "gptq" / "config.json", lambda config: config["quantization_config"].update(group_size=64))
    found = [p.text for p in check_path(tmp_path / "gptq") if p.fatal]
    assert len(found) == 1 and "error [tensors]" in found[0]
    assert "group_size 64, but scales has 2 groups of its 256 columns" in found[0]


def test_config_json_alone_is_enough_of_modelopt(tmp_path: Path) -> None:
    """vLLM and SGLang read `quantization_config` of config.json before hf_quant_config.json."""
    good = made("experts", experts, tmp_path)
    path = good / "hf_quant_config.json"
    each = ["lm_head", *(f"model.layers.{n}.mlp.gate" for n in (0, 1))]
    edited(good / "config.json", lambda config: config["quantization_config"].update(ignore=each))
    edited(path, lambda content: content["quantization"].update(exclude_modules=["lm_head", "model.layers.*.mlp.gate"]))
    assert not [problem.text for problem in check_path(good) if problem.fatal]
    edited(path, lambda content: content["quantization"].update(exclude_modules=each[:2]))
    assert [
        p.text for p in check_path(good) if p.fatal and "exclude_modules of hf_quant_config.json disagree" in p.text
    ]
    path.unlink()
    assert not [problem.text for problem in check_path(good) if problem.fatal]


def test_files_of_autoround_are_read_and_unknown_ones_are_not_called_well(tmp_path: Path) -> None:
    """AutoRound packs as GPTQModel does (`auto_round:auto_gptq`), under a name of its own."""
    with oracle._quiet():
        stored_checkpoints.llama(torch.float32, hidden_size=512, num_attention_heads=4).save_pretrained(
            tmp_path / "source"
        )
    at = tmp_path / "autoround"
    served_checkpoints.write(tmp_path / "source", "gptq", at)
    name = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"}
    edited(at / "config.json", lambda config: config["quantization_config"].update(name))
    assert "unread" not in rules(at)
    up = "model.layers.0.mlp.up_proj"
    extra = {"extra_config": {up: {"bits": 8}}}
    edited(at / "config.json", lambda config: config["quantization_config"].update(extra))
    assert "unread" in rules(at), "modules of other bits are not read"
    edited(at / "config.json", lambda config: config["quantization_config"].update(extra_config={up: {"bits": 16}}))
    retensored(at, lambda held: held.pop(f"{up}.scales"))
    assert "tensors" in rules(at)
    edited(at / "config.json", lambda config: config["quantization_config"].update(quant_method="super"))
    edited(at / "config.json", lambda config: config["quantization_config"].pop("packing_format"))
    (problem,) = check_path(at)
    assert problem.finding and problem.finding["rule"] == "unread" and "'super'" in problem.text


def test_notes_are_no_problems(tmp_path: Path) -> None:
    broken = made("one-scale", one_scale, tmp_path)
    retensored(broken, lambda held: held.update({"model.layers.2.eh_proj.weight": torch.ones(8, 16)}))
    done = CliRunner().invoke(app, ["check", str(broken)])
    assert done.exit_code == 0 and done.stdout.endswith(": 1 note\n") and "not shown" not in done.stdout
    promises_drafts(broken)
    edited_config(broken, tie_word_embeddings=True)
    done = CliRunner().invoke(app, ["check", str(broken)])
    assert done.exit_code == 1 and done.stdout.endswith(": 2 problems\n")


def test_a_path_that_is_not_there_fails_as_in_other_verbs() -> None:
    for words in (["check", "/nonexist"], ["plan", "/nonexist", "--target", "hf"]):
        assert CliRunner().invoke(app, words).exit_code == 1
