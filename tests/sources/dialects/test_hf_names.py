"""State dicts as transformers 5 holds them in memory, in Hugging Face's files: read as `save_pretrained` has them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
import transformers
from safetensors.torch import save_file

import bridge
from bridge.core.errors import PlanError, SourceError, TableError
from bridge.core.mappings import mappings, parse_table, read_table, table_files
from bridge.sources.opening import open_source
from bridge.sources.weights.containers import Files
from bridge.tables.architectures.arch import Row, parse_arch
from bridge.tables.architectures.roles import load_roles
from bridge.tables.dialects.dialect import load_dialect, parse_dialect
from tests.models import decoder_families
from tests.sources.tiny_families import FAMILIES, build
from tests.test_imports import command, modules

EXPERTS = ("mixtral", "qwen3-moe", "deepseek-v3")
Save = Callable[[dict[str, torch.Tensor], Path], object]


def as_bin(state: dict[str, torch.Tensor], root: Path) -> None:
    torch.save(state, root / "pytorch_model.bin")


def as_safetensors(state: dict[str, torch.Tensor], root: Path) -> None:
    save_file(state, root / "model.safetensors")


def in_two_files(state: dict[str, torch.Tensor], root: Path) -> None:
    for number in (1, 2):
        part = {name: tensor for at, (name, tensor) in enumerate(state.items()) if at % 2 == number - 1}
        torch.save(part, root / f"pytorch_model-0000{number}-of-00002.bin")


def as_shards(state: dict[str, torch.Tensor], root: Path) -> None:
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(str(root), save_distributed=True), no_dist=True)


@pytest.fixture(params=EXPERTS)
def model(request: pytest.FixtureRequest) -> Any:
    return build(request.param)


def saved(model: Any, tmp_path: Path) -> Path:
    """What `save_pretrained` writes: transformers' own way from memory to a checkpoint."""
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def raw(model: Any, tmp_path: Path, save: Save = as_safetensors, prefix: str = "") -> Path:
    """The same model by its state dict, beside the same configuration."""
    root = tmp_path / "raw"
    shutil.copytree(saved(model, tmp_path), root, ignore=shutil.ignore_patterns("*.safetensors"))
    save({prefix + name: tensor.clone() for name, tensor in model.state_dict().items()}, root)
    return root


def equal(root: Path, other: Path) -> None:
    mine, theirs = open_source(root), open_source(other)
    assert dict(mine.specs) == dict(theirs.specs)
    for name in theirs.specs:
        assert np.array_equal(mine.read(name), theirs.read(name)), name


def written(root: Path) -> dict[str, bytes]:
    """Every file of an output but those that tell when and from where it was made."""
    told = ("bridge.json", "report.json", "report.html", "bridge/calibration.safetensors")
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*") if path.is_file()}
    return {name: path.read_bytes() for name, path in files.items() if name not in told}


@pytest.mark.parametrize("save", [as_safetensors, as_bin, in_two_files, as_shards])
def test_a_state_dict_reads_as_what_save_pretrained_writes(model: Any, save: Save, tmp_path: Path) -> None:
    assert any(name.endswith("experts.gate_up_proj") for name in model.state_dict())
    equal(raw(model, tmp_path, save), tmp_path / "saved")


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_that_a_wrapper_of_training_begins_are_known(prefix: str, tmp_path: Path) -> None:
    model = build("mixtral")
    equal(raw(model, tmp_path, prefix=prefix), tmp_path / "saved")


@pytest.mark.parametrize(
    "kind", ["MixtralModel", "Qwen3MoeForSequenceClassification", "DeepseekV3ForTokenClassification"]
)
def test_bare_models_and_classifiers_are_read(kind: str, tmp_path: Path) -> None:
    family = {"Mi": "mixtral", "Qw": "qwen3-moe", "De": "deepseek-v3"}[kind[:2]]
    config = FAMILIES[family]().config
    config.num_labels = 11
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config).to(torch.bfloat16).eval()
    equal(raw(model, tmp_path), tmp_path / "saved")


@pytest.mark.parametrize("kind", ["Glm4Moe", "Dots1", "DeepseekV32", "GlmMoeDsa"])
def test_models_with_shared_experts_are_read(kind: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 101}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
    config = getattr(transformers, f"{kind}Config")(**sizes, **heads, **experts)
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).to(torch.bfloat16).eval()
    equal(raw(model, tmp_path), tmp_path / "saved")


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("Ernie4_5_Moe", "use_bias"),
        ("HunYuanMoEV1", "attention_bias"),
        ("Qwen3_5Moe", "attention_bias"),
        ("DeepseekV2", "mlp_bias"),
    ],
)
def test_models_with_names_of_their_own_are_read(kind: str, field: str, biased: bool, tmp_path: Path) -> None:
    model = decoder_families.build(f"{kind}ForCausalLM", tie_word_embeddings=False, **{field: biased})
    equal(raw(model, tmp_path), tmp_path / "saved")


@pytest.mark.parametrize("kind", ["DeepseekV4", "GraniteMoe", "GraniteMoeShared", "MiniMaxM2"])
def test_experts_that_have_other_names_in_memory_are_read(kind: str, tmp_path: Path) -> None:
    equal(raw(decoder_families.build(f"{kind}ForCausalLM"), tmp_path), tmp_path / "saved")


@pytest.mark.parametrize("latent", [None, 24])
@pytest.mark.parametrize("biased", [False, True])
def test_layers_of_one_mixer_each_are_read(latent: int | None, biased: bool, tmp_path: Path) -> None:
    kinds = {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "moe_latent_size": latent}
    experts = {"n_routed_experts": 5, "moe_intermediate_size": 44, "moe_shared_expert_intermediate_size": 36}
    biases = dict.fromkeys(("use_bias", "mlp_bias"), biased) | {"use_conv_bias": not biased}
    model = decoder_families.build("NemotronHForCausalLM", **kinds, **experts, **biases)
    equal(raw(model, tmp_path), tmp_path / "saved")


@pytest.mark.slow
def test_tied_head_that_the_file_holds_as_well_is_tied(tmp_path: Path) -> None:
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**_config("mixtral"), tie_word_embeddings=True))
    root, other = raw(model, tmp_path, as_bin), tmp_path / "saved"
    assert "lm_head.weight" in open_source(root).specs
    plans = [bridge.plan(path, "hf") for path in (root, other)]
    assert [output.spec for output in plans[0].outputs] == [output.spec for output in plans[1].outputs]
    assert plans[0].tied == {"lm_head.weight": "model.embed_tokens.weight"}


def _config(family: str) -> dict[str, Any]:
    known = FAMILIES[family]().config.to_dict()
    return {name: known[name] for name in ("hidden_size", "vocab_size", "num_hidden_layers", "num_local_experts")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "target", "quant"),
    [
        *((family, "hf", quant) for family in EXPERTS for quant in (None, "fp8_pc_pt", "int8_wo")),
        *((family, "megatron", None) for family in EXPERTS),
        ("qwen3-moe", "torchtitan", None),
        ("mixtral", "trtllm", "int8_wo"),
        pytest.param("mixtral", "trt", "int8_wo", marks=pytest.mark.product),
    ],
)
def test_conversions_write_the_bytes_that_the_saved_model_gives(
    family: str, target: str, quant: str | None, tmp_path: Path
) -> None:
    model = build(family)
    made = [raw(model, tmp_path), tmp_path / "saved"]
    roots = [tmp_path / f"in-{root.name}" / "model" for root in made]  # its name is in the card
    for root, named in zip(made, roots, strict=True):
        named.parent.mkdir()
        root.rename(named)
    outs = [tmp_path / f"{root.name}-out" for root in made]
    for root, out in zip(roots, outs, strict=True):
        assert bridge.convert(root, target, quant, out).passed
    assert written(outs[0]) == written(outs[1])


@pytest.mark.slow
def test_no_stack_of_experts_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _config("mixtral") | {"hidden_size": 256, "intermediate_size": 1200, "num_attention_heads": 8}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**config, num_key_value_heads=2)).float()
    stack = model.model.layers[0].mlp.experts.gate_up_proj
    root, sizes, read = raw(model, tmp_path), [], Files.read_flat

    def noted(self: Files, name: str, begin: int, end: int, out: Any) -> Any:
        sizes.append(out.nbytes)
        return read(self, name, begin, end, out)

    monkeypatch.setattr(Files, "read_flat", noted)
    bridge.convert(root, "hf", "int8_wo", tmp_path / "out")
    assert stack.nbytes > 10 << 20
    assert max(sizes) <= 2 << 20  # the engine's pieces are of a megabyte, the proof's of two


@pytest.mark.slow
def test_an_ordinary_directory_loads_no_dialect(tmp_path: Path) -> None:
    source = saved(build("mixtral"), tmp_path)
    words = ("convert", str(source), "--target", "hf", "--quant", "fp8_pc_pt", "--out", str(tmp_path / "out"))
    found = modules(command(*words))
    assert not {
        "bridge.tables.dialects.dialect",
        "bridge.tables.dialects.translate",
        "bridge.sources.dialects.tensors",
    } & {*found}


def test_every_table_with_an_expert_a_tensor_or_a_module_of_experts_is_read_fused() -> None:
    dialect = load_dialect("transformers")
    tables = [parse_arch(read_table(path), load_roles()) for path in table_files("arch")]
    experts = [row for table in tables for row in table.rows if "{e}" in row.name or _stacked_module(row)]
    files = {row.place.file for row in experts}
    assert dialect.architectures.keys() == {n for t in tables if t.file.name in files for n in t.architectures}


def _stacked_module(row: Row) -> bool:
    """GraniteMoe's input_linear.weight is experts.gate_up_proj in memory; Llama 4 has that name in files, too."""
    return row.stacks and row.name.endswith(".weight")


def broken(tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], error: type = SourceError) -> str:
    root = raw(build("qwen3-moe"), tmp_path)
    state = {name: tensor.clone() for name, tensor in build("qwen3-moe").state_dict().items()}
    change(state)
    save_file(state, root / "model.safetensors")
    with pytest.raises(error) as caught:
        bridge.plan(root, "hf")
    return str(caught.value)


def test_all_that_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    def change(state: dict[str, torch.Tensor]) -> None:
        del state["model.layers.0.mlp.experts.down_proj"]
        name = "model.layers.1.mlp.experts.gate_up_proj"
        state[name] = state[name].transpose(1, 2).contiguous()
        state["model.layers.1.mlp.experts.bias"] = torch.zeros(5)

    told = broken(tmp_path, change)
    assert "is not a Qwen3MoeForCausalLM of this config: 3 problems" in told
    assert "layers.0.mlp.experts.down_proj: is missing; model.layers.0.mlp.experts.{0..4}.down_proj.weight" in told
    assert "layers.1.mlp.experts.gate_up_proj: has shape (5, 60, 88), the config gives (5, 88, 60)" in told
    assert "model.layers.1.mlp.experts.bias: mappings/dialects/transformers.toml has no row for it" in told


def test_names_that_nobody_knows_are_told_by_the_table(tmp_path: Path) -> None:
    def change(state: dict[str, torch.Tensor]) -> None:
        for name in [name for name in state if "experts" in name]:
            state[name.replace("experts", "specialists")] = state.pop(name)

    told = broken(tmp_path, change, PlanError)
    assert "does not fit mappings/arch/qwen3_moe.toml" in told
    assert "unknown  model.layers.{0..1}.mlp.specialists.down_proj" in told


def changed(dialect: str, *pairs: tuple[str, str]) -> str:
    text = (mappings() / f"dialects/{dialect}.toml").read_text()
    for old, new in pairs:
        assert old in text
        text = text.replace(old, new, 1)
    return text


@pytest.fixture
def dialects(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Put dialects in the place of those that ship."""

    def put(**texts: str) -> None:
        parsed = {
            name: parse_dialect(parse_table(text, f"mappings/dialects/{name}.toml"), load_roles())
            for name, text in texts.items()
        }
        monkeypatch.setattr("bridge.tables.dialects.dialect.dialect_names", lambda: sorted(parsed))
        monkeypatch.setattr("bridge.tables.dialects.dialect.load_dialect", lambda name: parsed[name])

    return put


def test_a_tensor_that_the_dialect_ignores_is_dropped_with_its_reason(tmp_path: Path, dialects: Any) -> None:
    text = (mappings() / "dialects/transformers.toml").read_text() + '\n[ignore]\n"layers.{l}.steps" = "counts steps"\n'
    dialects(mine=text)
    root, model = raw(build("mixtral"), tmp_path), build("mixtral")
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(state | {"model.layers.1.steps": torch.zeros(1)}, root / "model.safetensors")
    assert dict(open_source(root).dropped) == {"model.layers.1.steps": "counts steps"}
    assert bridge.plan(root, "hf").dropped["model.layers.1.steps"] == "counts steps"


def test_a_file_that_only_a_dialect_knows_is_read_where_hugging_faces_are_not(tmp_path: Path, dialects: Any) -> None:
    dialects(mine=changed("transformers", ("files    = []", 'files = ["mine.pth"]')))
    model = build("mixtral")
    root, other = raw(model, tmp_path, as_bin), tmp_path / "saved"
    (root / "pytorch_model.bin").rename(root / "mine.pth")
    equal(root, other)
    assert dict(open_source(root).dropped) == {}
    (other / "mine.pth").write_bytes(b"something else")
    assert open_source(other).dropped == {
        "mine.pth": "weights or training state that the checkpoint's index does not name"
    }


def test_the_dialect_that_knows_most_names_is_taken(tmp_path: Path, dialects: Any) -> None:
    worse = changed("transformers", ('"layers.{l}.mlp.experts.down_proj" ', '"layers.{l}.mlp.experts.w2"'))
    text = (mappings() / "dialects/transformers.toml").read_text()
    root, other = raw(build("mixtral"), tmp_path), tmp_path / "saved"
    for names in ({"a": worse, "b": text}, {"a": text, "b": worse}):
        dialects(**names)
        equal(root, other)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("files    = []", 'files = "model.pth"', "`files` is a list of strings"),
        ("files    = []", "files = [5]", "`files` is a list of strings"),
        ("files    = []", 'files = ["../model.pth"]', "`files` lists names of weight files"),
        ("[first]", '[dims]\ncentered = "1 or 0"\n\n[first]', "no config.json gives `centered`"),
    ],
)
def test_a_head_that_no_directory_fits_is_told(old: str, new: str, says: str) -> None:
    with pytest.raises(TableError, match=r"^mappings/dialects/mine.toml:\d+: .*") as caught:
        parse_dialect(parse_table(changed("transformers", (old, new)), "mappings/dialects/mine.toml"), load_roles())
    assert says in str(caught.value)
