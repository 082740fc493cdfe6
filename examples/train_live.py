"""Train a tiny policy; a server gets its quantized weights every step.

    python examples/train_live.py

The server here is a transformers model in this process, which takes plain weights. tests/workflows/live runs the same
loop with FP8 weights and vLLM's own model. With servers that run elsewhere, `update` is what their engines do:

    engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=bridge.live.vllm(source))
    engine.send_weights()
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import AutoModelForCausalLM

import bridge

MODEL = Path(__file__).parent / "models" / "tiny-llama"
PROMPT = torch.arange(40, 64)[None]
STEPS, SAMPLES, LIKED = 10, 64, 100  # the policy learns to answer with the first so many tokens


class Server(Protocol):
    """Answers with the weights that it got last."""

    def update(self, source: bridge.live.Tensors) -> None: ...

    def logits(self, ids: torch.Tensor) -> torch.Tensor: ...


class Here:
    """A server in this process, with plain weights."""

    def __init__(self, policy: Any) -> None:
        self.model = copy.deepcopy(policy)

    def update(self, source: bridge.live.Tensors) -> None:
        self.model.load_state_dict(dict(source))

    @torch.no_grad()
    def logits(self, ids: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self.model(ids).logits[0]
        return answer


def train(
    start: Callable[[Any, bridge.live.Tensors], Server], quant: str | None, check: Callable[[Any, str], None]
) -> list[float]:
    """The mean reward of each step. `start` makes the server; `check` is told the policy and the digest of a step."""
    torch.manual_seed(0)
    policy = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    optimizer = torch.optim.Adam(policy.parameters(), lr=2e-4)
    source = bridge.tensors(policy, "vllm", quant)
    server, rewards = start(policy, source), []
    for _ in range(STEPS):
        server.update(source)
        check(policy, source.digest())
        answers = torch.distributions.Categorical(logits=server.logits(PROMPT)).sample((SAMPLES,))  # samples, positions
        reward = (answers < LIKED).float()
        chosen = policy(PROMPT).logits[0].log_softmax(-1).expand(SAMPLES, -1, -1).gather(2, answers[..., None])
        loss = -((reward - reward.mean(0)) * chosen[..., 0]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rewards.append(float(reward.mean()))
    return rewards


if __name__ == "__main__":
    means = train(lambda policy, source: Here(policy), None, lambda policy, digest: print(digest[:16]))
    print("mean reward of each step:", " ".join(f"{mean:.2f}" for mean in means))
