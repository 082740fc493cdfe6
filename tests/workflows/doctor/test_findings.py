"""What `check` finds in checkpoints that other programs wrote."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from bridge.cli.check import check_path, loaded_by
from bridge.core.errors import TableError
from bridge.core.mappings import parse_table
from bridge.planning.contract_files import parse_runtime
from tests import once
from tests.models import served_checkpoints, stored_checkpoints
from tests.models.faulty_checkpoints import (
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


@pytest.mark.parametrize(("name", "rule"), [("awq", ["tensors"]), ("gptq", [])])
def test_files_of_autoawq_and_gptq_as_documented_are_looked_through(name: str, rule: list[str], tmp_path: Path) -> None:
    """Neither program runs here; asymmetric AWQ is what bridge does not read."""
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
    assert problem.finding and problem.finding["rule"] == "names" and not problem.finding["repairs"]
    assert "model.layers.{0..1}.mlp.experts.gate_up_proj" in problem.finding["where"]


def test_the_programs_that_load_it_are_named(tmp_path: Path) -> None:
    (line,) = loaded_by([str(made("one-scale", one_scale, tmp_path))], [])
    assert "loads in vLLM 0.33, SGLang 0.5.23, transformers 5.23, TensorRT-LLM 1.3" in line
    (line,) = loaded_by([str(made("experts", experts, tmp_path))], [])
    assert "loads in vLLM 0.33" in line and "not in transformers 5.23: it drops the scales with a warning" in line
    assert not [*loaded_by([str(made("plain", plain, tmp_path))], [])]


def test_every_fault_of_a_program_is_one_that_the_doctor_knows() -> None:

    head = 'program = "S"\nversion = "1"\n[writes.x]\ntarget = "hf"\n[faults]\n'
    for row, words in (
        ('other = { does = "drops", read = "a.py" }', "unknown fault `other`"),
        ('drafts = { does = "drops" }', "how this is known"),
        ('drafts = { read = "a.py" }', "not said what it does"),
    ):
        with pytest.raises(TableError, match=words):
            parse_runtime("s", parse_table(head + row, "s.toml"))
