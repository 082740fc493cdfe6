"""Ranks of FSDP2 that share a model hand over the tensors of the whole one, and end together if one of them fails."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.oracles.vllm_oracle import ROOT

EQUAL: list[tuple[dict[str, Any], set[str]]] = [
    ({"family": "LlamaForCausalLM", "scheme": None}, {"own"}),
    ({"family": "LlamaForCausalLM", "scheme": "fp8_pc_pt"}, {"own"}),
    ({"family": "LlamaForCausalLM", "scheme": "fp8_block", "dtype": "float32"}, {"own", "whole"}),
    ({"family": "LlamaForCausalLM", "scheme": "nvfp4_wo"}, {"own"}),
    ({"family": "Qwen3ForCausalLM", "scheme": "int4:rtn"}, {"own"}),
    ({"family": "Qwen3MoeForCausalLM", "scheme": "fp8_block_dynamic"}, {"own", "whole"}),
    ({"family": "Qwen3MoeForCausalLM", "scheme": "nvfp4_wo"}, {"own"}),
    ({"family": "DeepseekV3ForCausalLM", "scheme": "int8_wo"}, {"own", "here"}),
]


class Trainers:
    """Processes that share models; each reply is that of every rank."""

    def __init__(self, ranks: int, work: Path) -> None:
        command = [sys.executable, "-P", "-m", "tests.workflows.live.rank_process"]
        self.ranks = [
            subprocess.Popen(
                [*command, str(rank), str(ranks), str(work)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                cwd=ROOT,
            )
            for rank in range(ranks)
        ]  # fmt: skip

    def ask(self, case: str, **named: Any) -> list[dict[str, Any]]:
        for process in self.ranks:
            assert process.stdin
            process.stdin.write(json.dumps([case, named]) + "\n")
            process.stdin.flush()
        lines = [process.stdout.readline() for process in self.ranks if process.stdout]
        replies = [json.loads(line) if line else {} for line in lines]
        assert not any("trace" in reply for reply in replies), replies
        return replies


@contextmanager
def running(ranks: int, work: Path) -> Iterator[Trainers]:
    trainers = Trainers(ranks, work)
    try:
        yield trainers
    finally:
        for process in trainers.ranks:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainers]:
    with running(2, tmp_path_factory.mktemp("ranks")) as trainers:
        yield trainers


def _named(value: dict[str, Any] | set[str]) -> str:
    return " ".join(map(str, value.values() if isinstance(value, dict) else sorted(value)))


@pytest.mark.slow
@pytest.mark.parametrize(("given", "places"), EQUAL, ids=_named)
def test_every_rank_yields_the_tensors_of_the_whole_model(
    given: dict[str, Any], places: set[str], pair: Trainers
) -> None:
    for reply in pair.ask("equal", **given):
        assert reply["differing"] == []
        assert {*reply["places"]} == places


@pytest.mark.slow
@pytest.mark.parametrize(("given", "places"), [EQUAL[n] for n in (0, 2, 3, 5)], ids=_named)
def test_ranks_encode_where_their_rows_are(given: dict[str, Any], places: set[str], pair: Trainers) -> None:
    wanted = [reply["received"] for reply in pair.ask("equal", **given)]
    for reply, received in zip(pair.ask("there", **given), wanted, strict=True):
        assert (reply["differing"], reply["hosted"], reply["received"]) == ([], [], received)
        assert {*reply["places"]} == places


@pytest.mark.slow
def test_codes_pass_between_ranks_and_not_weights(pair: Trainers) -> None:
    received = {}
    for scheme in (None, "fp8_pc_pt", "nvfp4_wo"):
        reply = pair.ask("equal", family="LlamaForCausalLM", scheme=scheme)[0]
        received[scheme] = reply["received"][0]
        # half of what is written, a byte a tensor, and padding of rows that two ranks cannot share evenly
        assert reply["made"] / 2 <= received[scheme] + 200 and received[scheme] < reply["made"] / 2 + 500
    assert received["fp8_pc_pt"] < 0.6 * received[None]  # embedding and head stay in bfloat16
    assert received["nvfp4_wo"] < 0.4 * received[None]


@pytest.mark.slow
def test_a_rank_yields_its_own_part_without_the_others(pair: Trainers) -> None:
    for reply in pair.ask("local", family="Qwen3MoeForCausalLM", scheme="fp8_pc_pt"):
        assert reply == {"differing": [], "received": 0, "sharded": 34, "owned": 30}
    for reply in pair.ask("local", family="LlamaForCausalLM", scheme="nvfp4_wo"):
        assert (
            reply["differing"] == [] and reply["received"] == 8 * 15
        )  # the amax of fourteen matrices, in one exchange


@pytest.mark.slow
def test_four_ranks_share_what_does_not_divide(tmp_path: Path) -> None:
    with running(4, tmp_path) as trainers:
        for case in ("equal", "local"):
            for reply in trainers.ask(case, family="Qwen3MoeForCausalLM", scheme="fp8_block_dynamic"):
                assert reply["differing"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("other-scheme", "LiveError", "bridge.tensors: rank 1 has another plan than rank 0"),
        ("refused", "UsageError", "memory=1 MB is too little"),
        ("nan", "SourceError", "model.layers.1.mlp.up_proj.weight: NaN in 1 block of rows"),
        ("nan-under-one-scale", "SourceError", "model.layers.1.mlp.up_proj.weight: holds NaN or infinity"),
        ("reshaped", "LiveError", "model.norm.weight: had shape (256,) when it was planned, and has (3,)"),
        ("ahead", "LiveError", "waited for the others, at most 8 seconds (timeout=)"),
        ("late", "LiveError", "iteration 1: rank"),
    ],
)
def test_one_error_ends_all_ranks_in_time(kind: str, error: str, text: str, pair: Trainers) -> None:
    for reply in pair.ask("failing", kind=kind):
        assert reply["error"] == error and text in reply["text"]
        assert reply["seconds"] < 20
    for reply in pair.ask("failing", kind="none"):
        assert not reply["error"]  # another model of the same ranks is not harmed


@pytest.mark.slow
def test_an_error_that_is_not_ours_keeps_its_words(pair: Trainers) -> None:
    other, own = pair.ask("failing", kind="memory")
    assert own["error"] == "RuntimeError" and own["text"] == "CUDA out of memory"
    assert "CUDA out of memory" in other["text"] and max(other["seconds"], own["seconds"]) < 8


@pytest.mark.slow
@pytest.mark.parametrize("last", [False, True])
def test_an_error_in_what_ranks_do_not_share_ends_all(last: bool, pair: Trainers) -> None:
    for reply in pair.ask("not_shared", last=last):
        assert reply["error"] == "SourceError" and "e_score_correction_bias: holds NaN" in reply["text"]
        assert reply["seconds"] < 8  # none waited for the others in vain


@pytest.mark.slow
def test_what_ranks_exchange_counts_as_memory_and_is_freed(pair: Trainers) -> None:
    for reply in pair.ask("held"):
        assert 0 < reply["held"] <= reply["counted"]
        assert reply["freed"]
        assert reply["again"] == 1  # a tensor that is not cut does not displace one that was gathered


@pytest.mark.slow
def test_a_rank_without_rows_yields_what_is_of_the_whole_matrix(tmp_path: Path) -> None:
    six_rows = {"num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 6}  # of k_proj: 2, 2, 2, and none
    with running(4, tmp_path) as trainers:
        for scheme in ("nvfp4_wo", "fp8_pc_pt", "int4:rtn"):
            for reply in trainers.ask("local", family="LlamaForCausalLM", scheme=scheme, **six_rows):
                assert reply["differing"] == []


@pytest.mark.slow
def test_ranks_are_told_that_one_died(tmp_path: Path) -> None:
    with running(2, tmp_path) as trainers:
        reply, nothing = trainers.ask("dead")
        assert nothing == {}
        assert reply["error"] == "LiveError" and "another one was lost or did not answer" in reply["text"]
