"""vLLM's own update of a running model: each step gives the logits of a server that loads what `convert` writes."""

from __future__ import annotations

import json
import runpy
import subprocess
from typing import Any

import pytest

from tests.oracles import vllm_oracle
from tests.workflows.live.families import FIELDS

CELLS = [
    ("LlamaForCausalLM", None),
    ("LlamaForCausalLM", "int8_wo"),
    ("Qwen3ForCausalLM", "fp8_pc_pt"),
    ("Qwen3ForCausalLM", "nvfp4_wo"),
    ("Qwen3MoeForCausalLM", "fp8_block_dynamic"),
    ("Qwen3MoeForCausalLM", "int4:rtn"),
    ("DeepseekV3ForCausalLM", "fp8_block_dynamic"),
]
EXAMPLE = ("example", "fp8_pc_pt")


@pytest.fixture(scope="module")
def replies(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str | None], dict[str, Any]]:
    """One process answers all cells: importing vLLM takes ten seconds."""
    vllm_oracle.require()
    work = tmp_path_factory.mktemp("live")
    requests = [
        {"work": str(work / str(number)), "family": family, "fields": FIELDS[family], "scheme": scheme}
        for number, (family, scheme) in enumerate(CELLS)
    ]
    requests.append({"work": str(work / "example"), "scheme": EXAMPLE[1]})
    done = subprocess.run(
        [vllm_oracle.PYTHON, "-m", "tests.oracles.vllm_runtime.live_process"],
        input="\n".join(map(json.dumps, requests)), capture_output=True, text=True, cwd=vllm_oracle.ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip([*CELLS, EXAMPLE], map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_two_updates_equal_two_cold_loads(
    cell: tuple[str, str | None], replies: dict[tuple[str, str | None], dict[str, Any]]
) -> None:
    reply = replies[cell]
    assert "error" not in reply, reply["trace"]
    assert reply["differs"] == [0, 0]
    assert min(reply["moved"]) > 0.5  # weights of the update before would show
    assert reply["equal"] == [True, True]


@pytest.mark.slow
def test_a_policy_is_rewarded_for_what_vllm_answers_with_its_weights_of_each_step(
    replies: dict[tuple[str, str | None], dict[str, Any]],
) -> None:
    reply = replies[EXAMPLE]
    assert "error" not in reply, reply["trace"]
    assert reply["equal"] == [True] * 10
    assert reply["rewards"][-1] > reply["rewards"][0] + 0.2


def test_the_example_is_as_short_as_it_is_promised_and_learns_without_vllm() -> None:
    assert len((vllm_oracle.ROOT / "examples/train_live.py").read_text("utf-8").splitlines()) <= 80
    example = runpy.run_path(str(vllm_oracle.ROOT / "examples/train_live.py"))
    digests: list[str] = []
    rewards = example["train"](
        lambda policy, _: example["Here"](policy), None, lambda _, digest: digests.append(digest)
    )
    assert rewards[-1] > rewards[0] + 0.2 and len({*digests}) == 10
