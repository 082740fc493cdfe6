"""`load` into models that several processes share: each fills its part, and an error of one is one of all."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bridge
from tests.models.decoder_families import build
from tests.oracles import megatron_oracle, torchtitan_oracle
from tests.oracles.server import processes
from tests.targets.dcp.test_torchtitan import LLAMA, made
from tests.workflows.load import load_process

pytestmark = pytest.mark.slow
DENSE, ROUTED = "LlamaForCausalLM", "Qwen3MoeForCausalLM"


class Processes:
    """As many processes as `world`; all run the same function at once."""

    def __init__(self, sizes: dict[str, int], store: Path) -> None:
        starts = [(rank, sizes, str(store)) for rank in range(sizes["world"])]
        self._pools = [ProcessPoolExecutor(1, processes(), load_process.start, arguments) for arguments in starts]

    def ask(self, function: Any, *args: Any) -> list[Any]:
        return [future.result() for future in self.begin(function, *args)]

    def begin(self, function: Any, *args: Any) -> list[Future[Any]]:
        return [pool.submit(function, *args) for pool in self._pools]

    def close(self) -> None:
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    ranks = Processes({"world": 2}, tmp_path_factory.mktemp("two") / "store")
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found = {}
    for name in (DENSE, ROUTED, "DeepseekV3ForCausalLM"):
        found[name] = str(tmp_path_factory.mktemp(name))
        build(name).save_pretrained(found[name])
    return found


@pytest.mark.parametrize("name", [DENSE, ROUTED, "DeepseekV3ForCausalLM"])
def test_fsdp2_model_is_that_of_from_pretrained(name: str, two: Processes, saved: dict[str, str]) -> None:
    results = two.ask(load_process.transformers, name, saved[name], {"dp": 2})
    assert [differ for differ, _, _ in results] == [[], []]
    for _, read, nbytes in results:
        assert 2 * read == nbytes  # bfloat16 into float32: the bytes of its part and no more


def test_two_dimensional_shards_are_that_of_from_pretrained(saved: dict[str, str], tmp_path: Path) -> None:
    ranks = Processes({"world": 4}, tmp_path / "store")
    results = ranks.ask(load_process.transformers, DENSE, saved[DENSE], {"dp": 2, "tp": 2})
    ranks.close()
    assert [differ for differ, _, _ in results] == [[]] * 4


@pytest.mark.parametrize("name", ["llama3", "qwen3-moe", "deepseek_v3"])
def test_torchtitans_sharded_model_has_the_tensors_of_its_own_adapter(name: str, two: Processes) -> None:
    known = torchtitan_oracle.family(name, "0.3")
    for whole in two.ask(load_process.titan, known.hf, known.config_hf, name, "0.3"):
        assert whole.keys() >= known.native.keys() - {key for key in known.native if "expert_bias" in key}
        assert not [key for key, value in whole.items() if not np.array_equal(value, known.native[key])]


CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "llama3": {
        "config.num_attention_heads: is 6 in the model, 3 in": {
            "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20,
        },
    },
    "qwen3-moe": {
        "config.rms_norm_eps: is ": {"rms_norm_eps": 1e-2},
        "config.rope_parameters.rope_theta: is 5000.0 in the model, 70000.0 in": {
            "rope_parameters": {"rope_type": "default", "rope_theta": 7e4},
        },
        "config.num_experts_per_tok: is 3 in the model, 2 in": {"num_experts_per_tok": 2},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("era", torchtitan_oracle.ERAS)
def test_a_torchtitan_model_of_another_configuration_is_refused(name: str, era: str) -> None:
    known = torchtitan_oracle.family(name, era)
    given = known.hf, known.config_hf, name, era, [{}, *CHANGES[name].values()]
    accepted, *texts = torchtitan_oracle._process(era).submit(load_process.titan_refusals, *given).result()
    assert not accepted
    for line, text in zip(CHANGES[name], texts, strict=True):
        assert line in text, text
        assert text.startswith("PlanError") and text.endswith("kept")


MEGATRON = [
    ({"world": 2, "tp": 2}, ("llama", "qwen3", "qwen3-moe", "deepseek")),
    ({"world": 2, "pp": 2}, ("llama", "mixtral", "qwen2-tied")),
    ({"world": 2, "ep": 2}, ("deepseek", "glm4-moe")),
    ({"world": 4, "tp": 2, "pp": 2}, ("qwen3",)),
]


@pytest.mark.parametrize(("sizes", "names"), MEGATRON)
def test_megatrons_ranks_have_the_tensors_of_its_own_load(
    sizes: dict[str, int], names: tuple[str, ...], tmp_path: Path
) -> None:
    ranks = Processes(sizes, tmp_path / "store")
    for name in names:
        directory = megatron_oracle.family(name).save(tmp_path / name) / "iter_0000100"
        results = ranks.ask(load_process.megatron, name, str(directory))
        assert not list(itertools.chain(*(differ for differ, _, _ in results)))
    ranks.close()


def test_chunks_of_a_virtual_pipeline_have_the_tensors_of_megatrons_own_load(tmp_path: Path) -> None:
    source = made(LLAMA | {"num_hidden_layers": 4})
    bridge.convert(source, "megatron", out=tmp_path / "out", spec="local", vocab_multiple=16)
    ranks = Processes({"world": 2, "pp": 2, "vp": 2}, tmp_path / "store")
    assert ranks.ask(load_process.virtual, source, str(tmp_path / "out")) == [[], []]
    ranks.close()


def test_a_megatron_model_of_other_heads_is_refused(two: Processes, tmp_path: Path) -> None:
    directory = str(megatron_oracle.family("llama").save(tmp_path / "llama") / "iter_0000100")
    changed = {"num_attention_heads": 3, "num_query_groups": 1, "kv_channels": 32}
    for text in two.ask(load_process.unlike, "llama", directory, changed):
        assert text.startswith("PlanError") and text.endswith("kept")
        assert "config.num_attention_heads: is 3 in the model, 6 in the checkpoint" in text


def test_a_checkpoint_that_one_process_cannot_read_changes_no_model(
    two: Processes, saved: dict[str, str], tmp_path: Path
) -> None:
    shutil.copytree(saved[DENSE], tmp_path / "cut")
    (tmp_path / "cut/model.safetensors").write_bytes((tmp_path / "cut/model.safetensors").read_bytes()[:-7])
    texts = two.ask(load_process.refused, DENSE, [saved[DENSE], str(tmp_path / "cut")])
    assert all(text.startswith("SourceError") and text.endswith("kept") for text in texts)
    assert "in worker 1 of 2" in texts[0]


def test_processes_with_different_checkpoints_are_refused(
    two: Processes, saved: dict[str, str], tmp_path: Path
) -> None:
    build(DENSE).float().save_pretrained(tmp_path)
    for text in two.ask(load_process.refused, DENSE, [saved[DENSE], str(tmp_path)]):
        assert text.startswith("PlanError") and "process 1 reads a checkpoint with other tensors" in text
        assert text.endswith("kept")


def test_an_error_while_one_process_reads_is_told_by_all(two: Processes, saved: dict[str, str]) -> None:
    for text in two.ask(load_process.fails_on, DENSE, saved[DENSE], 1, "read"):
        assert text.startswith("WriteError") and "the disk is gone; the model is partly filled" in text


def test_a_process_that_does_not_call_is_waited_for_no_longer_than_the_time_to_join(
    saved: dict[str, str], tmp_path: Path
) -> None:
    ranks = Processes({"world": 2}, tmp_path / "store")
    text, _ = ranks.ask(load_process.fails_on, DENSE, saved[DENSE], 1, "absent")
    ranks.close()
    assert text.startswith("UsageError") and "call this verb in all of them" in text and text.endswith("kept")


def test_a_process_that_dies_is_told_by_the_others(saved: dict[str, str], tmp_path: Path) -> None:
    ranks = Processes({"world": 2}, tmp_path / "store")
    one, other = ranks.begin(load_process.fails_on, DENSE, saved[DENSE], 1, "dies")
    assert "lost another one, which was killed" in one.result() and one.result().startswith("WriteError")
    with pytest.raises(BrokenProcessPool):
        other.result()
    ranks.close()
