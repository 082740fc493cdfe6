"""Target `torchtitan`: tensors of torchtitan's own adapters, loaded by torch's own checkpoint code; what is refused."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import bridge
from bridge.core.arrays import Buffers
from bridge.core.errors import PlanError, SchemeError, SourceError, UsageError, VerifyError
from bridge.core.output.directory import Work
from bridge.core.values import TensorSpec
from bridge.planning.memory import working_set
from bridge.sources.opening import open_source
from bridge.streaming.context import ConversionContext
from bridge.streaming.encode import write_step
from bridge.targets import file_settings
from tests.covering import grid
from tests.faults.test_library import VICTIM
from tests.models import torchtitan_families
from tests.models.sources_made import MadeSource
from tests.oracles import torchtitan_oracle
from tests.sources.weights.dcp_saves import bits
from tests.tables import foreign
from tests.tables.checkpoints import headers
from tests.test_imports import FRAMEWORKS, MODEL, command, loaded

LLAMA = foreign.CONFIGS["llama"] | {"rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 64}
OSS: dict[str, Any] = {
    "attention_bias": True, "swiglu_limit": 7.0, "sliding_window": 16, "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
ROUTED = {"num_experts_per_tok": 2, "norm_topk_prob": True, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5}
LLAMA |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}, "tie_word_embeddings": False}


def made(config: dict[str, Any], dtype: str = "float32") -> MadeSource:
    """A checkpoint of random tensors for a config."""
    rng, specs = np.random.default_rng(3), headers(config)
    arrays = {name: rng.normal(size=spec.shape).astype("float32") for name, spec in specs.items()}
    if dtype == "bfloat16":
        arrays = {name: bits(torch.from_numpy(array).bfloat16()) for name, array in arrays.items()}
    return MadeSource(arrays, {n: TensorSpec(n, s.shape, dtype) for n, s in specs.items()}, config)


def of_hf(tensors: dict[str, np.ndarray], config: dict[str, Any]) -> MadeSource:
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    return MadeSource(arrays, {n: TensorSpec(n, a.shape, str(a.dtype)) for n, a in arrays.items()}, config)


def read_by_torch(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor, loaded by torch into room of the size that its index says."""
    described = dcp.FileSystemReader(directory).read_metadata().state_dict_metadata
    state = {
        name: torch.full(entry.size, 3, dtype=entry.properties.dtype)
        for name, entry in described.items()
        if hasattr(entry, "size")
    }
    dcp.load(state, storage_reader=dcp.FileSystemReader(directory), no_dist=True)
    return state


@pytest.mark.slow
@pytest.mark.parametrize(("name", "era"), torchtitan_oracle.MODELS)
def test_every_tensor_is_torchtitans_own(name: str, era: str, tmp_path: Path) -> None:
    known = torchtitan_oracle.family(name, era)
    report = bridge.convert(of_hf(known.hf, known.config_hf), "torchtitan", out=tmp_path / "out", era=era)
    written = {key: tensor.numpy() for key, tensor in read_by_torch(tmp_path / "out").items()}
    assert written.keys() == known.native.keys()
    assert all(np.array_equal(written[key], array) for key, array in known.native.items())
    assert {key: array.dtype for key, array in written.items()} == {key: a.dtype for key, a in known.native.items()}
    assert not report.findings and report.passed


@pytest.mark.slow
@pytest.mark.parametrize(("name", "era"), torchtitan_oracle.MODELS)
def test_torchtitan_loads_its_whole_state_and_answers_the_same(name: str, era: str, tmp_path: Path) -> None:
    known = torchtitan_oracle.family(name, era)
    bridge.convert(of_hf(known.hf, known.config_hf), "torchtitan", out=tmp_path / "out", era=era)
    assert np.array_equal(known.load_and_run(tmp_path / "out"), known.logits)


@pytest.mark.slow
@pytest.mark.parametrize("era", torchtitan_oracle.ERAS)
def test_a_mistral_without_a_window_is_torchtitans_llama3_both_ways(era: str, tmp_path: Path) -> None:
    """torchtitan's llama3 with what is written, and transformers' Mistral with what is read back, answer the same."""
    known = torchtitan_oracle.family("llama3", era)
    own = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None, "head_dim": 10}
    config = known.config_hf | own
    report = bridge.convert(of_hf(known.hf, config), "torchtitan", out=tmp_path / "step-0", era=era)
    assert report.passed and np.array_equal(known.load_and_run(tmp_path / "step-0"), known.logits)
    bridge.convert(tmp_path / "step-0", "hf", out=tmp_path / "hf", progress=False)
    from transformers import AutoModelForCausalLM, MistralForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="float32").eval()
    assert isinstance(model, MistralForCausalLM)
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(known.ids)).logits.numpy()
    assert np.abs(logits - known.logits).max() < 1e-4 * np.abs(known.logits).max()


@pytest.mark.slow
def test_a_llama4_read_back_without_its_config_answers_the_same_in_transformers(tmp_path: Path) -> None:
    known = torchtitan_oracle.family("llama4", "0.2")
    names = ("architectures", "num_attention_heads", "num_experts_per_tok", "rms_norm_eps")
    names += ("rope_parameters", "max_position_embeddings")
    step = known.save(tmp_path, training=True)
    with pytest.raises(SourceError, match=r"moe_layers = \[2\], but the tensors have \(1,\)"):
        open_source(step, config={name: known.config_hf[name] for name in names} | {"moe_layers": [2]})
    config = {name: known.config_hf[name] for name in names}
    bridge.convert(step, "hf", out=tmp_path / "hf", config=config, progress=False)
    from transformers import AutoModelForCausalLM, Llama4ForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype="float32").eval()
    assert isinstance(model, Llama4ForCausalLM)
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(known.ids)).logits.numpy()
    assert np.abs(logits - known.logits).max() < 1e-4 * np.abs(known.logits).max()


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"use_qk_norm": None}, "{'use_qk_norm': False}"),
        ({"attn_temperature_tuning": 4}, "{'attn_temperature_tuning': False}"),
        ({"no_rope_layers": [1, 0, 1]}, "{'no_rope_layers': [1, 1, 1]}"),
        ({"no_rope_layers": [], "no_rope_layer_interval": 2}, "{'no_rope_layers': [1, 1, 1]}"),
        ({"no_rope_layers": [], "no_rope_layer_interval": 4}, ""),
        ({"layer_types": None}, f"{{'layer_types': {['full_attention'] * 3}}}"),
    ],
)
def test_a_llama4_is_written_only_as_the_model_that_torchtitan_has(fields: dict[str, Any], wanted: str) -> None:
    config = {key: value for key, value in (torchtitan_families.LLAMA4 | fields).items() if value is not None}
    if wanted:
        with pytest.raises(PlanError) as told:
            bridge.plan(made(config), "torchtitan", era="0.2")
        assert f"grow with the position; give config={wanted}" in str(told.value)
    else:
        with pytest.raises(PlanError, match=r"torchtitan 0\.3 has no model for it, 0\.2 has; give era='0\.2'"):
            bridge.plan(made(config), "torchtitan")
        assert bridge.plan(made(config), "torchtitan", era="0.2").architecture == "Llama4ForCausalLM"


@pytest.mark.parametrize("window", [4096, None, "absent"])
def test_a_mistral_with_a_window_is_no_model_of_torchtitan(window: int | str | None) -> None:
    config = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    config["max_position_embeddings"] = 8192
    if window == "absent":  # transformers' MistralConfig takes 4096
        del config["sliding_window"]
    if window is None:
        assert bridge.plan(made(config), "torchtitan").architecture == "MistralForCausalLM"
    else:
        with pytest.raises(
            PlanError, match=r"sliding_window = 4096: .* give config={'sliding_window': None} \(--config"
        ):
            bridge.plan(made(config), "torchtitan")


@pytest.mark.parametrize("target", ["torchtitan", "trtllm"])
def test_a_window_of_the_whole_context_is_none(target: str) -> None:
    config = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 64}
    assert not [note for note in bridge.plan(made(config), target).notes if "window" in note]


@pytest.mark.parametrize("era", torchtitan_oracle.ERAS)
@pytest.mark.parametrize("case", ["llama", "llama-mqa", "llama-tied", "qwen3", "qwen3-moe", "gpt_oss", "deepseek"])
def test_every_tensor_is_what_torchtitan_documents(case: str, era: str, tmp_path: Path) -> None:
    source = made(LLAMA | foreign.CONFIGS[case])
    bridge.convert(source, "torchtitan", out=tmp_path / "out", era=era)
    head = {"lm_head.weight": source.arrays["model.embed_tokens.weight"]}  # torchtitan saves a tied one, too
    written, expected = read_by_torch(tmp_path / "out"), foreign.torchtitan(case, head | source.arrays, era == "0.2")
    if case in ("qwen3-moe", "gpt_oss"):
        bias, routers = (
            "expert_bias" if era == "0.2" else "expert_bias_E",
            [n for n in expected if n.endswith("router.gate.weight")],
        )
        expected |= {name.replace("router.gate.weight", bias): np.zeros(5, np.float32) for name in routers}
    assert written.keys() == expected.keys()
    assert all(np.array_equal(written[name].numpy(), array) for name, array in expected.items())
    noted = [note for note in bridge.plan(source, "torchtitan", era=era).notes if "written as zeros" in note]
    assert len(noted) == (case in ("qwen3-moe", "gpt_oss"))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_our_own_reader_gives_the_source_back_to_the_bit(dtype: str, tmp_path: Path) -> None:
    source = made(LLAMA, dtype)
    bridge.convert(source, "torchtitan", out=tmp_path / "out")
    back = open_source(tmp_path / "out")
    assert back.specs.keys() == source.specs.keys()
    assert all(np.array_equal(back.read(name), array) for name, array in source.arrays.items())


def test_another_dtype_is_rounded_to_once(tmp_path: Path) -> None:
    source = made(LLAMA)
    bridge.convert(source, "torchtitan", out=tmp_path / "out", dtype="bf16")
    head = read_by_torch(tmp_path / "out")["lm_head.weight"]
    assert torch.equal(head, torch.from_numpy(source.arrays["lm_head.weight"]).bfloat16())
    assert json.loads((tmp_path / "out/config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.slow
@pytest.mark.parametrize("target", ["torchtitan", "megatron"])
def test_what_balances_experts_is_float32_whatever_the_weights_are(target: str, tmp_path: Path) -> None:
    """As in transformers, torchtitan and Megatron-Core: a sum of steps of a thousandth."""
    source = made(LLAMA | foreign.CONFIGS["deepseek"] | ROUTED | {"rms_norm_eps": 1e-6}, "bfloat16")
    bridge.convert(source, target, out=tmp_path / "out", dtype="fp16")
    written = read_by_torch(tmp_path / "out")
    biases = {name: tensor for name, tensor in written.items() if "expert_bias" in name}
    assert len(biases) == 2 and {tensor.dtype for tensor in biases.values()} == {torch.float32}
    assert {tensor.dtype for name, tensor in written.items() if name not in biases} == {torch.float16}
    bits_of = [source.arrays[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"] for layer in (1, 2)]
    for tensor, array in zip(biases.values(), bits_of, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).float())


@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("target", ["torchtitan", "megatron"])
def test_floats_of_eight_bits_are_told_before_any_weight_is_read(target: str, dtype: str | None) -> None:
    source, name = made(LLAMA), "model.layers.1.mlp.down_proj.weight"
    source.specs = {**source.specs, name: TensorSpec(name, source.specs[name].shape, "float8_e4m3fn")}
    source.broken = frozenset(source.specs)
    with pytest.raises(
        PlanError, match="is float8_e4m3fn in the source, which is not a training dtype; save it as bf16"
    ):
        bridge.plan(source, target, dtype=dtype)


def test_bytes_do_not_depend_on_the_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    for cores in (1, 3):
        monkeypatch.setattr("bridge.streaming.run.cores", lambda cores=cores: cores)
        out = tmp_path / f"out{cores}"
        bridge.convert(made(LLAMA), "torchtitan", out=out, verify=False)
        written.append([(out / name).read_bytes() for name in ("__0_0.distcp", ".metadata")])
    assert written[0] == written[1]


def test_pieces_of_several_heads_give_the_bytes_of_one_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a head change places: 25 rows are two heads of ten, and the third is in the next piece."""
    assert (LLAMA["head_dim"], LLAMA["num_attention_heads"]) == (10, 6)
    written = []
    for number, piece in enumerate((1 << 20, 25 * LLAMA["hidden_size"] * 4)):
        monkeypatch.setattr("bridge.planning.memory.PIECE", piece)
        out = tmp_path / str(number)
        bridge.convert(made(LLAMA), "torchtitan", out=out, verify=False)
        written.append((out / "__0_0.distcp").read_bytes())
    assert written[0] == written[1]


def test_reordered_rows_stay_in_the_memory_that_the_plan_says() -> None:
    """Heads of 4 MB: a piece is a head then, not a megabyte."""
    config = LLAMA | {"hidden_size": 8192, "head_dim": 128, "num_attention_heads": 4, "intermediate_size": 72}
    specs = headers(config | {"num_hidden_layers": 1})
    arrays = {name: np.ones(spec.shape, np.float32) for name, spec in specs.items()}
    source = of_hf(arrays, config | {"num_hidden_layers": 1})
    plan = bridge.plan(source, "torchtitan")
    (step,) = (step for step in plan.steps if step.outputs[0].spec.name.endswith("wq.weight"))
    context = ConversionContext(
        plan, source, None, None, 1, Work(Path(), {}, io.StringIO()), file_settings(plan, source)
    )
    write_step(step, context, Buffers(), None, lambda output, array, at: None)  # compiles
    tracemalloc.start()
    write_step(step, context, Buffers(), None, lambda output, array, at: None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak <= working_set(step, plan.sources) + 100_000


@pytest.mark.slow
@pytest.mark.parametrize("target", ["torchtitan", "megatron"])
def test_stacked_experts_pass_one_after_the_other(target: str, tmp_path: Path) -> None:
    """Sixteen experts of 2.2 MB, there and back: no step holds them all, nor more than the plan says."""
    extents = {"hidden_size": 448, "intermediate_size": 800, "num_local_experts": 16, "num_hidden_layers": 2}
    config = LLAMA | foreign.CONFIGS["gpt_oss"] | OSS | extents
    bridge.convert(made(config, "bfloat16"), "hf", out=tmp_path / "hf")
    bridge.convert(tmp_path / "hf", target, out=tmp_path / target)
    for root, way in ((tmp_path / "hf", target), (tmp_path / target, "hf")):
        opened = open_source(root)
        plan = bridge.plan(opened, way)
        context = ConversionContext(
            plan, opened, None, None, 1, Work(Path(), {}, io.StringIO()), file_settings(plan, opened)
        )
        for step in plan.steps:
            write_step(step, context, Buffers(), None, lambda output, array, at: None)  # compiles
            tracemalloc.start()
            write_step(step, context, Buffers(), None, lambda output, array, at: None)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak <= working_set(step, plan.sources) + 100_000, step.outputs
            assert peak < max(0.75 * step.nbytes, 4 << 20), step.outputs  # pieces have 2 MB
    assert bridge.convert(tmp_path / target, "hf", out=tmp_path / "back").passed


@grid({"target": ["torchtitan", "megatron"], "calls": [20, 90, 125]})
def test_a_killed_run_goes_on_to_the_bytes_of_one_that_nobody_disturbed(
    target: str, calls: int, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    killed = [sys.executable, "-c", VICTIM, str(MODEL), str(out), str(calls), target, "none"]
    assert subprocess.run(killed, timeout=120).returncode == -signal.SIGKILL
    assert not out.exists() and (tmp_path / ".out.partial").exists()
    for directory in (out, tmp_path / "other"):
        bridge.convert(MODEL, target, out=directory, verify=False)
    files = [path.name for path in out.iterdir() if path.suffix in (".distcp", ".metadata", ".pt", ".yaml")]
    assert files and all((out / name).read_bytes() == (tmp_path / "other" / name).read_bytes() for name in files)


@pytest.mark.parametrize(
    ("config", "arguments", "error", "says"),
    [
        (LLAMA, {"quant": "fp8"}, SchemeError, "torchtitan loads plain weights only; convert with quant='none'"),
        (LLAMA, {"quant": "fp8", "kv": "fp8"}, SchemeError, "KV cache: torchtitan reads no KV scales; leave out kv"),
        (LLAMA, {"era": "0.1"}, UsageError, "era '0.1' is unknown; known: 0.3, 0.2"),
        (
            LLAMA,
            {"dtype": "int8"},
            UsageError,
            "dtype 'int8' is not a dtype for trained weights; use fp32, bf16 or fp16",
        ),
        (foreign.CONFIGS["gemma"], {}, PlanError, "torchtitan.toml has no layout for GemmaForCausalLM"),
        (LLAMA | {"attention_bias": True}, {}, PlanError, "this model of torchtitan has no biases"),
    ],
)
def test_what_does_not_fit_is_told_before_any_weight_is_read(
    config: dict[str, Any], arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    source = made(config)
    source.broken = frozenset(source.specs)
    with pytest.raises(error) as told:
        bridge.plan(source, "torchtitan", **arguments)
    assert says in str(told.value)


def test_a_stack_of_mixed_experts_is_told() -> None:
    source = made(LLAMA | foreign.CONFIGS["qwen3-moe"])
    name = next(name for name in source.specs if name.endswith("experts.2.up_proj.weight"))
    source.specs = {**source.specs, name: TensorSpec(name, source.specs[name].shape, "float16")}
    with pytest.raises(PlanError, match=r"w3_EFD: is one tensor here, but its parts are float16 and float32"):
        bridge.plan(source, "torchtitan")


@pytest.mark.parametrize("damage", ["index", "items", "lost"])
def test_a_damaged_directory_is_found(damage: str, tmp_path: Path) -> None:
    source, out = made(LLAMA), tmp_path / "out"
    bridge.convert(source, "torchtitan", out=out)
    assert bridge.verify(out, against=source).passed
    file = out / "__0_0.distcp"
    if damage == "index":
        (out / ".metadata").unlink()
    elif damage == "items":
        with file.open("r+b") as stream:
            stream.write(b"\0" * 400)
    else:
        file.unlink()
    with pytest.raises((SourceError, VerifyError)):
        bridge.verify(out, against=source)


@pytest.mark.parametrize("target", ["torchtitan", "megatron"])
def test_a_directory_of_other_tensors_is_told_with_all_that_differs(target: str, tmp_path: Path) -> None:
    """Those of a model with a tensor less, one more, one of another shape and one of another dtype."""
    source, out, other = made(LLAMA), tmp_path / "out", tmp_path / "other"
    bridge.convert(source, target, out=out)
    shutil.copytree(out, other)
    tensors = read_by_torch(out)
    names = [name for name in tensors if "norm" in name]
    missing, wide, half = names[0], names[-1], next(name for name in names[1:])
    tensors["one_more"] = tensors.pop(missing)
    tensors[wide] = torch.cat([tensors[wide], tensors[wide]])
    tensors[half] = tensors[half].half()
    for file in other.glob("__*.distcp"):
        file.unlink()
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(other), no_dist=True)
    with pytest.raises(VerifyError) as told:
        bridge.verify(other, against=source)
    lines = str(told.value).splitlines()
    assert lines[0] == f"{other} is not what the plan wrote; convert again:"
    assert f"  {missing}: is missing" in lines and "  one_more: is not in the plan" in lines
    assert any(line.startswith(f"  {wide}: is float32 (") and "in the plan float32" in line for line in lines)
    assert any(line.startswith(f"  {half}: is float16") for line in lines)
    states = [line for line in lines if "_extra_state" in line]
    assert bool(states) == (target == "megatron")


def test_a_changed_weight_is_found(tmp_path: Path) -> None:
    source, out = made(LLAMA), tmp_path / "out"
    bridge.convert(source, "torchtitan", out=out)
    content = bytearray((out / "__0_0.distcp").read_bytes())
    at = content.find(source.arrays["model.norm.weight"].tobytes())
    content[at + 9] ^= 1
    (out / "__0_0.distcp").write_bytes(content)
    report = bridge.verify(out, against=source)
    assert [row.name for row in report.parity.tensors if not row.passed] == ["__0_0.distcp: norm.weight"]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["torchtitan", "megatron"])
def test_converting_loads_no_framework(target: str, tmp_path: Path) -> None:
    words = ("convert", str(MODEL), "--target", target, "--out", str(tmp_path / "out"))
    assert not loaded(command(*words)) & FRAMEWORKS
