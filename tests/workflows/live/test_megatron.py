"""Ranks of Megatron-Core that share a GPTModel hand over the tensors that `convert` makes of its checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

import bridge
from tests.oracles import megatron_oracle
from tests.targets.dcp.test_torchtitan import LLAMA, made
from tests.workflows.live import megatron_process
from tests.workflows.load.test_load_ranks import Processes

pytestmark = pytest.mark.slow
SCHEMES = [None, "fp8_pc_pt", "int8_wo"]
SHARED: list[tuple[dict[str, int], tuple[str, ...]]] = [
    ({"world": 1}, ("llama",)),
    ({"world": 2, "tp": 2}, ("llama", "qwen3-moe", "deepseek")),
    ({"world": 2, "pp": 2}, ("llama", "qwen2-tied", "mixtral")),
    ({"world": 2, "ep": 2}, ("deepseek", "glm4-moe")),
    ({"world": 4, "tp": 2, "pp": 2}, ("qwen3-moe",)),
]
FAILING = {
    "missing": (
        "SourceError",
        "layers.1.mlp.linear_fc2.weight: all ranks together hold 2640 of its 5280 values",
    ),
    "plan": ("LiveError", "rank 1 has another plan than rank 0"),
    "refused": ("UsageError", "memory=1 kB is too little"),
    "reshaped": ("LiveError", "decoder.layers.1.mlp.linear_fc2.weight: not as it was planned on this rank; plan again"),
    "nan": ("SourceError", "model.layers.1.mlp.down_proj.weight: NaN in 1 block of rows"),
    "nothing": ("", ""),  # another model of the same ranks is not harmed
}


@pytest.mark.parametrize(("sizes", "names"), SHARED, ids=str)
def test_every_rank_yields_the_tensors_of_the_converted_checkpoint(
    sizes: dict[str, int], names: tuple[str, ...], tmp_path: Path
) -> None:
    ranks = Processes(sizes, tmp_path / "store")
    for name in names:
        directory = megatron_oracle.family(name).save(tmp_path / name) / "iter_0000100"
        wanted = []
        for scheme in SCHEMES:
            out = tmp_path / f"{name}-{scheme}"
            bridge.convert(directory, "vllm", scheme, out, verify=False)
            wanted.append(bridge.live.digest(out))
        assert ranks.ask(megatron_process.digests, name, str(directory), SCHEMES) == [wanted] * sizes["world"]
    ranks.close()


def test_chunks_of_a_virtual_pipeline_share_scales_of_whole_matrices(tmp_path: Path) -> None:
    extents = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 64, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    source, schemes, wanted = made(LLAMA | extents | heads), ["nvfp4_wo", "fp8_block"], []
    bridge.convert(source, "megatron", out=tmp_path / "out", spec="local", vocab_multiple=16)
    for scheme in schemes:
        bridge.convert(source, "vllm", scheme, tmp_path / scheme, verify=False)
        wanted.append(bridge.live.digest(tmp_path / scheme))
    ranks = Processes({"world": 2, "pp": 2, "vp": 2}, tmp_path / "store")
    assert ranks.ask(megatron_process.virtual, source, str(tmp_path / "out"), schemes) == [wanted] * 2
    ranks.close()


def test_one_error_ends_all_ranks(tmp_path: Path) -> None:
    directory = megatron_oracle.family("llama").save(tmp_path / "llama") / "iter_0000100"
    ranks = Processes({"world": 2, "tp": 2}, tmp_path / "store")
    for kind, (error, text) in FAILING.items():
        for told in ranks.ask(megatron_process.failing, "llama", str(directory), kind):
            assert told.startswith(error) and text in told and bool(told) == bool(error)
    ranks.close()
