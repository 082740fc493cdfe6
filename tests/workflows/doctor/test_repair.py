"""Checkpoints of other programs with a fault each: `repair` mends it, and `check` finds nothing then."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import bridge
from bridge.cli.check import check_path
from bridge.cli.main import app
from bridge.core.errors import SourceError, UsageError, WriteError
from bridge.core.output.names import REPAIR
from tests import once
from tests.blocks import ROOT
from tests.models import stored_checkpoints
from tests.models.faulty_checkpoints import (
    SMALL,
    edited,
    edited_config,
    experts,
    leftover,
    made,
    one_scale,
    own_scales,
    plain,
    promises_drafts,
    retensored,
    rules,
    stale_index,
    tensors,
    wrapped,
)
from tests.oracles import compressed_oracle as compressed
from tests.oracles import export_oracle as oracle

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def alike(one: Path, other: Path, but: tuple[str, ...] = ()) -> None:
    """Every file of a mended directory is that of the good one, byte for byte."""
    names = {path.relative_to(one).as_posix() for path in one.rglob("*") if path.is_file()} - {REPAIR, *but}
    assert names == {path.relative_to(other).as_posix() for path in other.rglob("*") if path.is_file()} - {*but}
    assert [name for name in sorted(names) if (one / name).read_bytes() != (other / name).read_bytes()] == []


def whole(directory: Path) -> None:
    """`check` finds nothing, and the mended model loads in transformers without a missing or unexpected weight."""
    assert [problem.text for problem in check_path(directory) if problem.fatal] == []


def test_a_directory_without_a_fault_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    good = made("plain", plain, tmp_path)
    with pytest.raises(UsageError, match="nothing that can be mended without the source; nothing was written"):
        bridge.repair(good, tmp_path / "new")
    assert not (tmp_path / "new").exists()


LOSSLESS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "index": (stale_index, ["index", "index", "index-size"]),
    "drafts": (promises_drafts, ["drafts"]),
    "leftover": (leftover, ["leftover"]),
    "names": (wrapped, ["names"]),
}


@pytest.mark.parametrize("name", LOSSLESS)
def test_what_loses_nothing_is_mended_to_the_bytes_of_the_good_checkpoint(name: str, tmp_path: Path) -> None:
    broken, good = made("plain", plain, tmp_path), once.directory("doctor-plain", plain)
    broke, expected = LOSSLESS[name]
    broke(broken)
    assert rules(broken) == expected, check_path(broken)
    result = bridge.repair(broken, tmp_path / "new")
    assert result.passed and not result.left and [finding.rule for finding in result.mended] == expected
    assert check_path(tmp_path / "new") == []
    added = ("config.json",) if name == "drafts" else ()  # it keeps the number, which is 0 now
    alike(tmp_path / "new", good, added)


def test_an_index_is_made_where_none_was(tmp_path: Path) -> None:
    broken = made("plain", plain, tmp_path)
    (broken / "model.safetensors.index.json").unlink()
    assert rules(broken) == ["index"]
    bridge.repair(broken, tmp_path / "new")
    whole(tmp_path / "new")
    with oracle._quiet():
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "new", dtype="auto")
    assert set(model.state_dict()) == set(tensors(broken))


def test_weights_in_a_file_of_another_name_get_an_index(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "examples" / "models" / "tiny-gpt2", tmp_path / "broken")
    (tmp_path / "broken" / "model.safetensors").rename(tmp_path / "broken" / "weights.safetensors")
    assert rules(tmp_path / "broken") == ["index"]
    bridge.repair(tmp_path / "broken", tmp_path / "new")
    assert check_path(tmp_path / "new") == []


def reads_as_before(broken: Path, new: Path) -> None:
    """transformers makes the same model of both."""
    with oracle._quiet():
        one, other = (transformers.LlamaForCausalLM.from_pretrained(of, dtype="auto") for of in (broken, new))
    assert all(torch.equal(tensor, other.state_dict()[name]) for name, tensor in one.state_dict().items())


def renamed(directory: Path, before: str, after: str) -> None:
    """Rename a file that the index names."""
    (directory / before).rename(directory / after)

    def change(index: dict[str, Any]) -> None:
        placed = index["weight_map"]
        index["weight_map"] = {name: after if file == before else file for name, file in placed.items()}

    edited(directory / "model.safetensors.index.json", change)


def test_an_index_of_shards_that_were_joined_into_one_file_is_made_again(tmp_path: Path) -> None:
    broken = made("plain", plain, tmp_path)
    held = tensors(broken)
    for file in broken.glob("*.safetensors"):
        file.unlink()
    save_file(held, broken / "model.safetensors", {"format": "pt"})
    assert rules(broken) == ["index"]
    assert [finding.rule for finding in bridge.repair(broken, tmp_path / "mended").mended] == ["index"]
    assert rules(tmp_path / "mended") == [] and {*tensors(tmp_path / "mended")} == {*held}


def test_a_stale_file_that_the_index_does_not_name_never_gets_into_the_repaired_one(tmp_path: Path) -> None:
    broken = made("plain", plain, tmp_path)
    held = tensors(broken)
    for file in broken.glob("*.safetensors"):
        file.unlink()
    save_file(held, broken / "model-00001-of-00001.safetensors", {"format": "pt"})

    def whole_index(index: dict[str, Any]) -> None:
        index["weight_map"] = dict.fromkeys(held, "model-00001-of-00001.safetensors")

    edited(broken / "model.safetensors.index.json", whole_index)
    save_file({name: t * 0 for name, t in held.items()}, broken / "model-00001-of-00002.safetensors", {"format": "pt"})
    assert rules(broken) == ["other-files"] and not any(problem.fatal for problem in check_path(broken))
    with pytest.raises(UsageError, match="nothing that can be mended"):
        bridge.repair(broken, tmp_path / "new")
    promises_drafts(broken)
    bridge.repair(broken, tmp_path / "new")
    reads_as_before(broken, tmp_path / "new")
    assert not (tmp_path / "new" / "model-00001-of-00002.safetensors").exists()


@pytest.mark.parametrize("name", ["mtp.safetensors", "consolidated.safetensors"])
def test_a_file_that_the_index_names_is_kept_whatever_it_is_called(name: str, tmp_path: Path) -> None:
    broken = made("plain", plain, tmp_path)
    renamed(broken, sorted(broken.glob("*.safetensors"))[-1].name, name)
    assert check_path(broken) == []
    promises_drafts(broken)
    bridge.repair(broken, tmp_path / "new")
    reads_as_before(broken, tmp_path / "new")
    assert set(tensors(broken)) == set(tensors(tmp_path / "new"))


def test_nothing_is_mended_while_it_is_not_clear_which_tensors_are_the_models(tmp_path: Path) -> None:
    lost, twice, two = (Path(shutil.copytree(once.directory("doctor-plain", plain), tmp_path / n)) for n in "ltw")
    sorted(lost.glob("*.safetensors"))[-1].unlink()
    first, second, *_ = sorted(twice.glob("*.safetensors"))
    name, tensor = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: tensor * 0}, second, {"format": "pt"})
    shutil.copy(first, two / "model.safetensors")
    for broken, words in (
        (lost, "names model-.*, which are not in the directory"),
        (twice, f"{name}: is in more than one file"),
        (two, "transformers reads model.safetensors, and servers"),
    ):
        promises_drafts(broken)
        assert rules(broken).count("index") == 1, check_path(broken)
        with pytest.raises(UsageError, match=words):
            bridge.repair(broken, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_files_of_a_variant_are_not_read_beside_the_model(tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    with oracle._quiet():
        stored_checkpoints.llama().save_pretrained(broken)
        stored_checkpoints.llama(torch.float32).save_pretrained(broken, max_shard_size="900KB", variant="fp32")
    assert len([*broken.glob("model.fp32-*.safetensors")]) > 1
    assert rules(broken) == ["other-files"] and not any(problem.fatal for problem in check_path(broken))
    promises_drafts(broken)
    bridge.repair(broken, tmp_path / "new")
    reads_as_before(broken, tmp_path / "new")


def test_half_of_the_draft_tensors_cannot_be_mended(tmp_path: Path) -> None:
    broken = made("experts", experts, tmp_path)
    last = [name for name in tensors(broken) if name.startswith("model.layers.1.self_attn")]
    retensored(
        broken, lambda held: held.update({name.replace("layers.1", "layers.2"): held[name].clone() for name in last})
    )
    edited_config(broken, num_nextn_predict_layers=1)
    found = {p.finding["rule"]: p.finding for p in check_path(broken) if p.finding}
    assert "eh_proj of draft layer 2" in found["drafts"]["what"] and not found["drafts"]["repairs"]


def test_a_head_that_differs_stays_and_is_tied_no_longer(tmp_path: Path) -> None:
    broken = made("plain", plain, tmp_path)
    edited_config(broken, tie_word_embeddings=True)
    assert rules(broken) == ["head-differs"]
    bridge.repair(broken, tmp_path / "new")
    alike(tmp_path / "new", once.directory("doctor-plain", plain))


def test_a_head_that_is_stored_twice_is_left_out(tmp_path: Path) -> None:
    broken = made("plain", plain, tmp_path)
    edited_config(broken, tie_word_embeddings=True)
    for file in broken.glob("*.safetensors"):
        held = load_file(file)
        if "lm_head.weight" in held:
            held["lm_head.weight"] = tensors(broken)["model.embed_tokens.weight"]
            save_file(held, file, {"format": "pt"})
    assert rules(broken) == ["head-twice"]
    bridge.repair(broken, tmp_path / "new")
    assert check_path(tmp_path / "new") == []
    assert set(tensors(broken)) - set(tensors(tmp_path / "new")) == {"lm_head.weight"}


def test_a_head_that_is_nowhere_is_tied(tmp_path: Path) -> None:
    model = stored_checkpoints.llama()
    model.config.tie_word_embeddings = True
    model.tie_weights()
    with oracle._quiet():
        model.save_pretrained(tmp_path / "good")
    broken = Path(shutil.copytree(tmp_path / "good", tmp_path / "broken"))
    edited_config(broken, tie_word_embeddings=False)
    assert rules(broken) == ["head-missing"]
    with oracle._quiet():
        models = [transformers.LlamaForCausalLM.from_pretrained(broken, dtype="auto") for _ in range(2)]
    assert not torch.equal(models[0].lm_head.weight, models[1].lm_head.weight), "transformers fills it"
    bridge.repair(broken, tmp_path / "new")
    alike(tmp_path / "new", tmp_path / "good")


def test_a_draft_of_eagle_without_a_head_is_whole(tmp_path: Path) -> None:
    """`fc` joins hidden states and tokens; the head is that of the model that it drafts for."""
    broken = made("plain", plain, tmp_path)
    for file in broken.glob("*.safetensors"):
        held = load_file(file)
        if "lm_head.weight" in held:
            held["fc.weight"] = held.pop("lm_head.weight")
            save_file(held, file, {"format": "pt"})
    text = (broken / "model.safetensors.index.json").read_text().replace("lm_head.weight", "fc.weight")
    (broken / "model.safetensors.index.json").write_text(text)
    assert check_path(broken) == []


def decoded(held: dict[str, torch.Tensor], module: str) -> torch.Tensor:
    """The values of NVFP4 codes, written out from the format's definition."""
    packed, scale = held[f"{module}.weight_packed"], held[f"{module}.weight_scale"].float()
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()
    values = FP4[codes & 7] * (1 - 2 * (codes >> 3))
    return (values.unflatten(1, (-1, 16)) * (scale / held[f"{module}.weight_global_scale"]).unsqueeze(-1)).flatten(1)


def test_unequal_global_scales_of_fused_matrices_become_equal_and_the_loss_is_told(tmp_path: Path) -> None:
    broken = made("own-scales", own_scales, tmp_path)
    (finding,) = [problem.finding for problem in check_path(broken) if problem.finding]
    assert finding["rule"] == "global-scales" and finding["severity"] == "silent loss"
    assert "in 4 fused groups" in finding["what"]
    assert "reads the codes of the others with that scale (read: " in finding["programs"]["vLLM 0.33"]
    assert finding["programs"]["transformers 5.23"] == "not shown"
    result = bridge.repair(broken, tmp_path / "new")
    assert check_path(tmp_path / "new") == []
    before, after = tensors(broken), tensors(tmp_path / "new")
    for layer in (0, 1):
        for block, names in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
            modules = [f"model.layers.{layer}.{block}.{name}_proj" for name in names]
            scales = [after[f"{module}.weight_global_scale"] for module in modules]
            assert len({float(scale) for scale in scales}) == 1
            assert scales[0] == min(before[f"{module}.weight_global_scale"] for module in modules), "sic: a divisor"
            for module in modules:
                old, new = decoded(before, module), decoded(after, module)
                loss = float((new - old).norm() / old.norm())
                assert loss == pytest.approx(result.losses.get(module, 0.0), rel=1e-4)
                assert loss < 0.04, "one rounding of a block's scale: half of 1 / 8 at most, 0.03 on average"
    changed = {
        name for name in before if not torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8))
    }
    assert not [name for name in changed if not name.endswith(("scale", "weight_packed"))]
    small = SMALL.removesuffix(".weight")
    assert [name for name in changed if name.endswith("packed")] == [f"{small}.weight_packed"]
    kept = decoded(after | {f"{small}.weight_packed": before[f"{small}.weight_packed"]}, small)[:48]
    old, new = (decoded(held, small)[:48] for held in (before, after))
    assert (new - old).norm() < 0.8 * (kept - old).norm(), "codes beside a subnormal scale are the nearest again"


def test_scales_that_are_powers_of_two_apart_lose_nothing(tmp_path: Path) -> None:
    broken = made("one-scale", one_scale, tmp_path)
    assert check_path(broken) == []

    def change(held: dict[str, torch.Tensor]) -> None:
        held["model.layers.0.mlp.up_proj.weight_global_scale"] *= 2
        scale = held["model.layers.0.mlp.up_proj.weight_scale"]
        held["model.layers.0.mlp.up_proj.weight_scale"] = (scale.float() * 2).to(scale.dtype)
        assert torch.equal(held["model.layers.0.mlp.up_proj.weight_scale"].float(), scale.float() * 2)

    retensored(broken, change)
    assert rules(broken) == ["global-scales"]
    result = bridge.repair(broken, tmp_path / "new")
    assert result.losses == {"model.layers.0.mlp.up_proj": 0.0} and "without a loss" in str(result)
    alike(tmp_path / "new", once.directory("doctor-one-scale", one_scale))


def test_kv_scales_under_the_names_of_a_server_are_renamed(tmp_path: Path) -> None:
    def good(root: Path) -> None:
        stored_checkpoints.exported(stored_checkpoints.modelopt(stored_checkpoints.llama(), "fp8", kv=True), root)

    broken = made("cache", good, tmp_path)
    assert set(rules(broken)) <= {"tensor-scales"}

    def change(held: dict[str, torch.Tensor]) -> None:
        for name in [name for name in held if name.endswith(("k_scale", "v_scale"))]:
            attention, _, scale = name.rpartition(".")
            held[f"{attention.rpartition('.')[0]}.attn.{scale}"] = held.pop(name)

    retensored(broken, change)
    assert "kv-names" in rules(broken)
    bridge.repair(broken, tmp_path / "new")
    alike(tmp_path / "new", once.directory("doctor-cache", good))


def test_a_list_that_names_quantized_modules_and_not_the_others_is_mended(tmp_path: Path) -> None:
    broken = made("list", lambda root: compressed.compress(stored_checkpoints.llama(), "W8A16", root), tmp_path)
    good = load_file(once.directory("doctor-list", lambda _: None) / "model.safetensors")

    def change(held: dict[str, torch.Tensor]) -> None:
        for name in [name for name in held if name.startswith("model.layers.1.mlp.down_proj.")]:
            del held[name]
        held["model.layers.1.mlp.down_proj.weight"] = stored_checkpoints.llama().model.layers[1].mlp.down_proj.weight

    retensored(broken, change)

    def listed(config: dict[str, Any]) -> None:  # a container, which compressed-tensors does not take for its modules
        config["quantization_config"]["ignore"] = ["lm_head", "model.layers.1", "re:.*q_proj", "visual"]

    edited(broken / "config.json", listed)
    found = {p.finding["rule"]: p.finding["where"] for p in check_path(broken) if p.finding}
    assert found["ignored-codes"] == ["model.layers.{0..1}.self_attn.q_proj"]
    assert found["not-ignored"] == ["model.layers.1.mlp.down_proj"]
    bridge.repair(broken, tmp_path / "new")
    whole(tmp_path / "new")
    section = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    assert section["ignore"] == ["lm_head", "model.layers.1", "visual", "model.layers.1.mlp.down_proj"]
    assert set(good) - set(tensors(tmp_path / "new"))


def test_a_prefix_in_modelopts_list_takes_other_layers_too(tmp_path: Path) -> None:
    """vLLM takes a part of a name: "model.layers.0.mlp" is one of experts of that layer."""
    broken = made("experts", experts, tmp_path)
    for name, key in (("config.json", "ignore"), ("hf_quant_config.json", "exclude_modules")):

        def change(content: dict[str, Any], key: str = key) -> None:
            section = content.get("quantization_config") or content["quantization"]
            section[key] = ["lm_head", "model.layers.0.mlp*", "model.layers.1.mlp.gate"]

        edited(broken / name, change)
    assert "ignored-codes" in rules(broken)
    result = bridge.repair(broken, tmp_path / "new")
    assert result.passed
    own = json.loads((tmp_path / "new" / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    assert own == json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]["ignore"]
    assert own == ["lm_head", "model.layers.1.mlp.gate"]


def test_entries_by_suffix_or_with_names_of_servers_stay(tmp_path: Path) -> None:
    """The first three are those of MiniMax-M2's list."""
    shapes = {f"model.layers.{layer}.block_sparse_moe.experts.0.w1": (256, 128) for layer in (0, 1)}
    kept = {
        "model.layers.0.block_sparse_moe.gate.weight": (2, 128), "model.layers.1.self_attn.q_proj.weight": (256, 128),
        "model.layers.1.block_sparse_moe.e_score_correction_bias": (2,), "model.norm.weight": (128,),
    }  # fmt: skip
    stored_checkpoints.deepseek(tmp_path / "broken", shapes, plain=kept)
    entries = ["gate", "e_score_correction_bias", "lm_head", "model.layers.1.self_attn.qkv_proj", "visual"]

    def change(config: dict[str, Any]) -> None:
        config["quantization_config"]["modules_to_not_convert"] = entries

    edited(tmp_path / "broken" / "config.json", change)
    found = {p.finding["rule"]: p.finding for p in check_path(tmp_path / "broken") if p.finding}
    assert found.keys() - {"ranks", "tensors"} == {"ignores-nothing"} and found["ignores-nothing"]["where"] == [
        "visual"
    ]
    promises_drafts(tmp_path / "broken")
    bridge.repair(tmp_path / "broken", tmp_path / "new")
    section = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    assert section["modules_to_not_convert"] == entries


def test_deepseeks_list_by_prefix_is_not_read_by_every_server(tmp_path: Path) -> None:
    """As documented; DeepSeek's own program does not run here."""
    shapes = {f"model.layers.{layer}.mlp.up_proj": (256, 128) for layer in (0, 1)}
    kept = {"model.layers.2.mlp.up_proj.weight": (256, 128), "model.norm.weight": (128,)}
    stored_checkpoints.deepseek(tmp_path / "broken", shapes, plain=kept)

    def change(config: dict[str, Any]) -> None:
        config["quantization_config"]["modules_to_not_convert"] = ["model.layers.2"]

    edited(tmp_path / "broken" / "config.json", change)
    assert [rule for rule in rules(tmp_path / "broken") if rule != "ranks"] == ["not-ignored"]
    bridge.repair(tmp_path / "broken", tmp_path / "new")
    section = json.loads((tmp_path / "new" / "config.json").read_text())["quantization_config"]
    assert section["modules_to_not_convert"] == ["model.layers.2", "model.layers.2.mlp.up_proj"]


def test_a_repair_onto_itself_or_of_what_bridge_wrote_is_refused(tmp_path: Path) -> None:
    broken = made("plain", plain, tmp_path)
    promises_drafts(broken)
    before = {path.name: path.read_bytes() for path in broken.iterdir()}
    for out in (broken, broken / "new"):
        with pytest.raises(UsageError, match="the checkpoint itself, or in it"):
            bridge.repair(broken, out)
    (tmp_path / "link").symlink_to(broken)
    with pytest.raises(UsageError, match="the checkpoint itself"):
        bridge.repair(broken, tmp_path / "link", overwrite=True)
    assert {path.name: path.read_bytes() for path in broken.iterdir()} == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(WriteError, match="was not written by bridge"):
        bridge.repair(broken, tmp_path / "mine", overwrite=True)
    with pytest.raises(UsageError, match="local directories only"):
        bridge.repair("s3://bucket/model", tmp_path / "new")
    with pytest.raises(UsageError, match="takes a directory with config"):
        bridge.repair(tmp_path / "mine", tmp_path / "new")
    bridge.repair(broken, tmp_path / "new")
    for mark, words in (("bridge.json", "newer than this one"), (REPAIR, "newer than this one")):
        other = Path(shutil.copytree(broken, tmp_path / f"newer-{len(mark)}"))
        (other / mark).parent.mkdir(exist_ok=True)
        (other / mark).write_text(json.dumps({"qbridge": "99.1.0"}))
        with pytest.raises(UsageError, match=words):
            bridge.repair(other, tmp_path / "from-newer")
    (tmp_path / "newer-11" / "bridge.json").write_text(json.dumps({"qbridge": bridge.__version__}))
    with pytest.raises(UsageError, match="bridge wrote it: convert the model again"):
        bridge.repair(tmp_path / "newer-11", tmp_path / "from-newer")
    assert not (tmp_path / "from-newer").exists()


def test_the_command_finds_mends_and_says_so(tmp_path: Path) -> None:
    broken = made("plain", plain, tmp_path)
    promises_drafts(broken)
    checked = CliRunner().invoke(app, ["check", str(broken), "--json"])
    assert checked.exit_code == 1
    (problem,) = json.loads(checked.stdout)
    assert problem["fatal"] and problem["finding"]["rule"] == "drafts" and problem["finding"]["repairs"]
    done = CliRunner().invoke(app, ["repair", str(broken), "--out", str(tmp_path / "new")])
    assert done.exit_code == 0, done.output
    assert "mended: error [drafts]" in done.stdout and "every tensor compared" in done.stdout
    assert CliRunner().invoke(app, ["check", str(tmp_path / "new")]).exit_code == 0
    again = CliRunner().invoke(app, ["repair", str(tmp_path / "new"), "--out", str(tmp_path / "third")])
    assert again.exit_code == 2 and "nothing that can be mended" in again.stderr
    over = CliRunner().invoke(app, ["repair", str(broken), "--out", str(tmp_path / "new"), "--overwrite", "--json"])
    assert over.exit_code == 0 and json.loads(over.stdout)["passed"]
    plan = bridge.plan(tmp_path / "new", "hf")
    assert plan.dropped[REPAIR] and REPAIR not in plan.side_files
    record = json.loads((tmp_path / "new" / REPAIR).read_text())
    assert record["made_from"] == str(broken) and record["mended"][0]["rule"] == "drafts"


def test_what_only_the_source_mends_is_refused(tmp_path: Path) -> None:
    broken = made("experts", experts, tmp_path)
    retensored(broken, lambda held: held.pop("model.layers.0.mlp.experts.3.down_proj.input_scale"))
    with pytest.raises(UsageError, match="says what mends the"):
        bridge.repair(broken, tmp_path / "new")


def test_an_error_that_is_left_is_told_by_the_exit_code(tmp_path: Path) -> None:
    broken = made("experts", experts, tmp_path)
    retensored(broken, lambda held: held.pop("model.layers.0.mlp.experts.3.down_proj.input_scale"))
    edited_config(broken, num_nextn_predict_layers=1)
    done = CliRunner().invoke(app, ["repair", str(broken), "--out", str(tmp_path / "new")])
    assert done.exit_code == 3, done.output
    assert "left: error [input-scales-missing]" in done.stdout


def test_a_killed_repair_leaves_nothing_or_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from bridge.workflows.doctor import repair as module

    broken = made("plain", plain, tmp_path)
    stale_index(broken)
    written = module.write_side_file
    count = 0

    def killed(content: Any, path: Path) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise KeyboardInterrupt
        written(content, path)

    monkeypatch.setattr(module, "write_side_file", killed)
    with pytest.raises(KeyboardInterrupt) as stop:
        bridge.repair(broken, tmp_path / "new")
    assert not (tmp_path / "new").exists() and "goes on from there" in "".join(stop.value.__notes__)
    monkeypatch.setattr(module, "write_side_file", written)
    bridge.repair(broken, tmp_path / "new")
    alike(tmp_path / "new", once.directory("doctor-plain", plain))


def test_what_only_the_linter_says_is_left_too(tmp_path: Path) -> None:
    """NaN, and two lists of ModelOpt that disagree."""
    broken = made("plain", plain, tmp_path)
    (file, *_) = sorted(broken.glob("*.safetensors"))
    held = load_file(file)
    next(iter(held.values())).view(-1)[3] = torch.nan
    save_file(held, file, {"format": "pt"})
    with pytest.raises(UsageError, match="what mends the 1 finding"):
        bridge.repair(broken, tmp_path / "new")
    promises_drafts(broken)
    done = CliRunner().invoke(app, ["repair", str(broken), "--out", str(tmp_path / "new")])
    assert done.exit_code == 3 and "left: error [values]" in done.stdout and "; 1 finding left" in done.stdout
    assert [problem.text for problem in check_path(tmp_path / "new")] == [*bridge.repair(broken, tmp_path / "b").lines]


@pytest.mark.parametrize("content", ["[1, 2]", '{"weight_map": {'])
def test_an_index_that_is_no_json_object_is_a_finding(content: str, tmp_path: Path) -> None:
    broken = made("plain", plain, tmp_path)
    (broken / "model.safetensors.index.json").write_text(content)
    (problem,) = check_path(broken)
    assert problem.fatal and "error [index] model.safetensors.index.json: " in problem.text
    with pytest.raises(SourceError, match=r"model\.safetensors\.index\.json: "):
        bridge.repair(broken, tmp_path / "new")
    (broken / "model.safetensors.index.json").unlink()
    assert bridge.repair(broken, tmp_path / "new").passed
